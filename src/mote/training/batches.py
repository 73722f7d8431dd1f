"""Batch samplers: every batch comes from one training set, and sets are drawn in proportion to their data.

A training set holds one dataset (homogeneous batches) or all datasets of a task (heterogeneous ones), so a batch always
belongs to one task. Sentence-Transformers draws the sets and shuffles their rows. Added here: batches of a set have
nearly equal sizes, so that there is no small last batch, and several processes get parts of the same batch.
"""

from collections.abc import Iterator
from typing import Any

import torch
from sentence_transformers.base.sampler import DefaultBatchSampler, ProportionalBatchSampler
from torch.utils.data import ConcatDataset, RandomSampler


class EvenBatchSampler(DefaultBatchSampler):
    """The batches of one training set: all its rows in random order, in batches of nearly equal size.

    1,377 rows with a batch size of 1,000 give 689 and 688, not 1,000 and 377. The remainder of dividing the rows among
    the processes is dropped from the epoch: `dropped` counts these rows.

    Args:
        dataset: Rows of the training set.
        batch_rows: Maximum number of rows per batch, over all processes.
        processes: Number of processes that share each batch.
        generator: Random generator for the order.
        seed: Seed of the order, together with the epoch.
        **_: Arguments of the trainer without effect here: its own `batch_size` is per process.
    """

    def __init__(
        self,
        dataset: Any,
        batch_rows: int,
        processes: int,
        generator: torch.Generator | None = None,
        seed: int = 0,
        **_: Any,
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

    @property
    def dropped(self) -> int:
        """Rows dropped from each epoch."""
        return len(self.dataset) - sum(self.sizes)

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
