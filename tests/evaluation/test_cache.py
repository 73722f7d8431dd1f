"""The cache of results: damaged files, other data, places that cannot be written."""

from pathlib import Path
from typing import Any

import pytest
from helpers.paths import SMALL_ENCODER

pytest.importorskip("mteb")

import mteb
from mteb.results import TaskResult

from mote import evaluate
from mote.evaluation import evaluate as module
from mote.evaluation.cache import Cache
from mote.evaluation.models import EvaluatedModel
from mote.evaluation.options import EvaluateOptions
from mote.evaluation.tasks import load_tasks

MODEL = EvaluatedModel("small", str(SMALL_ENCODER), None, EvaluateOptions())


def results(folder: Path) -> list[Path]:
    return [path for path in (folder / "results").rglob("*.json") if path.name != "model_meta.json"]


@pytest.mark.long
def test_a_damaged_result_is_computed_again(data: Path, tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"data": data, "tasks": ["part0"], "out": tmp_path}
    first = evaluate([str(SMALL_ENCODER)], **arguments)
    (path,) = results(tmp_path)
    (task,), meta = load_tasks(data, ["part0"]), MODEL.meta()
    cache = Cache(tmp_path, [task])
    assert cache.find(task, meta) is not None
    for damaged in (path.read_text()[:100], "", "[]", "null", "{}", '{"task_name": "part0"}'):
        path.write_text(damaged)
        assert cache.find(task, meta) is None
    assert evaluate([str(SMALL_ENCODER)], **arguments).scores == first.scores


def test_where_results_cannot_be_written_the_run_ends(data: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=str(tmp_path / "file")):
        evaluate([str(SMALL_ENCODER)], data=data, out=tmp_path / "file")
    (tmp_path / "results").write_text("")
    with pytest.raises(OSError, match="The result of clustering-trivia cannot be written to"):
        evaluate([str(SMALL_ENCODER)], data=data, out=tmp_path)


def test_without_an_output_folder_results_go_to_the_users_assets(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def assets(*names: str) -> Path:
        return tmp_path.joinpath(*names)

    monkeypatch.setattr(module, "cached_assets_path", assets)
    evaluation = evaluate([str(SMALL_ENCODER)], data=data, tasks=["part0"])
    assert not evaluation.failures
    assert [path.name for path in results(tmp_path / "mote" / "evaluation")] == ["sts-part0.json"]


def test_an_aggregate_counts_only_with_all_of_its_subtasks(tmp_path: Path) -> None:
    task, meta = mteb.get_task("CQADupstackRetrieval"), MODEL.meta()
    cache = Cache(tmp_path, [task])
    for part in (*task.metadata.tasks, task):
        splits: Any = {"test": {"default": {"main_score": 0.5, "ndcg_at_10": 0.5}}}
        cache.save_to_cache(TaskResult.from_task_results(part, splits, evaluation_time=1), meta)
    assert cache.find(task, meta) is not None
    path = cache.get_task_result_path(task.metadata.tasks[3].metadata.name, meta)
    path.write_text(path.read_text().replace(task.metadata.tasks[3].metadata.revision, "another revision"))
    assert cache.find(task, meta) is None
    assert cache.find(task.metadata.tasks[2], meta) is not None
