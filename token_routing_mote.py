"""Token-level routing: the classic mixture of experts, as the baseline that task experts are compared with.

In a routed block the dense layer stays as it is, its attention and its norms; its feed-forward network is replaced by
experts, each at first a copy of it, and a linear router that sends each token to the best few of them.

- Nothing is kept on the side: what one forward pass wants of its routing (`TokenRouting`) is an argument of the block.
- The load-balancing loss is no term of anyone's loss. It gives its gradient to the router where it arises, in the
  backward pass through the block, so that every loss and every trainer has it without knowing of it.
- The experts are computed by transformers (`experts_implementation="grouped_mm"`, `"batched_mm"`); `"eager"` is the
  loop below, the reference.

This file is copied into saved models like `modeling_mote.py`, which imports it. Methods: Fedus et al., "Switch
Transformers", 2021 (arXiv:2101.03961), section 2.2, for router and loss; Komatsuzaki et al., "Sparse Upcycling", 2022
(arXiv:2212.05055), for copies of a dense network as experts and for normalised weights; Nussbaum and Duderstadt,
"Training Sparse Mixture Of Experts Text Embedding Models", 2025 (arXiv:2502.07972), Nomic Embed v2, for both in a text
encoder.
"""

from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.integrations.moe import use_experts_implementation

try:
    from .configuration_mote import MoTEConfig, alternatives  # type: ignore[import-not-found]
except ImportError:  # imported as an installed top-level module rather than as remote code
    from configuration_mote import MoTEConfig, alternatives


class FeedForward(NamedTuple):
    """Where a dense layer has its feed-forward network. All names are paths in the layer.

    `module` gives way to the routed network. `up` are the projections from the hidden size, of a gated network the
    gate's first, or both in one; `down` is the one back, which becomes the identity if it lies outside of `module`.
    """

    module: str
    up: tuple[str, ...]
    down: str
    activation: str
    inner_dropout: str | None = None
    outer_dropout: str | None = None


_BERT = FeedForward("intermediate", ("intermediate.dense",), "output.dense", "intermediate.intermediate_act_fn")
_GATED = FeedForward("mlp", ("mlp.gate_proj", "mlp.up_proj"), "mlp.down_proj", "mlp.act_fn")

FEED_FORWARDS = {
    "nomic_bert": _GATED,
    "jina_embeddings_v3": FeedForward("mlp", ("mlp.fc1",), "mlp.fc2", "mlp.activation_fn"),
    "gte": _GATED._replace(inner_dropout="mlp.dropout"),
    "bert": _BERT,
    "roberta": _BERT,
    "xlm-roberta": _BERT,
    "camembert": _BERT,
    "electra": _BERT,
    "ernie": _BERT,
    "mpnet": _BERT,
    "distilbert": FeedForward("ffn", ("ffn.lin1",), "ffn.lin2", "ffn.activation", outer_dropout="ffn.dropout"),
    "modernbert": FeedForward("mlp", ("mlp.Wi",), "mlp.Wo", "mlp.act", inner_dropout="mlp.drop"),
    "eurobert": _GATED,
    "mistral": _GATED,
    "qwen2": _GATED,
    "qwen3": _GATED,
    "llama": _GATED,
    "gemma2": _GATED,
    "gemma3_text": _GATED,
}


def feed_forward_of(config: MoTEConfig) -> FeedForward:
    """Look up where the layers of the backbone have their feed-forward network.

    Raises:
        ValueError: If the architecture is not supported; the message says which are.
    """
    model_type = config.backbone_config.model_type
    if model_type not in FEED_FORWARDS:
        raise ValueError(
            f"A token router does not know the feed-forward network of the architecture {model_type!r}."
            + alternatives(model_type, FEED_FORWARDS)
        )
    return FEED_FORWARDS[model_type]


class TokenRouting(NamedTuple):
    """What a forward pass wants of its routed blocks; an argument of each.

    Attributes:
        token_mask: True for tokens, False for padding, which does not count in the loss, [B, L]. None: no padding.
        loss_weight: Factor of the load-balancing loss in this pass. 0: no such loss.
        record: Called by each block, in order, with its router's logits, [B, L, E].
    """

    token_mask: torch.Tensor | None = None
    loss_weight: float = 0.0
    record: Callable[[torch.Tensor], None] | None = None


def load_balancing_loss(
    router_logits: Sequence[torch.Tensor], token_mask: torch.Tensor | None = None, experts_per_token: int = 2
) -> torch.Tensor:
    """Compute Σ rᵢ pᵢ over the experts i, summed over the blocks.

    It is the loss of Switch Transformers, section 2.2, without its factors (`load_balancing` is ours). rᵢ is the
    fraction of the choices (`experts_per_token` for each token) that fall on expert i, pᵢ the router's mean
    probability for it. A block whose experts are equally busy has 1/E; one that always takes the same has up to 1/K.

    Args:
        router_logits: Of each block, [B, L, E].
        token_mask: 1 or True for the tokens that count, [B, L]. None: all.
        experts_per_token: How many experts each token goes through.

    Returns:
        A scalar in float32. Its gradient goes through the probabilities alone: choices have none.
    """
    losses = []
    for logits in router_logits:
        probabilities = logits.float().softmax(dim=-1)  # [B, L, E]
        index = probabilities.topk(experts_per_token, dim=-1).indices  # [B, L, K]
        chosen = torch.zeros_like(probabilities).scatter(-1, index, 1.0)  # [B, L, E]
        mask = torch.ones_like(probabilities[..., 0]) if token_mask is None else token_mask.to(probabilities)
        share = mask.unsqueeze(-1) / mask.sum().clamp(min=1)  # [B, L, 1], of each token in the means
        fractions = (share * chosen).flatten(0, -2).sum(dim=0) / experts_per_token  # [E]
        means = (share * probabilities).flatten(0, -2).sum(dim=0)  # [E]
        losses.append((fractions * means).sum())
    return torch.stack(losses).sum()


class _AttachLoss(torch.autograd.Function):
    """The identity on `hidden`; whatever loss is backpropagated through it, `loss` is as if added to that one."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(loss)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (loss,) = ctx.saved_tensors
        return gradients[0], torch.ones_like(loss)


@use_experts_implementation
class FeedForwardExperts(nn.Module):
    """The experts of a block, their weights stacked: [E, out, in], biases [E, out].

    Which attributes there are is transformers' convention for experts: `gate_up_proj` (gate's rows first) of a gated
    network, otherwise `up_proj`; `down_proj`; the same with `_bias`, both or neither. The decorator replaces `forward`
    by what `config._experts_implementation` names, unless that is `"eager"`.
    """

    has_gate: bool
    has_bias: bool
    act_fn: Callable[[torch.Tensor], torch.Tensor]
    dropout: nn.Module

    def __init__(self, config: MoTEConfig) -> None:
        """Make what `copies_of` fills: the decorator would overwrite `has_gate` and `has_bias`."""
        super().__init__()
        self.num_experts = len(config.experts)

    @classmethod
    def copies_of(cls, layer: nn.Module, network: FeedForward, config: MoTEConfig) -> "FeedForwardExperts":
        """Make as many copies of a layer's feed-forward network as the config has experts.

        Where only one of the two projections has a bias (`gte`), the other gets one that begins as zeros.
        """
        experts = cls(config)
        up: list[Any] = [layer.get_submodule(path) for path in network.up]
        down: Any = layer.get_submodule(network.down)
        experts.has_gate = sum(linear.out_features for linear in up) == 2 * down.in_features
        experts.has_bias = any(linear.bias is not None for linear in (*up, down))
        for name, linears in (("gate_up_proj" if experts.has_gate else "up_proj", up), ("down_proj", [down])):
            experts._stack(name, [linear.weight for linear in linears])
            if experts.has_bias:
                biases = [linear.bias for linear in linears]
                zeros = [linear.weight.new_zeros(linear.out_features) for linear in linears]
                experts._stack(name + "_bias", zeros if any(bias is None for bias in biases) else biases)
        experts.act_fn = attrgetter(network.activation)(layer)
        experts.dropout = _submodule_or_identity(layer, network.inner_dropout)
        return experts

    def _stack(self, name: str, parts: list[torch.Tensor]) -> None:
        """Make a parameter [E, …] of copies of the parts, one below the other."""
        dense = torch.cat(parts).detach()
        setattr(self, name, nn.Parameter(dense.repeat(self.num_experts, *[1] * dense.dim())))

    def _project(self, hidden: torch.Tensor, name: str, expert: int) -> torch.Tensor:
        bias = getattr(self, name + "_bias")[expert] if self.has_bias else None
        return nn.functional.linear(hidden, getattr(self, name)[expert], bias)

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        """Multiply the two halves, the first through the activation: [S, 2 I] → [S, I]. Called by transformers too."""
        gate, up = gate_up.chunk(2, dim=-1)
        return self.dropout(self.act_fn(gate) * up)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Run one expert after the other, each on its tokens.

        Args:
            hidden_states: [N, H].
            top_k_index: The experts of each token, [N, K].
            top_k_weights: Their weights, [N, K].

        Returns:
            The weighted sum of each token's experts, [N, H].
        """
        out = torch.zeros_like(hidden_states)
        for expert in range(self.num_experts):
            token, place = torch.where(top_k_index == expert)  # [n] each, of the tokens that chose it
            hidden = self._project(hidden_states[token], "gate_up_proj" if self.has_gate else "up_proj", expert)
            hidden = self._apply_gate(hidden) if self.has_gate else self.act_fn(hidden)  # [n, I]
            hidden = self._project(hidden, "down_proj", expert)
            weighted = hidden * top_k_weights[token, place, None]  # [n, H]
            out = out.index_add(0, token, weighted.to(out.dtype))
        return out


class TokenRoutedFeedForward(nn.Module):
    """A router and experts, in the place of a dense feed-forward network.

    Args:
        layer: The dense layer.
        network: Where that has its feed-forward network, of which the experts are copies.
        config: Says how many experts there are, how many a token goes through, and how they are weighted.
    """

    def __init__(self, layer: nn.Module, network: FeedForward, config: MoTEConfig) -> None:
        """Copy the dense network. The model's `post_init` gives the router its small random weights."""
        super().__init__()
        self.experts_per_token = config.experts_per_token
        self.normalize_router = config.normalize_router
        self.experts = FeedForwardExperts.copies_of(layer, network, config)
        self.dropout = _submodule_or_identity(layer, network.outer_dropout)
        like: Any = self.experts.down_proj  # [E, H, I]
        self.router = nn.Linear(like.shape[1], like.shape[0], bias=False, device=like.device, dtype=like.dtype)

    def forward(self, hidden_states: torch.Tensor, routing: TokenRouting) -> torch.Tensor:
        """Send each token through its experts.

        Args:
            hidden_states: [B, L, H].
            routing: Of this forward pass.

        Returns:
            [B, L, H].
        """
        logits = self.router(hidden_states)  # [B, L, E]
        weights, index = logits.float().softmax(dim=-1).topk(self.experts_per_token, dim=-1)  # [B, L, K]
        if self.normalize_router:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        out = self.experts(hidden_states.flatten(0, -2), index.flatten(0, -2), weights.flatten(0, -2))  # [B L, H]
        out = self.dropout(out.view_as(hidden_states))
        if routing.record is not None:
            routing.record(logits)
        if routing.loss_weight and self.training and torch.is_grad_enabled():
            loss = load_balancing_loss([logits], routing.token_mask, self.experts_per_token)
            out = _AttachLoss.apply(out, routing.loss_weight * loss)
        return out


class TokenRoutedBlock(nn.Module):
    """One block: the dense layer, shared by all tokens, around experts in the place of its feed-forward network.

    Args:
        layer: The dense layer of the backbone, taken over.
        network: Where it has its feed-forward network.
        config: Of the model.
    """

    def __init__(self, layer: nn.Module, network: FeedForward, config: MoTEConfig) -> None:
        """Turn a dense layer into a routed one."""
        super().__init__()
        self.feed_forward = TokenRoutedFeedForward(layer, network, config)
        self.place = network.module
        delattr(layer, network.module)
        if not network.down.startswith(network.module + "."):
            layer.set_submodule(network.down, nn.Identity())
        if hasattr(layer, "chunk_size_feed_forward"):
            layer.chunk_size_feed_forward = 0  # type: ignore[assignment]  # the mask knows whole sequences
        self.shared = layer
        if hasattr(layer, "attention_type"):  # ModernBERT reads it off its layers
            self.attention_type = layer.attention_type

    def forward(
        self, hidden_states: torch.Tensor, *args: Any, routing: TokenRouting | None = None, **kwargs: Any
    ) -> Any:
        """Run the layer.

        The layer calls its feed-forward network with hidden states alone, so each call has a layer of its own: a
        shallow copy whose feed-forward network has the routing of this call bound to it. That is also what gradient
        checkpointing calls again, and threads do not meet.

        Args:
            hidden_states: [B, L, H].
            *args: What the dense layer takes.
            routing: Of this forward pass.
            **kwargs: What the dense layer takes.

        Returns:
            What the dense layer gives: [B, L, H], in some architectures inside a tuple.
        """
        if routing is None:
            raise RuntimeError("The block was not told its routing: the backbone does not hand keyword arguments down")
        layer = object.__new__(type(self.shared))  # copy.copy in steps that torch.compile can follow
        layer.__dict__.update(self.shared.__dict__)
        layer.__dict__.pop("forward", None)  # of accelerate, bound to the original, whose devices are this block's
        layer.__dict__[self.place] = partial(self.feed_forward, routing=routing)
        return layer(hidden_states, *args, **kwargs)


def _submodule_or_identity(layer: nn.Module, path: str | None) -> nn.Module:
    return nn.Identity() if path is None else layer.get_submodule(path)
