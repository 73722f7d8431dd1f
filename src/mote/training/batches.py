"""Batches: every one comes from one training set, and sets are drawn in proportion to their data.

A training set holds one dataset (homogeneous batches), all datasets of a task (heterogeneous ones), or those of several
tasks (blended ones). Sentence-Transformers draws the sets and shuffles their rows. Added here: batches of a set have
nearly equal sizes, so that there is no small last batch, several processes get parts of the same batch, and the rows of
blended batches have their own instructions and experts.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from sentence_transformers.base.sampler import DefaultBatchSampler, ProportionalBatchSampler
from sentence_transformers.sentence_transformer.data_collator import SentenceTransformerDataCollator
from torch import Tensor
from torch.utils.data import ConcatDataset, RandomSampler


class EvenBatchSampler(DefaultBatchSampler):
    """The batches of one training set: all its rows in random order, in batches of nearly equal size.

    1,377 rows with at most 1,000 `batch_rows`, over all processes, give 689 and 688, not 1,000 and 377. What remains
    after dividing the rows among the processes is dropped from the epoch.
    """

    def __init__(
        self,
        dataset: Any,
        batch_rows: int,
        processes: int,
        generator: torch.Generator | None = None,
        seed: int = 0,
        **_: Any,  # of the trainer, whose own `batch_size` is per process
    ) -> None:
        sampler = RandomSampler(dataset, generator=generator)
        super().__init__(sampler, batch_size=batch_rows, drop_last=False, generator=generator, seed=seed)
        self.dataset = dataset
        self.processes = processes

    @property
    def sizes(self) -> list[int]:
        """Rows of each batch."""
        # Rows of one process, in the fewest batches that hold them all.
        shares = len(self.dataset) // self.processes
        count = -(-shares // (self.batch_size // self.processes))
        return [self.processes * (shares // count + (index < shares % count)) for index in range(count)]

    def __iter__(self) -> Iterator[list[int]]:
        rows = iter(self.sampler)
        for size in self.sizes:
            yield [next(rows) for _ in range(size)]

    def __len__(self) -> int:
        return len(self.sizes)


class TaskBatchSampler(ProportionalBatchSampler):
    """The batches of a run: those of all sets, in random order, each cut into one part per process.

    The parts of a batch are consecutive, which is how accelerate deals batches out to processes: at every step,
    each process gets its part of the same batch. The order depends only on the seed and the epoch.
    """

    def __init__(self, dataset: ConcatDataset, batch_samplers: list[EvenBatchSampler], **kwargs: Any) -> None:
        super().__init__(dataset, batch_samplers=[*batch_samplers], **kwargs)
        self.processes = batch_samplers[0].processes
        # Batches vary in size: with None, accelerate takes every batch unchanged.
        self.batch_size: Any = None
        # Accelerate passes the epoch on to the `sampler` of a batch sampler that it wraps.
        self.sampler: Any = self

    def __iter__(self) -> Iterator[list[int]]:
        for batch in super().__iter__():
            part = len(batch) // self.processes
            for process in range(self.processes):
                yield batch[process * part : (process + 1) * part]

    def __len__(self) -> int:
        return super().__len__() * self.processes


@dataclass
class BlendedCollator(SentenceTransformerDataCollator):
    """Tokenizes batches with several instructions: the texts of each, and of each task, like a batch of their own.

    NV-Embed (arXiv:2405.17428, section 4.2) is fine-tuned on such batches, the MoTE paper on batches of one task.
    Other batches are left to the base class. `parts` hold for each training set with parts and each of its datasets,
    whose number is the last of a row's label: column → instruction and task of the model.
    """

    parts: dict[str, list[dict[str, tuple[str | None, str | None]]]] = field(default_factory=dict)
    tasks: list[str] = field(default_factory=list)  # of the model, if it routes by task
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
                continue  # one number per batch; excluded instructions have masks instead
            if key == "route":
                joined[key] = torch.empty(count, dtype=torch.long)
                for rows, route in values:
                    joined[key][rows] = self.tasks.index(route) if isinstance(route, str) else route
            elif isinstance(first, Tensor) and first.dim() == 2 and first.shape[0] == len(values[0][0]):
                length = max(value.shape[1] for _, value in values)  # type: ignore[union-attr]
                joined[key] = first.new_full((count, length), self.tokenizer.pad_token_id if key == "input_ids" else 0)
                for rows, value in values:
                    width = value.shape[1]  # type: ignore[union-attr]
                    place = slice(length - width, None) if self.tokenizer.padding_side == "left" else slice(width)
                    joined[key][rows, place] = value
            elif not isinstance(first, Tensor) and all(value == first for _, value in values):
                joined[key] = first
            else:
                raise ValueError(
                    f"Blended batches cannot hold {key!r}, which differs between their tasks; if texts are "
                    "concatenated for flash attention, set model.attention=sdpa"
                )
        return joined
