"""Losses: InfoNCE over the texts of a batch, or a loss of Sentence-Transformers.

InfoNCE is ours, in place of the library's `MultipleNegativesRankingLoss`, for one reason: known false negatives (equal
texts, equal labels) are excluded from the denominator. Gradient caching and Matryoshka are the library's.
"""

import inspect
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from sentence_transformers import SentenceTransformer, SparseEncoder
from sentence_transformers.base.losses.gradcache import CachedLossMixin
from sentence_transformers.base.losses.merged_forward import embed_columns
from sentence_transformers.sentence_transformer import losses
from sentence_transformers.sparse_encoder import losses as sparse_losses
from sentence_transformers.util import all_gather, all_gather_with_grad, get_rank
from torch import Tensor, nn
from torch.nn.functional import normalize

from mote.remote.configuration_mote import alternatives
from mote.training.cleaning import INFO_NCE, LABEL_TYPES
from mote.training.data import TrainingSet
from mote.training.processes import processes
from mote.training.progress import count_texts
from mote.training.recipe import Recipe, RetrievalSettings, TaskSettings
from mote.training.trainer_settings import TrainingSettings


class InfoNCELoss(CachedLossMixin, nn.Module):
    """InfoNCE: each anchor must find its positive among the candidates of the batch (van den Oord et al. 2018).

    The loss of anchor i with the candidates D_i is -log(exp(s(a_i, p_i) / t) / Σ_{d in D_i} exp(s(a_i, d) / t)), s the
    cosine, or for sparse vectors the dot product. D_i holds the positive, the row's own hard negatives, and the
    positives and hard negatives of other rows, without known false negatives: texts equal to the anchor, or to a
    positive of any row with the same anchor or label.

    With a mini-batch size, rows are sorted by length, and each mini-batch is embedded by itself; with gradient caching
    (GradCache, Gao et al. 2021) once more for the backward pass, so that only one is in memory. Without a size, there
    is one forward pass per column.
    """

    def __init__(
        self,
        model: SentenceTransformer | SparseEncoder,
        task: TaskSettings,
        *,
        gather_across_devices: bool = False,
        mini_batch_size: int | None = None,
        gradient_caching: bool = True,
    ) -> None:
        super().__init__()
        self.model, self.task = model, task
        self.normalizes = not isinstance(model, SparseEncoder)
        self.gather_across_devices = gather_across_devices
        self.uses_gradient_cache = gradient_caching and mini_batch_size is not None
        self.mini_batch_size = mini_batch_size or 0

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None) -> Tensor:
        """Compute the loss of a batch; `labels` [B, columns + 1 or more] begin with the ids of texts and group."""
        features = list(sentence_features)
        if not self.mini_batch_size:
            return self.calculate_loss([[column] for column in embed_columns(self.model, features)], labels)
        features, labels = _sorted_by_length(features, labels)
        if self.uses_gradient_cache:
            return self.forward_cached(features, labels)
        passes = [self.embed_minibatch_iter(column, with_grad=True, copy_random_state=False) for column in features]
        return self.calculate_loss([[embeddings for embeddings, _ in column] for column in passes], labels)

    def compute_loss_from_embeddings(self, embeddings: list[Tensor], labels: Tensor | None = None) -> Tensor:
        """Compute the loss from the embeddings of each column, as `SpladeLoss` requires."""
        return self.calculate_loss([[column] for column in embeddings], labels)

    def calculate_loss(
        self, reps: list[list[Tensor]], labels: Tensor | None = None, *, with_backward: bool = False
    ) -> Tensor:
        """Compute the loss from each column's mini-batches of embeddings [b, H], with gradients of these if wanted."""
        columns = [torch.cat(column).float() for column in reps]  # each [B, H]
        if self.normalizes:
            columns = [normalize(column, dim=-1) for column in columns]
        rows = columns[0].shape[0]
        first = 0
        if self.gather_across_devices:
            columns = [all_gather_with_grad(column) for column in columns]
            labels = None if labels is None else all_gather(labels)
            first = get_rank() * rows
        leaves = [column.detach().requires_grad_() for column in columns] if with_backward else columns
        chunk = self.mini_batch_size or rows
        total = columns[0].new_zeros(())
        for begin in range(first, first + rows, chunk):
            index = torch.arange(begin, min(begin + chunk, first + rows), device=total.device)
            loss = self._sum_over(index, leaves, labels) / rows
            if with_backward:
                loss.backward()
                loss = loss.detach()
            total = total + loss
        if with_backward:
            # Once through the gathering and the normalisation, for all chunks.
            torch.autograd.backward(columns, [leaf.grad for leaf in leaves])
        return total

    def _sum_over(self, index: Tensor, columns: list[Tensor], labels: Tensor | None) -> Tensor:
        """Sum the losses of the rows `index` [b], with the texts of all rows, columns of [N, H], as candidates."""
        anchors, *documents = columns
        known = _FalseNegatives(labels, columns, self.task.in_batch_negatives)
        loss = self._info_nce(anchors[index], torch.cat(documents), index, known.of_documents(index))
        if self.task.symmetric:
            back = self._info_nce(documents[0][index], anchors, index, known.of_anchors(index))
            loss = (loss + back) / 2
        return loss

    def _info_nce(self, queries: Tensor, candidates: Tensor, target: Tensor, excluded: Tensor) -> Tensor:
        # bf16 is too coarse for a cosine at t = 0.03.
        with torch.autocast(queries.device.type, enabled=False):
            scores = queries @ candidates.T / self.task.temperature  # [b, candidates]
        scores = scores.masked_fill(excluded, -torch.inf)
        return nn.functional.cross_entropy(scores, target, reduction="sum")


class BlendedLoss(InfoNCELoss):
    """InfoNCE of blended batches: the sum of the losses of each dataset's rows, weighted by their share of the batch.

    So it is the mean over the rows, each with the temperature and the other settings of its task. Only rows of the same
    dataset are negatives of each other. `parts` hold each dataset's settings and number of columns: further columns of
    a batch are placeholders for negatives that its rows lack.
    """

    def __init__(self, model: SentenceTransformer, parts: list[tuple[TaskSettings, int]], **settings: Any) -> None:
        super().__init__(model, parts[0][0], **settings)
        # A list, not modules: they have no weights of their own.
        self.parts = [(InfoNCELoss(model, task), count) for task, count in parts]

    def _sum_over(self, index: Tensor, columns: list[Tensor], labels: Tensor | None) -> Tensor:
        """Sum the losses of the rows `index` [b]; the last of `labels` [N, columns + 2] are the datasets' numbers."""
        assert labels is not None
        # Caching needs a gradient of each column.
        total = torch.stack([column.sum() for column in columns]).sum() * 0
        for number, (loss, count) in enumerate(self.parts):
            rows = (labels[:, -1] == number).nonzero().flatten()
            own = torch.isin(rows, index).nonzero().flatten()
            if len(own):
                of_part = torch.cat([labels[rows, :count], labels[rows, -2:-1]], dim=1)
                total = total + loss._sum_over(own, [column[rows] for column in columns[:count]], of_part)
        return total


def _sorted_by_length(features: list[dict[str, Any]], labels: Tensor | None) -> tuple[Any, Tensor | None]:
    """Sort the rows of a batch by length, so that the mini-batches need little padding; flash attention needs none."""
    if any("cu_seq_lens_q" in column for column in features):
        return features, labels
    lengths = torch.stack([column["attention_mask"].sum(dim=1) for column in features]).sum(dim=0)
    order = torch.argsort(lengths, stable=True)
    ordered = [
        {name: value[order] if isinstance(value, Tensor) else value for name, value in column.items()}
        for column in features
    ]
    return ordered, None if labels is None else labels[order]


class _FalseNegatives:
    """Masks of the candidates of the rows `index` to exclude from the denominator, [b, candidates]."""

    def __init__(self, labels: Tensor | None, columns: list[Tensor], in_batch: bool) -> None:
        self.rows, self.candidates, self.in_batch = columns[0].shape[0], len(columns) - 1, in_batch
        self.places = torch.arange(self.rows, device=columns[0].device)
        if labels is None:  # all texts and groups differ
            labels = torch.arange(self.rows * (len(columns) + 1), device=self.places.device).view(self.rows, -1)
        self.texts, self.groups = labels[:, : len(columns)], labels[:, len(columns)]  # [N, columns], [N]
        self.positives = _paired(self.groups, self.texts[:, 1]).sort().values  # [N], of all groups

    def of_documents(self, index: Tensor) -> Tensor:
        """Return the mask of all positives, then all first negatives, and so on."""
        documents = self.texts[:, 1:].T.flatten()[None]  # [1, candidates * N]
        mask = (documents == self.texts[index, :1]) | self._are_positives(self.groups[index, None], documents)
        own = self.places == index[:, None]  # [b, N]
        if not self.in_batch:
            mask |= ~own.repeat(1, self.candidates)
        mask[:, : self.rows] &= ~own
        return mask

    def of_anchors(self, index: Tensor) -> Tensor:
        """Return the mask of all anchors, for positives that must find theirs."""
        positives = self.texts[index, 1:2]  # [b, 1]
        mask = self.texts[:, 0] == positives
        mask |= self.groups == self.groups[index, None]
        mask |= self._are_positives(self.groups[None], positives)
        return mask & (self.places != index[:, None])

    def _are_positives(self, groups: Tensor, texts: Tensor) -> Tensor:
        """Whether any row of the group has the text as its positive; groups and texts are broadcast."""
        wanted = _paired(groups, texts)
        place = torch.searchsorted(self.positives, wanted).clamp(max=self.rows - 1)
        return self.positives[place] == wanted


def _paired(groups: Tensor, texts: Tensor) -> Tensor:
    """Combine the ids of a group and a text into one number, with wrap-around."""
    return groups * 6364136223846793005 + texts


class SparsePartFlops(sparse_losses.FlopsLoss):
    """Sentence-Transformers' `FlopsLoss` on the sparse part of hybrid vectors, one number for each token."""

    def __init__(self, model: SparseEncoder, size: int) -> None:
        super().__init__(model)
        self.size = size

    def compute_loss_from_embeddings(self, embeddings: Tensor) -> Tensor:
        """Compute the loss of vectors [B, size + H]."""
        return super().compute_loss_from_embeddings(embeddings[:, : self.size])


class LoadBalancedLoss(nn.Module):
    """A loss around a token-routed model: each forward pass contributes its share of a step's load-balancing loss."""

    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, sentence_features: Iterable[dict[str, Any]], labels: Tensor | None) -> Any:
        """Compute the loss of a batch; a forward pass of n rows gets n times the share of one row."""
        features = list(sentence_features)
        rows = sum(count_texts(column) for column in features)
        for column in features:
            column["balance_share"] = 1 / rows
        return self.loss(features, labels)


def check_loss(task: str, settings: TaskSettings, *, sparse: bool = False) -> None:
    """Check that the loss of a task exists, and heeds all settings; `ValueError` if not."""
    names = [INFO_NCE] if sparse else [*LABEL_TYPES]
    kind = "loss of sparse vectors" if sparse else "loss"
    taught = LABEL_TYPES.get(settings.loss) == "embeddings"
    problems = {
        f"unknown {kind} {settings.loss!r}." + alternatives(settings.loss, names): settings.loss not in names,
        "InfoNCE takes no loss_arguments": settings.loss == INFO_NCE and settings.loss_arguments,
        "a symmetric loss needs in-batch negatives": settings.symmetric and not settings.in_batch_negatives,
        f"symmetric and in_batch_negatives are settings of InfoNCE, not of {settings.loss}": (
            settings.loss != INFO_NCE and (settings.symmetric or not settings.in_batch_negatives)
        ),
        f"{settings.loss} needs a teacher": taught and settings.teacher is None,
        f"{settings.loss} takes no teacher": not taught and settings.teacher is not None,
    }
    for problem, has_it in problems.items():
        if has_it:
            raise ValueError(f"Task {task!r}: {problem}")


def build_loss(model: Any, training_set: TrainingSet, recipe: Recipe) -> nn.Module:
    """Build the loss of a training set, for the processes that train together."""
    task, training, count = training_set.settings, recipe.training, processes().num_processes
    if training.mini_batch_size is not None and training.batch_size // count <= training.mini_batch_size:
        training = training.model_copy(update={"mini_batch_size": None})  # caching would only take longer
    sparse = recipe.retrieval.kind != "dense"
    gathered = training.cross_device_negatives and count > 1
    loss: nn.Module
    if task.loss == INFO_NCE:
        settings: dict[str, Any] = {
            "gather_across_devices": gathered,
            "mini_batch_size": None if sparse else training.mini_batch_size,
            "gradient_caching": training.gradient_caching,
        }
        parts = [(part.settings, len(part.column_tasks)) for part in training_set.parts]
        blended = task.batches == "blended"  # otherwise, the rows of one part are negatives of those of another
        loss = BlendedLoss(model, parts, **settings) if blended else InfoNCELoss(model, task, **settings)
    else:
        loss = _library_loss(model, training_set, training, gathered)
    if sparse:
        return _splade(model, loss, recipe.retrieval, training.mini_batch_size)
    if training.matryoshka:
        width = model.get_embedding_dimension()
        halves = [width, *(width // 2**n for n in range(1, 16) if width // 2**n >= min(64, width // 2))]
        loss = losses.MatryoshkaLoss(model, loss, halves if training.matryoshka == "halves" else training.matryoshka)
    return loss


def _splade(model: Any, loss: nn.Module, retrieval: RetrievalSettings, mini_batch_size: int | None) -> nn.Module:
    """Add the sparsity losses of SPLADE; those of a hybrid model apply to the sparse part of its vectors."""
    weights: dict[str, Any] = {name: value for name, value in retrieval if name.endswith("_regularizer_weight")}
    if retrieval.kind == "hybrid":
        for side in ("query", "document"):
            weights[f"{side}_regularizer"] = SparsePartFlops(model, model[0].config.vocab_size)
    if mini_batch_size is None:
        return sparse_losses.SpladeLoss(model, loss, **weights)
    return sparse_losses.CachedSpladeLoss(model, loss, **weights, mini_batch_size=mini_batch_size)


def _library_loss(model: Any, training_set: TrainingSet, training: TrainingSettings, gathered: bool) -> Any:
    """Build a loss of Sentence-Transformers, with those of the recipe's settings that it has arguments for."""
    task = training_set.settings
    cls: Any = getattr(losses, task.loss)
    settings = {"gather_across_devices": gathered, "mini_batch_size": training.mini_batch_size}
    if training_set.label_type == "embeddings":
        width = np.shape(training_set.rows[0]["label"])[-1]
        settings["projection_dim"] = None if width == model.get_embedding_dimension() else width
    takes = inspect.signature(cls).parameters
    given = {name: value for name, value in settings.items() if name in takes and value is not None}
    return cls(model, **(given | task.loss_arguments))
