"""Sparse vectors with a weight for each token of the vocabulary, and hybrid ones: sparse and dense from one pass.

A sparse encoder with a head for masked language modelling needs none of this: it uses Sentence-Transformers'
`SpladePooling`. `SparsePooling` can use the token embeddings in place of a head, as CoT-MoTE does in its Equation 4,
without the head's transform, its bias, and the special tokens (Ma et al. 2023, arXiv:2304.10195).

This file is only copied into saved models that need it; `modules.json` names its classes.
"""

import math
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch
from sentence_transformers.base.modules.module import Module
from sentence_transformers.util import select_max_active_dims
from transformers.dynamic_module_utils import custom_object_save

from .configuration_mote import require_known


class HighestLogits(torch.autograd.Function):
    """max_i h_i · e_v over the tokens i of each text: hidden states h [B, L, H], token embeddings e [V, H] → [B, V].

    Only the token with the highest logit gets a gradient, and only where the weight is not 0. So the logits [B, L, V]
    are never in memory at once, and the backward pass costs what the active weights do, not two products with the
    whole vocabulary.
    """

    LOGITS = 2**22  # computed at a time: what a processor's cache holds
    COLUMNS = 512  # at least: narrower products are slow

    @staticmethod
    def columns(kept: torch.Tensor) -> int:
        """Return the number of token embeddings to use at a time."""
        return max(HighestLogits.COLUMNS, HighestLogits.LOGITS // max(1, kept.numel()))

    @staticmethod
    def logits(hidden: torch.Tensor, embeddings: torch.Tensor, kept: torch.Tensor) -> Iterator[torch.Tensor]:
        """Compute the logits of a part of the vocabulary at a time, [B, L, v]; arguments as of `forward`."""
        states = hidden.masked_fill(~kept[..., None], 0)  # gives logits of 0
        for part in embeddings.split(HighestLogits.columns(kept)):
            yield states @ part.T

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, embeddings: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        """Return the highest logits, [B, V]; those of tokens that are not kept, by the mask [B, L], are 0."""
        parts = [logits.max(dim=1) for logits in HighestLogits.logits(hidden, embeddings, kept)]
        highest, places = (torch.cat(each, dim=1) for each in zip(*parts, strict=True))
        ctx.save_for_backward(hidden, embeddings, places, kept)
        return highest

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        """Return the gradients of hidden states and embeddings, from those of the highest logits [B, V]."""
        hidden, embeddings, places, kept = ctx.saved_tensors
        flat = hidden.reshape(-1, hidden.shape[2]).to(embeddings.dtype)
        of_hidden, of_embeddings = torch.zeros_like(flat), []
        gradient = gradient.to(embeddings.dtype) * kept.gather(1, places)
        size = HighestLogits.columns(kept)
        for part, of_part, place in zip(
            embeddings.split(size), gradient.T.split(size), places.T.split(size), strict=True
        ):
            tokens, texts = of_part.nonzero(as_tuple=True)  # in the order of the tokens
            factors, states = of_part[tokens, texts], texts * hidden.shape[1] + place[tokens, texts]
            of_embeddings.append(_sums(flat, states, factors, tokens, len(part)))
            order = states.argsort(stable=True)
            of_hidden += _sums(part, tokens[order], factors[order], states[order], len(flat))
        return of_hidden.view_as(hidden).to(hidden.dtype), torch.cat(of_embeddings), None


def _sums(
    rows: torch.Tensor, chosen: torch.Tensor, factors: torch.Tensor, targets: torch.Tensor, count: int
) -> torch.Tensor:
    """Add factors[n] · rows[chosen[n]] to result[targets[n]], with targets in order; the result has `count` rows."""
    starts = torch.searchsorted(targets, torch.arange(count, device=rows.device))
    return torch.nn.functional.embedding_bag(chosen, rows, starts, mode="sum", per_sample_weights=factors)


class SparsePooling(Module):
    """Pools hidden states into a sparse vector: weight v is max_i log(1 + ReLU(l_iv)), with l the logits of the tokens.

    Args:
        sparse_from: `embeddings`: the logits are hidden states times token embeddings, at all tokens but special ones
            (Equation 4). `head`: the logits of the model's head for masked language modelling, at all tokens (SPLADE).
    """

    config_keys = ["sparse_from"]

    def __init__(self, sparse_from: Literal["embeddings", "head"] = "embeddings") -> None:
        super().__init__()
        require_known(sparse_from, ["embeddings", "head"], "sparse_from")
        self.sparse_from = sparse_from

    def on_model_ready(self, model: Any) -> None:
        """Find the first module, whose network has the weights for the logits, without registering it a second time."""
        object.__setattr__(self, "transformer", model[0])

    @property
    def network(self) -> Any:
        """Network of the first module."""
        return self.transformer.model

    def sparse(self, features: dict[str, Any]) -> torch.Tensor:
        """Pool `token_embeddings` [B, L, H] into sparse vectors [B, V]."""
        hidden, tokens = features["token_embeddings"], features["input_ids"]
        if self.sparse_from == "head":
            states, kept = self.network.head(inputs_embeds=hidden).logits, torch.ones_like(tokens, dtype=torch.bool)
        else:
            tokenizer = self.transformer.tokenizer
            names = ("bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id", "pad_token_id")
            special = [number for name in names if (number := getattr(tokenizer, name, None)) is not None]
            states, kept = hidden, ~torch.isin(tokens, torch.tensor(special, device=tokens.device))
        if "cu_seq_lens_q" in features:  # flash attention: texts are concatenated in one row
            bounds = pairwise(features["cu_seq_lens_q"].tolist())
            highest = torch.cat([self._highest(states[:, a:b], kept[:, a:b]) for a, b in bounds])
        else:
            highest = self._highest(states, kept & features["attention_mask"].bool())
        return highest.relu().log1p()  # both preserve the order, so the maximum can be taken first

    def _highest(self, states: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        """Return the highest logits of kept tokens, [B, V], from the head's logits or the hidden states."""
        if self.sparse_from == "head":
            return states.masked_fill(~kept[..., None], 0).amax(dim=1)
        weight = self.network.get_input_embeddings().weight
        if torch.is_grad_enabled():
            return HighestLogits.apply(states, weight, kept)
        return torch.cat([logits.amax(dim=1) for logits in HighestLogits.logits(states, weight, kept)], dim=1)

    def forward(self, features: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Add `sentence_embedding` [B, V] to the features."""
        features["sentence_embedding"] = self.sparse(features)
        return features

    def get_embedding_dimension(self) -> int:
        """Return V, the size of the vocabulary."""
        return self.network.config.vocab_size

    def save(self, output_path: str, *args: Any, **kwargs: Any) -> None:
        """Save the settings, and this file next to the model's own code."""
        self.save_config(output_path)
        custom_object_save(self, Path(output_path).parent)


class HybridPooling(SparsePooling):
    """Joins the dense vector of the `Pooling` before it with a sparse one, so that dot products are hybrid scores.

    The vector is [√w · sparse, dense] (V + H): its dot product is that of the dense vectors plus w times that of the
    sparse ones. `encode(…, retrieval="dense")` and `retrieval="sparse"` give one of the two, from the same pass.

    Args:
        sparse_from: As in `SparsePooling`.
        weight: Weight w of the sparse score.
        max_active_dims: Number of sparse weights to keep per text outside of training, the largest. Default: all.
        retrieval: Default kind of vectors: `hybrid`, `dense` or `sparse`.
    """

    config_keys = ["sparse_from", "weight", "max_active_dims", "retrieval"]
    forward_kwargs = {"retrieval", "weight", "max_active_dims"}

    def __init__(
        self,
        sparse_from: Literal["embeddings", "head"] = "embeddings",
        weight: float = 1.0,
        max_active_dims: int | None = None,
        retrieval: str = "hybrid",
    ) -> None:
        super().__init__(sparse_from)
        self.weight, self.max_active_dims, self.retrieval = weight, max_active_dims, retrieval

    def forward(
        self,
        features: dict[str, Any],
        retrieval: str | None = None,
        weight: float | None = None,
        max_active_dims: int | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Replace the dense `sentence_embedding` [B, H] in the features by one of [B, V + H], or of [B, V].

        Kind of vectors and weight of the sparse score are the module's unless given. `encode` passes the number of
        weights that it will keep, which is an error where that would cut the dense vector, too.
        """
        retrieval = retrieval or self.retrieval
        weight = self.weight if weight is None else weight
        require_known(retrieval, ["hybrid", "dense", "sparse"], "retrieval")
        if max_active_dims is not None and retrieval != "sparse":
            raise ValueError(
                f"max_active_dims={max_active_dims} of `encode` or `SparseEncoder` would also cut the dense part: "
                f"leave it out, and for the sparse part set model[-1].max_active_dims = {max_active_dims}"
            )
        if retrieval == "dense":
            return features
        sparse = self.sparse(features)
        if self.max_active_dims is not None and not self.training:
            sparse = select_max_active_dims(sparse, self.max_active_dims)
        dense = features["sentence_embedding"]
        hybrid = torch.cat([math.sqrt(weight) * sparse.to(dense.dtype), dense], dim=-1)
        features["sentence_embedding"] = sparse if retrieval == "sparse" else hybrid
        return features

    def get_embedding_dimension(self) -> int:
        """Return V + H, H or V."""
        config = self.network.config
        sizes = {"dense": config.hidden_size, "sparse": config.vocab_size}
        return sizes.get(self.retrieval, sum(sizes.values()))
