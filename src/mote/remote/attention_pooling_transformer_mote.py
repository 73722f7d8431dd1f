"""The Sentence-Transformers module of a MoTE that pools by attention: see `attention_pooling_mote.py`.

This file is only copied into saved models that pool in this way; `modules.json` names its class.
"""

from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from sentence_transformers.sentence_transformer.modules import Pooling
from transformers.dynamic_module_utils import custom_object_save


class AttentionPooling(Pooling):
    """A `Pooling` of the states of the network's pooling layer, whose weights are saved and trained with the network.

    As in the base class, `include_prompt=False` leaves the prompt out of the mean. If the features have a
    `pooling_mask` [B, L], it determines which tokens of each row are pooled.
    """

    def on_model_ready(self, model: Any) -> None:
        """Find the network, without registering it a second time, and tell it not to pool as well."""
        object.__setattr__(self, "network", model[0].model)
        self.network.pools = False

    def forward(self, features: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Add `sentence_embedding` [B, H] to the features; the mask for the mean does not affect the attention.

        Raises:
            RuntimeError: If the module is not part of a model.
            ValueError: If a row has no token to pool.
        """
        if not hasattr(self, "network"):
            raise RuntimeError("AttentionPooling is not part of a model: call `on_model_ready(model)`")
        hidden, mask = features["token_embeddings"], features.get("attention_mask")
        layer = self.network.pooling
        if "cu_seq_lens_q" in features:  # flash attention: texts are concatenated in one row
            ends = features["cu_seq_lens_q"].tolist()
            states = torch.cat([layer(hidden[:, start:end]) for start, end in pairwise(ends)], dim=1)
        else:
            states = layer(hidden, mask)
        pooled = {**features, "token_embeddings": states}
        if not self.include_prompt and "pooling_mask" in features:
            mask = pooled["attention_mask"] = features["pooling_mask"]
        elif not self.include_prompt and "prompt_length" in features and mask is not None:
            mask = mask.cumsum(dim=1) > torch.as_tensor(features["prompt_length"], device=mask.device).view(-1)[:1]
        if mask is not None and not torch.compiler.is_compiling() and not mask.any(dim=1).all():
            raise ValueError(f"No token to pool in the rows {(~mask.any(dim=1)).nonzero().flatten().tolist()}")
        features["sentence_embedding"] = super().forward(pooled, **kwargs)["sentence_embedding"].to(hidden.dtype)
        return features

    def save(self, output_path: str, *args: Any, **kwargs: Any) -> None:
        """Save the settings, and this file next to the model's own code."""
        super().save(output_path, *args, **kwargs)
        custom_object_save(self, Path(output_path).parent)
