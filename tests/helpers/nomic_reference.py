"""NomicBERT from its mathematics, on the tensors as they are published: no transformers, nothing of this project.

A post-norm encoder with rotary attention over the whole head and a SwiGLU feed-forward network (Nussbaum et al., "Nomic
Embed", arXiv:2402.01613). `fc11` is the up projection, `fc12` the gate, and `Wqkv` stacks the three projections.
Nomic Embed v2 (arXiv:2502.07972) has biases, a GELU instead of the gate, and experts in some of the layers.
"""

import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.nn import functional


def published_tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Read a published checkpoint, and take off the prefix of the pre-training model."""
    safetensors = folder / "model.safetensors"
    if safetensors.is_file():
        return load_file(safetensors)
    state = torch.load(folder / "pytorch_model.bin", weights_only=True)
    return {key.removeprefix("bert."): value for key, value in state.items()}


def reference_forward(
    tensors: dict[str, torch.Tensor], settings: dict[str, Any], input_ids: torch.Tensor, attention_mask: torch.Tensor
) -> torch.Tensor:
    """Compute the last hidden state, [B, L, H], from tokens and mask, [B, L]."""

    def norm(hidden: torch.Tensor, name: str) -> torch.Tensor:
        weight, bias = tensors[f"{name}.weight"], tensors[f"{name}.bias"]
        return functional.layer_norm(hidden, hidden.shape[-1:], weight, bias, settings["layer_norm_epsilon"])

    segments = tensors["embeddings.token_type_embeddings.weight"][0]
    hidden = norm(tensors["embeddings.word_embeddings.weight"][input_ids] + segments, "emb_ln")
    for layer in range(settings["n_layer"]):
        of_layer = {
            key.removeprefix(f"encoder.layers.{layer}."): value
            for key, value in tensors.items()
            if key.startswith(f"encoder.layers.{layer}.")
        }
        attended = _attention(hidden, attention_mask, of_layer, settings)
        hidden = norm(hidden + attended, f"encoder.layers.{layer}.norm1")
        hidden = norm(hidden + _feed_forward(hidden, of_layer, settings), f"encoder.layers.{layer}.norm2")
    return hidden


def _feed_forward(hidden: torch.Tensor, of_layer: dict[str, torch.Tensor], settings: dict[str, Any]) -> torch.Tensor:
    if "mlp.fc11.weight" in of_layer:
        up, gate = hidden @ of_layer["mlp.fc11.weight"].T, hidden @ of_layer["mlp.fc12.weight"].T
        return (up * functional.silu(gate)) @ of_layer["mlp.fc2.weight"].T
    if "mlp.fc1.weight" in of_layer:
        inner = functional.gelu(hidden @ of_layer["mlp.fc1.weight"].T + of_layer["mlp.fc1.bias"])
        return inner @ of_layer["mlp.fc2.weight"].T + of_layer["mlp.fc2.bias"]
    probabilities = (hidden @ of_layer["mlp.router.layer.weight"].T).softmax(dim=-1)  # [B, L, E]
    kept = probabilities >= probabilities.topk(settings["moe_top_k"], dim=-1).values[..., -1:]
    stacked = (settings["num_experts"], settings["n_inner"], -1)
    ups, downs = (of_layer[f"mlp.experts.mlp.{name}"].view(stacked) for name in ("w1", "w2"))  # [E, I, H]
    outputs = [functional.gelu(hidden @ up.T) @ down for up, down in zip(ups, downs, strict=True)]
    return ((probabilities * kept).unsqueeze(-1) * torch.stack(outputs, dim=-2)).sum(-2) + of_layer["mlp.experts.bias"]


def _attention(
    hidden: torch.Tensor, mask: torch.Tensor, of_layer: dict[str, torch.Tensor], settings: dict[str, Any]
) -> torch.Tensor:
    rows, length, width = hidden.shape
    heads = settings["n_head"]
    projected = hidden @ of_layer["attn.Wqkv.weight"].T + of_layer.get("attn.Wqkv.bias", 0.0)
    projected = projected.view(rows, length, 3, heads, width // heads)
    query, key, value = projected.permute(2, 0, 3, 1, 4)  # [B, heads, L, D] each
    query, key = (_rotate(tensor, settings["rotary_emb_base"]) for tensor in (query, key))
    scores = query @ key.transpose(-1, -2) / math.sqrt(width // heads)
    scores = scores.masked_fill(mask[:, None, None, :] == 0, -torch.inf)
    mixed = (scores.softmax(-1) @ value).transpose(1, 2).reshape(rows, length, width)
    return mixed @ of_layer["attn.out_proj.weight"].T + of_layer.get("attn.out_proj.bias", 0.0)


def _rotate(tensor: torch.Tensor, base: float) -> torch.Tensor:
    """Rotate each pair (i, i + D/2) by position * base^(-2i/D)."""
    length, width = tensor.shape[-2:]
    frequencies = base ** (-torch.arange(0, width, 2).float() / width)
    angles = torch.arange(length).float()[:, None] * frequencies  # [L, D/2]
    first, second = tensor.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
