"""How a batch of several tasks is cut into groups, and put together again."""

import random

import pytest
import torch
from helpers.families import EXPERTS, batch, trained_mote

from mote.remote import mixed_batch_mote
from mote.remote.mixed_batch_mote import Group, groups_of, lengths_of

CPU = torch.device("cpu")


def rows_in(group: Group, count: int) -> list[int]:
    return torch.arange(count)[group.rows].tolist()


@pytest.mark.parametrize("limit", [0, 5, 64, 10**6])
def test_every_row_is_in_one_group_and_none_holds_too_much_padding(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(mixed_batch_mote.PADDING_PER_GROUP, "cpu", limit)
    draw = random.Random(0)
    for _ in range(50):
        count, length = draw.randint(1, 40), draw.randint(1, 60)
        experts = [draw.choice("abcd") for _ in range(count)]
        lengths = [draw.randint(1, length) for _ in range(count)]
        mask = (torch.arange(length) < torch.tensor(lengths)[:, None]).long()
        assert lengths_of(mask, count, length) == lengths
        groups = groups_of(experts, lengths, CPU)
        assert sorted(row for group in groups for row in rows_in(group, count)) == list(range(count))
        for group in groups:
            rows = rows_in(group, count)
            assert {experts[row] for row in rows} == {group.expert}
            assert group.length == max(lengths[row] for row in rows)
            assert sum(group.length - lengths[row] for row in rows) <= limit
        order = [group.expert for group in groups]
        assert len(set(order)) == sum(one != other for one, other in zip(order, [None, *order], strict=False))
        if limit == 10**6:
            assert len(groups) == len(set(experts))


def test_rows_that_follow_each_other_are_views() -> None:
    tokens = torch.arange(12).view(6, 2)
    first, second = groups_of(["a", "a", "a", "b", "b", "b"], lengths_of(None, 6, 2), CPU)
    for group, rows in ((first, slice(0, 3)), (second, slice(3, 6))):
        selected = group.select(tokens, 6)
        assert torch.equal(selected, tokens[rows])
        assert selected.untyped_storage().data_ptr() == tokens.untyped_storage().data_ptr()


@pytest.mark.parametrize("tasks", [["alpha", "beta"] * 3, ["alpha"] * 2 + ["beta"] * 4])
def test_groups_give_the_bits_of_their_rows_alone(tasks: list[str]) -> None:
    model, inputs = trained_mote("bert", "eager"), batch(6, 9)
    inputs["attention_mask"][:] = 1
    asked = {"output_hidden_states": True, "output_attentions": True}
    with torch.no_grad():
        mixed = model(**inputs, task=tasks, **asked)
        for task in EXPERTS:
            rows = [row for row, of_row in enumerate(tasks) if of_row == task]
            alone = model(**{name: value[rows] for name, value in inputs.items()}, task=task, **asked)
            assert torch.equal(mixed.last_hidden_state[rows], alone.last_hidden_state)
            assert torch.equal(mixed.pooler_output[rows], alone.pooler_output)
            for of_all, of_rows in zip(
                mixed.hidden_states + mixed.attentions, alone.hidden_states + alone.attentions, strict=True
            ):
                assert torch.equal(of_all[rows], of_rows)


@pytest.mark.parametrize("limit", [0, 10**6])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_on_either_side(side: str, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(mixed_batch_mote.PADDING_PER_GROUP, "cpu", limit)
    model, inputs = trained_mote("nomic_bert"), batch()
    if side == "left":
        inputs = {name: value.flip(1) for name, value in inputs.items()}
    tasks = ["alpha", "beta", "beta", "alpha"]
    real = inputs["attention_mask"].bool()
    with torch.no_grad():
        mixed = model(**inputs, task=tasks)
        for row, task in enumerate(tasks):
            expected = model(**inputs, task=task)
            found = mixed.last_hidden_state[row, real[row]]
            torch.testing.assert_close(found, expected.last_hidden_state[row, real[row]], atol=1e-6, rtol=0)
            torch.testing.assert_close(mixed.pooler_output[row], expected.pooler_output[row], atol=1e-6, rtol=0)
    if side == "right" and limit == 0:
        assert mixed.last_hidden_state[~real].eq(0).all()


def test_gradients_of_a_mixed_batch_are_those_of_its_rows() -> None:
    mixed, one_by_one, inputs = trained_mote("bert"), trained_mote("bert"), batch()
    tasks = ["alpha", "beta", "beta", "alpha"]
    weights = torch.randn(4, 9, 16, generator=torch.Generator().manual_seed(0)) * inputs["attention_mask"].unsqueeze(2)
    (mixed(**inputs, task=tasks).last_hidden_state * weights).sum().backward()
    for row, task in enumerate(tasks):
        alone = {name: value[row : row + 1] for name, value in inputs.items()}
        (one_by_one(**alone, task=task).last_hidden_state * weights[row]).sum().backward()
    for (key, found), expected in zip(mixed.named_parameters(), one_by_one.parameters(), strict=True):
        torch.testing.assert_close(
            found.grad, expected.grad, atol=1e-4, rtol=1e-4, msg=lambda m, key=key: f"{key}: {m}"
        )


def test_a_batch_of_several_tasks_without_rows_is_refused() -> None:
    empty = {name: value[:0] for name, value in batch().items()}
    with pytest.raises(ValueError, match="0 tasks for 0 rows"):
        trained_mote("bert")(**empty, task=[])
