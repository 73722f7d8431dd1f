"""MTEB scores what is published of the source."""

from pathlib import Path

import pytest
from sentence_transformers import SentenceTransformer

mteb = pytest.importorskip("mteb")

from mote import upcycle  # noqa: E402
from mote.evaluation.tasks import load_tasks  # noqa: E402


def scores(path: Path, data: Path, sets: list[str]) -> dict[str, float]:
    """Score a model on sets of the shared data, in percent with two decimals as published."""
    model = SentenceTransformer(str(path), trust_remote_code=True)
    results = mteb.evaluate(model, load_tasks(data, sets), cache=None, show_progress_bar=False)
    return {result.task_name: round(100 * result.get_score(), 2) for result in results.task_results}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # mteb's own: its result format
def test_two_fast_official_sets_score_what_is_published(shared: Path) -> None:
    source = shared / "checkpoints" / "all-MiniLM-L6-v2"
    published = {"STS12": 72.37, "STS17": 87.59}
    assert scores(source, shared / "data", ["STS12", "STS17"]) == pytest.approx(published, abs=0.011)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # mteb's own: its result format
def test_without_instructions_the_scores_are_the_published_ones_of_the_source(shared: Path, tmp_path: Path) -> None:
    source = shared / "checkpoints" / "all-MiniLM-L6-v2"
    experts = ["classification", "clustering", "search_query", "search_document"]
    folder = upcycle(
        str(source), tmp_path / "mote", instructions=dict.fromkeys(experts, ""), default_task="classification"
    )
    published = {"NFCorpus": 31.59, "STSBenchmark": 82.03}
    for path in (source, folder):
        assert scores(path, shared / "data", list(published)) == pytest.approx(published, abs=0.011)
