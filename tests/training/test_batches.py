"""Which rows make up a batch, for one process and for several."""

from bisect import bisect_right
from collections import Counter
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch.utils.data import ConcatDataset

from mote.training.batches import EvenBatchSampler, TaskBatchSampler

SIZES = [1000, 377, 64, 5]


def sampler_of(sizes: list[int] = SIZES, batch_size: int = 128, processes: int = 1, seed: int = 0) -> TaskBatchSampler:
    generator = torch.Generator()
    sets: list[Any] = [range(size) for size in sizes]
    samplers = [EvenBatchSampler(rows, batch_size, processes, generator=generator, seed=seed) for rows in sets]
    return TaskBatchSampler(ConcatDataset(sets), batch_samplers=samplers, generator=generator, seed=seed)


def set_of(row: int) -> int:
    return bisect_right([*accumulate(SIZES)], row)


def test_every_row_once_in_even_batches_of_one_set_in_random_order() -> None:
    batches = list(sampler_of())
    assert Counter(row for batch in batches for row in batch) == Counter(range(sum(SIZES)))
    assert all(len({set_of(row) for row in batch}) == 1 for batch in batches)
    order = [set_of(batch[0]) for batch in batches]
    assert Counter(order) == {0: 8, 1: 3, 2: 1, 3: 1}
    assert order != sorted(order)
    assert max(map(len, batches)) <= 128
    assert len(batches) == len(sampler_of())
    assert [len(batch) for batch in sampler_of([1377], 1000)] == [689, 688]


def test_the_order_depends_on_seed_and_epoch_alone() -> None:
    def order(seed: int, epoch: int) -> list[list[int]]:
        sampler = sampler_of(seed=seed)
        sampler.set_epoch(epoch)
        return list(sampler)

    assert order(0, 0) == order(0, 0)
    assert order(0, 0) != order(1, 0)
    assert order(0, 0) != order(0, 1)
    used = sampler_of()
    list(used)
    used.set_epoch(1)
    assert list(used) == order(0, 1)  # whatever was drawn before


def test_processes_get_parts_of_the_same_batches_as_one_process() -> None:
    def joined(sizes: list[int]) -> list[list[int]]:
        parts = list(sampler_of(sizes, processes=2))
        assert [*map(len, parts[::2])] == [*map(len, parts[1::2])]
        return [first + second for first, second in zip(parts[::2], parts[1::2], strict=True)]

    assert Counter(set_of(batch[0]) for batch in joined(SIZES)) == Counter(set_of(batch[0]) for batch in sampler_of())
    assert sorted(joined([512, 64])) == sorted(sampler_of([512, 64]))  # where sizes are even the rows are the same ones


@pytest.mark.parametrize(
    ("rows", "processes", "sizes"),
    [(1003, 4, [500, 500]), (1023, 4, [340] * 3), (3, 4, []), (1003, 1, [335, 334, 334])],
)
def test_what_the_processes_cannot_share_is_dropped(rows: int, processes: int, sizes: list[int]) -> None:
    assert EvenBatchSampler(range(rows), 500, processes).sizes == sizes


@pytest.mark.parametrize("processes", [2, 4])
def test_accelerate_deals_every_process_its_part(processes: int) -> None:
    from accelerate.data_loader import BatchSamplerShard

    dealt = [
        list(BatchSamplerShard(sampler_of(processes=processes), processes, index, even_batches=False))
        for index in range(processes)
    ]
    expected = list(sampler_of(processes=processes))
    assert [batch for step in zip(*dealt, strict=True) for batch in step] == expected
    for step in zip(*dealt, strict=True):
        assert len({set_of(batch[0]) for batch in step}) == 1
