"""Token-level routing: the classic mixture of experts, the baseline that task experts are compared with.

In a routed block, the dense layer keeps its attention and norms. Its feed-forward network is replaced by experts, which
start as copies of it, and a linear router that sends each token to the best few of them.

- Routing is an argument of the block (`TokenRouting`), never stored as state.
- The load-balancing loss is not added to the training loss; its gradient is injected in the block's backward pass, so
  it works with every loss and every trainer.
- The experts are computed by transformers (`experts_implementation="grouped_mm"`, `"batched_mm"`); `"eager"` is the
  loop below, the reference.

This file is only copied into saved models whose `auto_map` names it. Methods: Fedus et al., "Switch
Transformers", 2021 (arXiv:2101.03961), section 2.2, for router and loss; Komatsuzaki et al., "Sparse Upcycling", 2022
(arXiv:2212.05055), for copies of a dense network as experts and for normalised weights; Nussbaum and Duderstadt,
"Training Sparse Mixture Of Experts Text Embedding Models", 2025 (arXiv:2502.07972), Nomic Embed v2, for both in a text
encoder.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.integrations.moe import use_experts_implementation
from transformers.modeling_outputs import BaseModelOutputWithPooling

from .configuration_mote import PAPER_INSTRUCTIONS, MoTEConfig, require_known
from .modeling_mote import MoTEModel


class FeedForward(NamedTuple):
    """Paths of the feed-forward network in a dense layer.

    `module` holds the network. `up` are the projections from the hidden size (in a gated network, first the gate's, or
    both in one), `down` is the projection back, possibly outside of `module`.
    """

    module: str
    up: tuple[str, ...]
    down: str
    activation: str
    inner_dropout: str | None = None
    outer_dropout: str | None = None


_BERT = FeedForward("intermediate", ("intermediate.dense",), "output.dense", "intermediate.intermediate_act_fn")
_GATED = FeedForward("mlp", ("mlp.gate_proj", "mlp.up_proj"), "mlp.down_proj", "mlp.act_fn")

# By architecture, as in `ARCHITECTURES`.
FEED_FORWARDS = {
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "camembert", "electra", "ernie", "mpnet"), _BERT),
    **dict.fromkeys(("nomic_bert", "eurobert", "mistral", "qwen2", "qwen3", "llama", "gemma2", "gemma3_text"), _GATED),
    "gte": _GATED._replace(inner_dropout="mlp.dropout"),
    "jina_embeddings_v3": FeedForward("mlp", ("mlp.fc1",), "mlp.fc2", "mlp.activation_fn"),
    "distilbert": FeedForward("ffn", ("ffn.lin1",), "ffn.lin2", "ffn.activation", outer_dropout="ffn.dropout"),
    "modernbert": FeedForward("mlp", ("mlp.Wi",), "mlp.Wo", "mlp.act", inner_dropout="mlp.drop"),
}


class TokenRoutedConfig(MoTEConfig):
    """Configuration of a [`TokenRoutedModel`]: that of a MoTE, and settings named as in transformers.

    Here `experts` names groups of tasks, not feed-forward networks: a task only determines the instruction.

    Args:
        num_experts: Number of experts in a block. Default: the number of names in `experts`.
        num_experts_per_tok: Number of experts that each token goes through.
        norm_topk_prob: Scale the weights of a token's experts to sum to 1, so that a freshly upcycled model gives the
            dense model's output. With one expert per token, this weight is then always 1, and only the load-balancing
            loss trains the router. False: use the router's probabilities unscaled.
        router_aux_loss_coef: Factor of the load-balancing loss in training. 0: no such loss.
        router_aux_loss_type: Formula of this loss, a key of `LOSS_FACTORS`.
        shared_expert_bias: Whether the experts of a block share a single bias, [H], added once to the weighted sum of
            their outputs, as in Nomic Embed v2 as published.
    """

    model_type = "mote_token_routed"
    routes_by_task: ClassVar[bool] = False

    num_experts: int = None  # type: ignore[assignment]  # None stands for the default
    num_experts_per_tok: int = 2
    norm_topk_prob: bool = True
    router_aux_loss_coef: float = 0.005
    router_aux_loss_type: str = "equation_1"
    shared_expert_bias: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        """Fill in the defaults and validate."""
        if self.num_experts is None:
            self.num_experts = len(PAPER_INSTRUCTIONS if self.experts is None else self.experts)
        super().__post_init__(**kwargs)

    def validate(self) -> None:
        """Check the settings; raise `ValueError` on the first invalid one."""
        super().validate()
        total, count = self.num_experts, self.num_experts_per_tok
        if not 1 <= count <= total:
            raise ValueError(f"num_experts_per_tok must be from 1 to {total}, the number of experts, got {count}")
        require_known(self.router_aux_loss_type, LOSS_FACTORS, "router_aux_loss_type")

    def load_only(self, experts: str | Iterable[str]) -> None:
        """Raise `ValueError`: a text needs all experts."""
        raise ValueError("With token routing every text needs all experts: load the model without `experts=`")


class TokenRouting(NamedTuple):
    """The routing settings of one forward pass, an argument of each routed block."""

    token_mask: torch.Tensor | None = None  # True for tokens, False for padding, which the loss ignores, [B, L]
    loss_weight: float = 0.0  # factor of the load-balancing loss
    record: Callable[[torch.Tensor], None] | None = None  # given the router's logits of each block, [B, L, E]


# Formula of the load-balancing loss → what Σ rᵢ pᵢ is multiplied by in each of L blocks, for E experts and K per token.
LOSS_FACTORS: dict[str, Callable[[int, int, int], float]] = {
    "equation_1": lambda num_experts, num_experts_per_tok, num_blocks: 1.0,
    "megablocks": lambda num_experts, num_experts_per_tok, num_blocks: num_experts / num_experts_per_tok / num_blocks,
}


def load_balancing_loss(
    router_logits: Sequence[torch.Tensor],
    token_mask: torch.Tensor | None = None,
    num_experts_per_tok: int = 2,
    formula: str = "equation_1",
    num_blocks: int | None = None,
) -> torch.Tensor:
    """Compute the load-balancing loss of some blocks, from Σ rᵢ pᵢ over the experts i of each.

    rᵢ is the fraction of the tokens that go through expert i, so that all rᵢ add up to K (`num_experts_per_tok`); pᵢ
    is the router's mean probability for it. Balanced, the sum is K/E.

    - `"equation_1"`: its sum over the blocks (Nussbaum and Duderstadt, 2025, Equation 1, which is Switch Transformers'
      loss, section 2.2, without the factor E).
    - `"megablocks"`: its mean over the blocks, times E/K, so that it is 1 when balanced: how Nomic Embed v2 was trained
      (databricks/megablocks, `batched_load_balancing_loss`), except that padding is ignored here.

    Router logits are [B, L, E] for each block, the mask is [B, L]; the number of blocks is that of the whole model, if
    these are only some. The result is in float32. Its gradient flows through the probabilities only: the choice of
    experts has none.
    """
    factor = LOSS_FACTORS[formula](router_logits[0].shape[-1], num_experts_per_tok, num_blocks or len(router_logits))
    losses = []
    for logits in router_logits:
        probabilities = logits.float().softmax(dim=-1)  # [B, L, E]
        index = probabilities.topk(num_experts_per_tok, dim=-1).indices  # [B, L, K]
        chosen = torch.zeros_like(probabilities).scatter(-1, index, 1.0)  # [B, L, E]
        mask = torch.ones_like(probabilities[..., 0]) if token_mask is None else token_mask.to(probabilities)
        share = mask.unsqueeze(-1) / mask.sum().clamp(min=1)  # [B, L, 1], of each token in the means
        fractions = (share * chosen).flatten(0, -2).sum(dim=0)  # [E]
        means = (share * probabilities).flatten(0, -2).sum(dim=0)  # [E]
        losses.append((fractions * means).sum())
    return factor * torch.stack(losses).sum()


class _AttachLoss(torch.autograd.Function):
    """The identity on `hidden`, whose backward pass adds the gradient of `loss` to that of the training loss."""

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

    The attributes follow transformers' convention for experts: `gate_up_proj` (the gate's rows first) in a gated
    network, otherwise `up_proj`; `down_proj`; and both or neither of these with `_bias`. The decorator replaces
    `forward` by the implementation that `config._experts_implementation` names, unless that is `"eager"`.
    """

    has_gate: bool
    has_bias: bool
    act_fn: Callable[[torch.Tensor], torch.Tensor]
    dropout: nn.Module

    def __init__(self, config: TokenRoutedConfig) -> None:
        """Set only the number of experts: the decorator overwrites `has_gate` and `has_bias` after `__init__`."""
        super().__init__()
        self.num_experts = config.num_experts

    @classmethod
    def copies_of(cls, layer: nn.Module, network: FeedForward, config: TokenRoutedConfig) -> "FeedForwardExperts":
        """Make as many copies of a layer's feed-forward network as the config has experts.

        If only one of the two projections has a bias (`gte`), the other gets one of zeros.
        """
        experts = cls(config)
        up: list[Any] = [layer.get_submodule(path) for path in network.up]
        down: Any = layer.get_submodule(network.down)
        experts.has_gate = sum(linear.out_features for linear in up) == 2 * down.in_features
        experts.has_bias = not config.shared_expert_bias and any(linear.bias is not None for linear in (*up, down))
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
        """Multiply the two halves, the first activated: [S, 2 I] → [S, I]. Also called by transformers."""
        gate, up = gate_up.chunk(2, dim=-1)
        return self.dropout(self.act_fn(gate) * up)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """Return the weighted sum of each token's experts, [N, H], given the experts' indices and weights, [N, K] each.

        Runs one expert after another, each on the tokens routed to it.
        """
        out = torch.zeros_like(hidden_states)
        for expert in range(self.num_experts):
            token, rank = torch.where(top_k_index == expert)  # [n] each: the tokens that chose it
            hidden = self._project(hidden_states[token], "gate_up_proj" if self.has_gate else "up_proj", expert)
            hidden = self._apply_gate(hidden) if self.has_gate else self.act_fn(hidden)  # [n, I]
            hidden = self._project(hidden, "down_proj", expert)
            weighted = hidden * top_k_weights[token, rank, None]  # [n, H]
            out = out.index_add(0, token, weighted.to(out.dtype))
        return out


class TokenRoutedFeedForward(nn.Module):
    """A router and experts, copies of a dense layer's feed-forward network, in place of this network."""

    def __init__(self, layer: nn.Module, network: FeedForward, config: TokenRoutedConfig) -> None:
        super().__init__()
        self.num_experts_per_tok = config.num_experts_per_tok
        self.norm_topk_prob = config.norm_topk_prob
        self.experts = FeedForwardExperts.copies_of(layer, network, config)
        self.dropout = _submodule_or_identity(layer, network.outer_dropout)
        like: Any = self.experts.down_proj  # [E, H, I]
        # The model's post_init gives the router small random weights.
        self.router = nn.Linear(like.shape[1], like.shape[0], bias=False, device=like.device, dtype=like.dtype)
        self.bias = nn.Parameter(like.new_zeros(like.shape[1])) if config.shared_expert_bias else None  # [H]
        self.balance = partial(
            load_balancing_loss,
            num_experts_per_tok=config.num_experts_per_tok,
            formula=config.router_aux_loss_type,
            num_blocks=len(config.mote_layer_indices),
        )

    def forward(self, hidden_states: torch.Tensor, routing: TokenRouting) -> torch.Tensor:
        """Send each token through its experts: [B, L, H] → [B, L, H]."""
        logits = self.router(hidden_states)  # [B, L, E]
        weights, index = logits.float().softmax(dim=-1).topk(self.num_experts_per_tok, dim=-1)  # [B, L, K]
        if self.norm_topk_prob:
            weights = weights / weights.sum(dim=-1, keepdim=True)
        out = self.experts(hidden_states.flatten(0, -2), index.flatten(0, -2), weights.flatten(0, -2))  # [B L, H]
        if self.bias is not None:
            out = out + self.bias
        out = self.dropout(out.view_as(hidden_states))
        if routing.record is not None:
            routing.record(logits)
        if routing.loss_weight and self.training and torch.is_grad_enabled():
            loss = self.balance([logits], routing.token_mask)
            out = _AttachLoss.apply(out, routing.loss_weight * loss)
        return out


class TokenRoutedBlock(nn.Module):
    """One block: a dense layer, taken over and shared by all tokens, with experts as its feed-forward network."""

    def __init__(self, layer: nn.Module, network: FeedForward, config: TokenRoutedConfig) -> None:
        super().__init__()
        self.feed_forward = TokenRoutedFeedForward(layer, network, config)
        self.replaced = network.module
        delattr(layer, network.module)
        if not network.down.startswith(network.module + "."):
            layer.set_submodule(network.down, nn.Identity())
        if hasattr(layer, "chunk_size_feed_forward"):
            layer.chunk_size_feed_forward = 0  # type: ignore[assignment]  # the mask knows whole sequences
        self.shared = layer
        if hasattr(layer, "attention_type"):  # ModernBERT reads it off its layers
            self.attention_type = layer.attention_type

    def forward(self, hidden_states: torch.Tensor, *args: Any, routing: TokenRouting, **kwargs: Any) -> Any:
        """Run the layer: [B, L, H] → [B, L, H], in some architectures inside a tuple.

        The layer calls its feed-forward network with hidden states only, so each call gets its own layer: a shallow
        copy whose feed-forward network has the routing of this call bound to it. Gradient checkpointing calls the same
        copy again, and threads cannot interfere.
        """
        layer = object.__new__(type(self.shared))  # as copy.copy, in steps that torch.compile can trace
        layer.__dict__.update(self.shared.__dict__)
        layer.__dict__.pop("forward", None)  # set by accelerate, bound to the original
        layer.__dict__[self.replaced] = partial(self.feed_forward, routing=routing)
        return layer(hidden_states, *args, **kwargs)


def _submodule_or_identity(layer: nn.Module, path: str | None) -> nn.Module:
    return nn.Identity() if path is None else layer.get_submodule(path)


@dataclass
class TokenRoutedOutput(BaseModelOutputWithPooling):
    """Output of a [`TokenRoutedModel`]: `router_logits` are [B, L, E] for each routed block, if requested."""

    router_logits: tuple[torch.Tensor, ...] | None = None


class TokenRoutedModel(MoTEModel):
    """A `MoTEModel` in whose blocks each token goes through the experts that a router picks.

    `forward` takes two arguments more than that of `MoTEModel`: `output_router_logits=True` returns the logits of each
    block's router; `balance_share` is the share of one row in a training step, 1 / number of rows, so that the
    load-balancing losses of the step's forward passes add up to one loss (default: a pass is a whole step).
    """

    config: TokenRoutedConfig
    config_class = TokenRoutedConfig
    routing_argument = "routing"
    own_arguments = (*MoTEModel.own_arguments, "balance_share")
    _no_split_modules = ["TokenRoutedBlock"]

    def __init__(self, config: TokenRoutedConfig, backbone: PreTrainedModel | None = None) -> None:
        if backbone is None:  # `experts_implementation=` also sets it here, but a dense model refuses it
            config.backbone_config._experts_implementation = None
        elif config.shared_expert_bias:
            raise ValueError("shared_expert_bias would lose the biases of the dense model's feed-forward networks")
        super().__init__(config, backbone)

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return True  # the base class would look this up, but caches its result for `MoTEModel` for subclasses, too

    def _make_block(self, layer: nn.Module) -> nn.Module:
        return TokenRoutedBlock(layer, FEED_FORWARDS[self.config.backbone_config.model_type], self.config)

    def _route(
        self, task: str | list[str] | None, task_ids: torch.Tensor | None, sequences: dict, kwargs: dict
    ) -> TokenRoutedOutput:
        """Run a batch; a task is not needed, but an unknown one is an error."""
        rows = next(iter(sequences.values())).shape[0]
        if task is not None or task_ids is not None:
            self._experts_of_rows(task, task_ids, rows)
        if "cu_seq_lens_q" in kwargs:  # sequences without padding, concatenated in one row
            rows = len(kwargs["cu_seq_lens_q"]) - 1
        share, with_logits = kwargs.pop("balance_share", None), kwargs.pop("output_router_logits", False)
        mask = sequences.get("attention_mask")
        logits: list[torch.Tensor] = []
        routing = TokenRouting(
            token_mask=mask.bool() if mask is not None and mask.dim() == 2 else None,
            loss_weight=self.config.router_aux_loss_coef * (1.0 if share is None else rows * share),
            record=logits.append if with_logits else None,
        )
        out = self._run(sequences, {**kwargs, "routing": routing})
        return TokenRoutedOutput(**out, router_logits=tuple(logits) if with_logits else None)


TokenRoutedConfig.register_for_auto_class()
TokenRoutedModel.register_for_auto_class("AutoModel")
