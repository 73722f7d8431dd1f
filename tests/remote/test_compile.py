"""Compiled models: how many graphs there are, and that they give what the model gives."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from helpers.families import batch, family, trained_mote
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters

pytestmark = pytest.mark.long

FAMILIES_HERE = ["bert", "distilbert", "mpnet", "modernbert", "nomic_bert", "gemma3_text"]
TASKS = ["a", "b", "c", "d"]
LENGTHS = range(9, 29, 2)  # no dimension of the tiny models: the compiler takes sizes that are equal for the same
ROWS = (1, 3, 7)
MIXED = [(rows, length) for rows in ROWS[1:] for length in LENGTHS]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=64):
        yield
    torch._dynamo.reset()


def check(compiled: torch.nn.Module, model: torch.nn.Module, rows: int, length: int, task: str | list[str]) -> None:
    inputs = batch(rows, length)
    inputs["attention_mask"][:, :2] = 1  # a row of one token would be a length of its own
    for found, expected in zip(compiled(**inputs, task=task)[:2], model(**inputs, task=task)[:2], strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def compiled_model(name: str, **settings: Any) -> tuple[Any, Any, CompileCounter]:
    settings = {"experts": TASKS, **settings}
    model, compiled, counter = trained_mote(name, **settings), trained_mote(name, **settings), CompileCounter()
    compiled.compile(backend=counter)
    return model, compiled, counter


def tasks_of(rows: int, length: int) -> list[str]:
    """Another mixture for each batch, with two rows of each task or more where there are enough."""
    return [TASKS[(row // 2 + length) % 4] for row in range(rows)]


@pytest.mark.parametrize("name", [family(name, default=name == "bert") for name in FAMILIES_HERE])
def test_all_experts_of_all_layers_share_one_graph(name: str) -> None:
    model, compiled, counter = compiled_model(name)
    for task in TASKS:
        for rows in ROWS[1:]:
            for length in LENGTHS[::3]:
                check(compiled, model, rows, length, task)
    kinds = set(getattr(model.config.backbone_config, "layer_types", None) or ["one kind"])
    assert 1 <= counter.frame_count <= len(kinds)  # a sliding window may take a graph of its own
    check(compiled, model, 1, 9, "a")
    at_first = counter.frame_count
    for rows, length in [(1, length) for length in LENGTHS[::3]]:
        for task in TASKS:
            check(compiled, model, rows, length, task)
    assert counter.frame_count == at_first  # one row has a graph of its own, again for all lengths and experts
    assert not counters["graph_break"]


def test_mixed_batches_need_no_graphs_of_their_own() -> None:
    model, compiled, counter = compiled_model("bert")
    for rows, length in MIXED:
        check(compiled, model, rows, length, tasks_of(rows, length))
    assert 1 <= counter.frame_count <= 4  # groups of one row or of more, with padding or without


def test_a_model_without_a_task_is_one_graph() -> None:
    model = trained_mote("bert", experts=TASKS)
    whole: Any = torch.compile(model, fullgraph=True, backend="eager")
    assert whole(**batch()).pooler_output.equal(model(**batch(), task="a").pooler_output)


def test_any_number_of_experts_share_one_graph() -> None:
    tasks = [f"task{number}" for number in range(20)]
    model, compiled, counter = compiled_model("bert", experts=tasks)
    with torch._dynamo.config.patch(recompile_limit=1, fail_on_recompile_limit_hit=True):
        for task in tasks:
            check(compiled, model, 3, 9, task)
    assert counter.frame_count == 1


def test_mixed_batches_leave_a_model_compiled_as_a_whole_as_it_is() -> None:
    model, counter = trained_mote("bert", experts=TASKS), CompileCounter()
    compiled = torch.compile(model, dynamic=True, backend=counter)
    for rows, length in MIXED:
        check(compiled, model, rows, length, tasks_of(rows, length))
        ids = torch.tensor([TASKS.index(task) for task in tasks_of(rows, length)])
        expected = model(**batch(rows, length), task_ids=ids).pooler_output
        assert torch.equal(compiled(**batch(rows, length), task_ids=ids).pooler_output, expected)
    assert counter.frame_count == 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # which the compiler looks at
def test_gradients_of_a_compiled_model() -> None:
    model, compiled = trained_mote("bert", experts=TASKS), trained_mote("bert", experts=TASKS)
    compiled.compile(backend="aot_eager")
    with torch.enable_grad():
        for one in (model, compiled):
            one(**batch(), task=["a", "b", "b", "d"]).pooler_output.square().sum().backward()
    for (key, expected), found in zip(model.named_parameters(), compiled.parameters(), strict=True):
        assert (expected.grad is None) == (found.grad is None) == (".experts.c." in key), key
        if found.grad is not None:
            torch.testing.assert_close(found.grad, expected.grad, atol=1e-5, rtol=1e-4)
