"""What is minimised: InfoNCE over the texts of a batch, or any loss of Sentence-Transformers.

InfoNCE is here, and not the library's `MultipleNegativesRankingLoss`, for one reason: texts that are known not to be
negatives of each other (equal texts, equal labels) are left out of the denominator. Gradient caching, the forward
passes and Matryoshka are the library's.
"""

import inspect
from collections.abc import Iterable
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.losses.gradcache import CachedLossMixin
from sentence_transformers.base.losses.merged_forward import embed_columns
from sentence_transformers.sentence_transformer import losses
from sentence_transformers.util import all_gather, all_gather_with_grad, get_rank
from torch import Tensor, nn
from torch.nn.functional import normalize

from configuration_mote import alternatives
from mote.inference.loading import load_encoder
from mote.training.progress import count_texts
from mote.training.recipe import TaskSettings, TrainingSettings

INFO_NCE = "InfoNCE"

UNFIT = {  # of Sentence-Transformers' losses
    "AdaptiveLayerLoss": "it is made around another loss",
    "ContrastiveTensionLoss": "it needs a data loader of its own",
    "DenoisingAutoEncoderLoss": "it needs damaged texts and a decoder",
    "DistillKLDivLoss": "it needs a teacher's scores; EmbedDistillLoss and MSELoss learn from its embeddings",
    "MarginMSELoss": "it needs a teacher's scores; EmbedDistillLoss and MSELoss learn from its embeddings",
    "Matryoshka2dLoss": "it is made around another loss",
    "MatryoshkaLoss": "it is made around another loss: set training.matryoshka",
    "SoftmaxLoss": "it needs classes of pairs",
}


class InfoNCELoss(CachedLossMixin, nn.Module):
    """InfoNCE: each anchor is to find its positive among the candidates of the batch (van den Oord et al. 2018).

    The loss of anchor i with the candidates D_i is -log(exp(s(a_i, p_i) / t) / Σ_{d in D_i} exp(s(a_i, d) / t)), s the
    cosine. D_i holds the positive, the row's own hard negatives, and the positives and hard negatives of other rows,
    apart from those that are known to be no negatives: texts equal to the anchor, and to a positive of any row with the
    same anchor or label.

    Args:
        model: What embeds.
        temperature: t.
        symmetric: Add the same loss of positives that are to find their anchors, and halve the sum.
        in_batch_negatives: Whether candidates of other rows count.
        gather_across_devices: Whether other rows are those of all processes, or those of this one.
        mini_batch_size: Rows of a forward pass; the gradients of embeddings are cached in between (GradCache, Gao et
            al. 2021). None: one forward pass per column, no caching.
    """

    def __init__(
        self,
        model: SentenceTransformer,
        temperature: float,
        *,
        symmetric: bool = False,
        in_batch_negatives: bool = True,
        gather_across_devices: bool = False,
        mini_batch_size: int | None = None,
    ) -> None:
        """Keep the settings."""
        super().__init__()
        self.model = model
        self.temperature = temperature
        self.symmetric = symmetric
        self.in_batch_negatives = in_batch_negatives
        self.gather_across_devices = gather_across_devices
        self.uses_gradient_cache = mini_batch_size is not None
        self.mini_batch_size = mini_batch_size or 0

    def forward(self, sentence_features: Iterable[dict[str, Tensor]], labels: Tensor | None) -> Tensor:
        """Compute the loss of a batch.

        Args:
            sentence_features: Of the anchors, the positives, and each column of hard negatives.
            labels: [B, columns + 1]: the identity of each text, and of the group (label or anchor) of each row, as
                `mote.training.data` makes them. None: nothing is known of the rows.

        Returns:
            A scalar.
        """
        sentence_features = list(sentence_features)
        if self.uses_gradient_cache:
            return self.forward_cached(*_sorted_by_length(sentence_features, labels))
        embeddings = embed_columns(self.model, sentence_features)
        return self.calculate_loss([[column] for column in embeddings], labels)

    def calculate_loss(
        self, reps: list[list[Tensor]], labels: Tensor | None = None, *, with_backward: bool = False
    ) -> Tensor:
        """Compute the loss from embeddings, in chunks of rows where gradients are cached.

        Args:
            reps: Of each column its embeddings, in mini-batches of [b, H].
            labels: As in `forward`.
            with_backward: Propagate back to the embeddings, and return a scalar without a graph.
        """
        with torch.autocast(reps[0][0].device.type, enabled=False):  # a cosine in bf16 is too coarse at t = 0.03
            return self._calculate_loss(reps, labels, with_backward)

    def _calculate_loss(self, reps: list[list[Tensor]], labels: Tensor | None, with_backward: bool) -> Tensor:
        columns = [normalize(torch.cat(column).float(), dim=-1) for column in reps]  # each [B, H]
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
        if with_backward:  # once through the gathering and the normalisation, for all chunks
            torch.autograd.backward(columns, [leaf.grad for leaf in leaves])
        return total

    def _sum_over(self, index: Tensor, columns: list[Tensor], labels: Tensor | None) -> Tensor:
        """Sum the losses of the rows `index` [b], with the texts of all rows, columns of [N, H], as candidates."""
        anchors, *documents = columns
        known = _NotNegative(labels, columns, self.in_batch_negatives)
        loss = self._info_nce(anchors[index], torch.cat(documents), index, known.of_documents(index))
        if self.symmetric:
            back = self._info_nce(documents[0][index], anchors, index, known.of_anchors(index))
            loss = (loss + back) / 2
        return loss

    def _info_nce(self, queries: Tensor, candidates: Tensor, target: Tensor, left_out: Tensor) -> Tensor:
        scores = queries @ candidates.T / self.temperature  # [b, candidates]
        scores = scores.masked_fill(left_out, -torch.inf)
        return nn.functional.cross_entropy(scores, target, reduction="sum")

    def get_config_dict(self) -> dict[str, Any]:
        """Describe the loss for the model card."""
        names = ("temperature", "symmetric", "in_batch_negatives", "gather_across_devices")
        return {name: getattr(self, name) for name in names}


def _sorted_by_length(
    features: list[dict[str, Any]], labels: Tensor | None
) -> tuple[list[dict[str, Any]], Tensor | None]:
    """Put the rows of a batch in the order of their lengths, so that mini-batches are of texts that are alike.

    A mini-batch is as wide as its longest text; the order of the rows makes no difference to the loss. Texts that flash
    attention has end to end have no width.
    """
    if any("cu_seq_lens_q" in column for column in features):
        return features, labels
    lengths = torch.stack([column["attention_mask"].sum(dim=1) for column in features]).sum(dim=0)
    order = torch.argsort(lengths, stable=True)
    ordered = [
        {name: value[order] if isinstance(value, Tensor) else value for name, value in column.items()}
        for column in features
    ]
    return ordered, None if labels is None else labels[order]


class _NotNegative:
    """Which candidates of the rows `index` are left out of the denominator, [b, candidates]."""

    def __init__(self, labels: Tensor | None, columns: list[Tensor], in_batch: bool) -> None:
        self.rows, self.candidates = columns[0].shape[0], len(columns) - 1
        self.device, self.in_batch = columns[0].device, in_batch
        self.texts = self.groups = None
        if labels is not None and labels.dim() == 2:
            self.texts, self.groups = labels[:, : len(columns)], labels[:, -1]  # [N, columns], [N]
            self.positives = _paired(self.groups, self.texts[:, 1]).sort().values  # [N], of all groups

    def of_documents(self, index: Tensor) -> Tensor:
        """Of all positives, then all first negatives, and so on."""
        mask = torch.zeros(len(index), self.candidates * self.rows, dtype=torch.bool, device=self.device)
        if self.texts is not None and self.groups is not None:
            documents = self.texts[:, 1:].T.flatten()[None]  # [1, candidates * N]
            mask |= documents == self.texts[index, :1]
            mask |= self._are_positives(self.groups[index, None], documents)
        own = self._own(index)
        if not self.in_batch:
            mask |= ~own.repeat(1, self.candidates)
        mask[:, : self.rows] &= ~own
        return mask

    def of_anchors(self, index: Tensor) -> Tensor:
        """Of all anchors, for positives that look for theirs."""
        mask = torch.zeros(len(index), self.rows, dtype=torch.bool, device=self.device)
        if self.texts is not None and self.groups is not None:
            anchors, positives = self.texts[None, :, 0], self.texts[index, 1:2]  # [1, N], [b, 1]
            mask |= anchors == positives
            mask |= self.groups[None] == self.groups[index, None]
            mask |= self._are_positives(self.groups[None], positives)
        return mask & ~self._own(index)

    def _are_positives(self, groups: Tensor, texts: Tensor) -> Tensor:
        """Tell, of groups and texts that broadcast, whether some row of the group has the text as its positive."""
        wanted = _paired(groups, texts)
        place = torch.searchsorted(self.positives, wanted).clamp(max=self.rows - 1)
        return self.positives[place] == wanted

    def _own(self, index: Tensor) -> Tensor:
        return torch.arange(self.rows, device=self.device)[None] == index[:, None]


def _paired(groups: Tensor, texts: Tensor) -> Tensor:
    """Make one number of the identities of a group and a text; it wraps around, as hashes may."""
    return groups * 6364136223846793005 + texts


class LoadBalancedLoss(nn.Module):
    """A loss around a token-routed model: each forward pass contributes its share of a step's load-balancing loss.

    Args:
        loss: The loss.
    """

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


def check_loss(task: str, settings: TaskSettings) -> None:
    """Make sure that the loss of a task exists and takes its arguments.

    Raises:
        ValueError: If it does not.
    """
    if settings.loss == INFO_NCE:
        if settings.loss_arguments:
            raise ValueError(
                f"Task {task!r}: InfoNCE takes no loss_arguments; its settings are temperature, symmetric and "
                "in_batch_negatives"
            )
        if settings.symmetric and not settings.in_batch_negatives:
            raise ValueError(f"Task {task!r}: without in-batch negatives no positive has another anchor to choose")
        return
    names = [name for name in losses.__all__ if name.endswith("Loss")]
    if settings.loss not in names:
        raise ValueError(
            f"Task {task!r}: unknown loss {settings.loss!r}." + alternatives(settings.loss, [INFO_NCE, *names])
        )
    if settings.loss in UNFIT:
        raise ValueError(f"Task {task!r}: a recipe cannot have the loss {settings.loss}: {UNFIT[settings.loss]}")
    parameters = _parameters(settings.loss)
    known = parameters.keys()
    for name, parameter in parameters.items():
        if name not in settings.loss_arguments and parameter.default is parameter.empty:
            raise ValueError(f"Task {task!r}: {settings.loss} needs {name!r} among its loss_arguments")
    for name in settings.loss_arguments:
        if name not in known:
            raise ValueError(
                f"Task {task!r}: {settings.loss} has no argument {name!r}." + alternatives(name, sorted(known))
            )


def _parameters(loss: str) -> dict[str, inspect.Parameter]:
    """Return what a loss of the library takes beside the model; a deprecated class hides it behind `__new__`."""
    return dict(list(inspect.signature(getattr(losses, loss).__init__).parameters.items())[2:])


def build_loss(
    model: SentenceTransformer,
    task: TaskSettings,
    training: TrainingSettings,
    processes: int = 1,
    replicated: bool = False,
    label_dim: int | None = None,
) -> nn.Module:
    """Make the loss of a training set.

    Args:
        model: What embeds.
        task: The settings of the set's task.
        training: For gradient caching, negatives of other processes, and Matryoshka.
        processes: That train together.
        replicated: Whether each of them holds the whole model, in torch's DDP.
        label_dim: Width of a teacher's embeddings, where these are the labels.
    """
    if replicated and training.mini_batch_size is None:
        # With two experts in a step, DDP stops at two forward passes before one backward pass. Gradient caching does
        # one after the other, and gives the same gradients.
        training = training.model_copy(update={"mini_batch_size": training.batch_size // processes})
    if task.loss == INFO_NCE:
        loss: nn.Module = InfoNCELoss(
            model,
            task.temperature,
            symmetric=task.symmetric,
            in_batch_negatives=task.in_batch_negatives,
            gather_across_devices=training.cross_device_negatives and processes > 1,
            mini_batch_size=training.mini_batch_size,
        )
    else:
        loss = _library_loss(model, task, training, processes, label_dim)
    if training.matryoshka:
        loss = losses.MatryoshkaLoss(model, loss, training.matryoshka)
    return loss


def _library_loss(
    model: SentenceTransformer, task: TaskSettings, training: TrainingSettings, processes: int, label_dim: int | None
) -> nn.Module:
    """Make a loss of Sentence-Transformers, with the recipe's settings where it has arguments for them."""
    cls = getattr(losses, task.loss)
    takes = _parameters(task.loss)
    arguments = dict(task.loss_arguments)
    if "mini_batch_size" in takes and training.mini_batch_size is not None:
        arguments.setdefault("mini_batch_size", training.mini_batch_size)
    if "gather_across_devices" in takes:
        arguments.setdefault("gather_across_devices", training.cross_device_negatives and processes > 1)
    if "projection_dim" in takes and label_dim not in (None, model.get_embedding_dimension()):
        arguments.setdefault("projection_dim", label_dim)
    if isinstance(arguments.get("guide"), str):
        arguments["guide"] = load_encoder(arguments["guide"])
    return cls(model, **arguments)
