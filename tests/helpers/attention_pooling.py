"""Pooling by attention, once more: one row, in float64, head by head."""

from collections.abc import Mapping

import torch


def states_by_hand(
    weights: Mapping[str, torch.Tensor], hidden: torch.Tensor, mask: torch.Tensor, heads: int
) -> torch.Tensor:
    """Run an `AttentionLayer` with these weights on hidden states [L, H] with a mask [L]: [L, H]."""
    weights, hidden = {name: value.double() for name, value in weights.items()}, hidden.double()

    def normed(x: torch.Tensor, name: str) -> torch.Tensor:
        x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, unbiased=False, keepdim=True) + 1e-5).sqrt()
        return x * weights[f"{name}.weight"] + weights[f"{name}.bias"]

    context = weights["latents"] if "latents" in weights else hidden[mask.bool()]
    q = normed(hidden, "norm") @ weights["to_q.weight"].T
    k, v = (normed(context, "context_norm") @ weights["to_kv.weight"].T).chunk(2, dim=-1)
    size = q.shape[-1] // heads
    parts = [slice(head * size, (head + 1) * size) for head in range(heads)]
    attended = [(q[:, part] @ k[:, part].T / size**0.5).softmax(dim=-1) @ v[:, part] for part in parts]
    hidden = hidden + torch.cat(attended, dim=-1) @ weights["to_out.weight"].T
    wide = normed(hidden, "feed_forward_norm") @ weights["feed_forward_in.weight"].T + weights["feed_forward_in.bias"]
    values, gates = wide.chunk(2, dim=-1)
    gated = values * gates * 0.5 * (1 + torch.erf(gates / 2**0.5))
    return hidden + gated @ weights["feed_forward_out.weight"].T + weights["feed_forward_out.bias"]
