"""Blended batches: rows of several tasks in one step, each with its own instructions, experts and loss.

NV-Embed (arXiv:2405.17428, section 4.2) is fine-tuned on such batches, the MoTE paper on batches of one task.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from sentence_transformers.sentence_transformer.data_collator import SentenceTransformerDataCollator
from torch import Tensor
from torch.nn.functional import pad


@dataclass
class BlendedCollator(SentenceTransformerDataCollator):
    """Tokenizes blended batches: the texts of each instruction and task together, like a batch of their own.

    Other batches are left to the base class.

    Attributes:
        parts: Blended training set → for each of its datasets, column → instruction and task of the model. The last
            number of a row's label is that of its dataset.
        tasks: Tasks of the model, if it routes by task.
        tokenizer: Tokenizer of the model.
    """

    parts: dict[str, list[dict[str, tuple[str | None, str | None]]]] = field(default_factory=dict)
    tasks: list[str] = field(default_factory=list)
    tokenizer: Any = None

    def __call__(self, features: list[dict[str, Any]]) -> dict[str, Any]:
        """Tokenize the rows of a batch."""
        name = features[0].get("dataset_name")
        if name not in self.parts:
            return super().__call__(features)
        labels = torch.tensor([row["label"] for row in features])
        batch: dict[str, Any] = {"dataset_name": name, "label": labels}
        numbers = labels[:, -1].tolist()
        for column in features[0]:
            if column in ("label", "dataset_name"):
                continue
            rows: dict[tuple[str | None, str | None], list[int]] = {}
            for index, number in enumerate(numbers):
                rows.setdefault(self.parts[name][number][column], []).append(index)
            groups = [
                (indices, self.preprocess_fn([features[i][column] for i in indices], prompt=prompt, task=task))
                for (prompt, task), indices in rows.items()
            ]
            batch |= {f"{column}_{key}": value for key, value in self._joined(groups, len(features)).items()}
        return batch

    def _joined(self, groups: list[tuple[list[int], dict[str, Any]]], count: int) -> dict[str, Any]:
        """Combine the features of groups of rows, in the order of the batch and padded to the longest."""
        joined: dict[str, Any] = {}
        for key in dict.fromkeys(key for _, features in groups for key in features):
            values = [(rows, features.get(key)) for rows, features in groups]
            first = values[0][1]
            if key == "prompt_length":
                # One number per batch; excluded instructions have masks instead.
                continue
            if key == "route":
                joined[key] = torch.empty(count, dtype=torch.long)
                for rows, route in values:
                    joined[key][rows] = self.tasks.index(route) if isinstance(route, str) else route
            elif isinstance(first, Tensor) and first.dim() == 2 and first.shape[0] == len(values[0][0]):
                length = max(value.shape[1] for _, value in values)  # type: ignore[union-attr]
                joined[key] = first.new_empty(count, length)
                for rows, value in values:
                    joined[key][rows] = self._padded(key, value, length)
            elif not isinstance(first, Tensor) and all(value == first for _, value in values):
                joined[key] = first
            else:
                raise ValueError(
                    f"Blended batches cannot hold {key!r}, which differs between their tasks; if texts are "
                    "concatenated for flash attention, set model.attention=sdpa"
                )
        return joined

    def _padded(self, key: str, value: Any, length: int) -> Tensor:
        missing = length - value.shape[1]
        sides = (missing, 0) if self.tokenizer.padding_side == "left" else (0, missing)
        return pad(value, sides, value=self.tokenizer.pad_token_id if key == "input_ids" else 0)
