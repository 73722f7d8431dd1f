"""Definitions of datasets: what is put in front of which texts, and which expert they reach."""

import shutil
from pathlib import Path
from typing import Any

import pytest
from helpers.paths import ROOT

pytest.importorskip("mteb")

import mteb
from mteb.types import PromptType
from sentence_transformers import SentenceTransformer

import mote
from mote import evaluate
from mote.evaluation.evaluate import prompts_of
from mote.evaluation.models import EvaluatedModel
from mote.evaluation.options import EvaluateOptions

TOPIC, FIND = mote.instruction_with("Find the topic"), mote.instruction_with("Find papers")


@pytest.fixture(scope="module")
def both(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = shutil.copytree(data, tmp_path_factory.mktemp("both") / "data")
    shutil.copytree(ROOT / "examples" / "data" / "beir" / "arxiv", folder / "beir" / "arxiv")
    return folder


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> set[tuple[Any, ...]]:
    """The prompt and the expert of each batch, and whether some of its tokens are left out of the pooling."""
    seen: set[tuple[Any, ...]] = set()
    tokenize = SentenceTransformer.preprocess

    def spy(self: Any, inputs: Any, prompt: Any = None, **kwargs: Any) -> Any:
        features = tokenize(self, inputs, prompt, **kwargs)
        mask = features["attention_mask"]
        left_out = bool((mask - features.get("pooling_mask", mask)).any())
        seen.add((prompt, self[0].config.expert_of(features["route"]), left_out))
        return features

    monkeypatch.setattr(SentenceTransformer, "preprocess", spy)
    return seen


@pytest.mark.long
def test_instructions_of_datasets(trained: Path, both: Path, tmp_path: Path, seen: set[tuple[Any, ...]]) -> None:
    model = mote.configure(trained, tmp_path / "excluded", instruction_pooling="excluded")
    where: dict[str, Any] = {"data": both, "tasks": ["trivia", "arxiv"], "limit": 40, "trust_remote_code": True}
    where["out"] = tmp_path / "out"
    own = evaluate([str(model)], **where)
    assert seen == {
        ("clustering: ", "clustering", True),
        ("search_query: ", "search_query", True),
        ("search_document: ", "search_document", True),
    }
    seen.clear()
    names = {name.split("-")[0]: name for name in own.datasets}
    definitions = {names["beir"]: "Find papers", "*": "Find the topic"}
    changed = evaluate([str(model)], definitions=definitions, **where)
    assert seen == {
        (TOPIC, "clustering", True),
        (FIND, "search_query", True),
        ("search_document: ", "search_document", True),
    }
    assert changed.settings["instructions"] == {names["clustering"]: TOPIC, names["beir"]: FIND}
    seen.clear()
    assert evaluate([str(model)], definitions=definitions, **where).scores == changed.scores  # cached, as the first are
    assert evaluate([str(model)], **where).scores == own.scores
    assert not seen
    with pytest.raises(ValueError, match="No dataset matches 'trivia'"):
        evaluate([str(model)], definitions={"trivia": "x"}, **where)


@pytest.mark.long
def test_tasks_without_instructions(trained: Path, both: Path, tmp_path: Path, seen: set[tuple[Any, ...]]) -> None:
    """The type of a dataset says which expert its texts reach, where no instruction does."""
    tasks = mote.load(trained).config.tasks
    model = mote.configure(trained, tmp_path / "without", instructions=dict.fromkeys(tasks, ""))
    where: dict[str, Any] = {"tasks": ["trivia", "arxiv"], "limit": 40, "trust_remote_code": True}
    assert not evaluate([str(model)], data=both, out=tmp_path / "out", **where).failures
    assert {expert for _, expert, _ in seen} == {"clustering", "search_query", "search_document"}
    assert not any(prompt for prompt, _, _ in seen)


@pytest.mark.parametrize("name", ["CQADupstackRetrieval", "Core17InstructionRetrieval", "InstructIR"])
@pytest.mark.filterwarnings("ignore:Task name", "ignore:Some prompts")
def test_definitions_of_other_tasks_with_documents(name: str, trained: Path) -> None:
    """An aggregate, and types that no prompt is named after: the definition is in front of queries, not documents."""
    task = mteb.get_task(name)
    model = EvaluatedModel("tiny", str(trained), None, EvaluateOptions(trust_remote_code=True))
    encoder: Any = model.encoder(prompts_of([task], {name: FIND}))
    part = task.metadata.tasks[0] if task.is_aggregate else task
    prompts = [encoder.model_prompts[encoder.get_prompt_name(part.metadata, role)] for role in PromptType]
    assert prompts == [FIND, "search_document: "]
    config = encoder.model[0].config
    assert config.expert_of(config.task_of(["a"], task="query", prompt=FIND)) == "search_query"
