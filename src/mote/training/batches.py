"""Which rows make up a batch: every batch from one training set, the sets in proportion to their data.

A training set holds one dataset (homogeneous batches) or all datasets of a task (heterogeneous ones), so a batch is
always of one task. Sentence-Transformers draws the sets and shuffles their rows; what is added here is that batches of
a set are as equal in size as can be, so that no row is left over and none is seen in a batch of its own, and that
several processes get parts of one and the same batch.
"""

from collections.abc import Iterator
from typing import Any

import torch
from sentence_transformers.base.sampler import DefaultBatchSampler, ProportionalBatchSampler
from torch.utils.data import ConcatDataset, RandomSampler


class EvenBatchSampler(DefaultBatchSampler):
    """The batches of one training set: all its rows in random order, in batches of nearly equal size.

    1,377 rows with a batch size of 1,000 give 689 and 688, not 1,000 and 377. Rows that the processes cannot share
    out evenly, fewer than there are processes, are left out of the epoch: `left_out` counts them.

    Args:
        dataset: The set's rows.
        batch_size: Rows of a batch, over all processes, at most.
        processes: That share out each batch.
        generator: Of the order.
        seed: Of the order, together with the epoch.
    """

    def __init__(
        self, dataset: Any, batch_size: int, processes: int, generator: torch.Generator | None = None, seed: int = 0
    ) -> None:
        """Draw the rows in an order that the generator decides."""
        sampler = RandomSampler(dataset, generator=generator)
        super().__init__(sampler, batch_size=batch_size, drop_last=False, generator=generator, seed=seed)
        self.dataset = dataset
        self.processes = processes

    @property
    def sizes(self) -> list[int]:
        """Rows of each batch."""
        shares = len(self.dataset) // self.processes  # of one process
        count = -(-shares // (self.batch_size // self.processes))  # the fewest batches that hold them all
        return [self.processes * (shares // count + (index < shares % count)) for index in range(count)]

    @property
    def left_out(self) -> int:
        """Rows that an epoch leaves out."""
        return len(self.dataset) - sum(self.sizes)

    def __iter__(self) -> Iterator[list[int]]:
        rows = iter(self.sampler)
        for size in self.sizes:
            yield [next(rows) for _ in range(size)]

    def __len__(self) -> int:
        return len(self.sizes)


class TaskBatchSampler(ProportionalBatchSampler):
    """The batches of a run: those of all sets, in random order, each cut into one part per process.

    The parts of a batch follow each other, which is how accelerate deals batches out to processes: at every step,
    each process gets its part of the same batch. The order depends on the seed and the epoch alone.
    """

    def __init__(self, dataset: ConcatDataset, batch_samplers: list[EvenBatchSampler], **kwargs: Any) -> None:
        """Draw from the sets in proportion to the number of their batches."""
        super().__init__(dataset, batch_samplers=[*batch_samplers], **kwargs)
        self.processes = batch_samplers[0].processes
        self.batch_size: Any = None  # it varies; accelerate then takes every batch as it comes
        self.sampler: Any = self  # accelerate passes the epoch on to the `sampler` of a batch sampler that it wraps

    def __iter__(self) -> Iterator[list[int]]:
        for batch in super().__iter__():
            part = len(batch) // self.processes
            for process in range(self.processes):
                yield batch[process * part : (process + 1) * part]

    def __len__(self) -> int:
        return super().__len__() * self.processes


def even_batch_sampler(dataset: Any, rows_of_a_batch: int, processes: int, **settings: Any) -> EvenBatchSampler:
    """Make the sampler of one set, as `SentenceTransformerTrainingArguments.batch_sampler` asks for it.

    Args:
        dataset: The set's rows.
        rows_of_a_batch: Over all processes; the trainer's own `batch_size` is that of one.
        processes: That share out each batch.
        **settings: What the trainer passes.
    """
    generator, seed = settings["generator"], settings["seed"]
    return EvenBatchSampler(dataset, rows_of_a_batch, processes, generator=generator, seed=seed)
