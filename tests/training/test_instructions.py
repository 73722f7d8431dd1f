"""Instructions in training: of tasks and of datasets, made of definitions, left out of the pooling."""

from pathlib import Path
from typing import Any

import pytest
from helpers.checkpoints import trusted
from helpers.runs import overrides

import mote
from mote.checkpoints.reading import open_checkpoint
from mote.checkpoints.st_settings import instruction_pooling_in
from mote.training.model import build_model
from mote.training.recipe import load_recipe
from mote.training.train import TrainingRun, train

DEFINED = (
    "model.definitions={search_query: Find answers, clustering: Find the topic}",
    "model.instruction_pooling=excluded",
    r'tasks.retrieval.datasets=[{path: retrieval/*, instruction: "Instruct: Find evidence\nQuery: "}]',
    "model.max_length=64",
    "tasks.classification=null",
    "tasks.clustering=null",
)
FIND = mote.instruction_with("Find evidence")


@pytest.mark.long
@pytest.mark.parametrize("kind", ["mote", "dense"])
def test_a_run(kind: str, tiny: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = overrides(tiny, data, tmp_path / "run", f"model.kind={kind}", *DEFINED)
    recipe = load_recipe("mote", settings)
    run = TrainingRun(recipe).prepare()
    seen: list[dict[str, Any]] = []
    first = type(run.model[0])
    tokenize = first.preprocess

    def spy(self: Any, inputs: Any, prompt: Any = None, *args: Any, **kwargs: Any) -> Any:
        features = tokenize(self, inputs, prompt, *args, **kwargs)
        seen.append({"prompt": prompt, "left_out": int((features["attention_mask"] - features["pooling_mask"]).sum())})
        return features

    monkeypatch.setattr(first, "preprocess", spy)
    run.train()
    prompts = {each["prompt"]: each["left_out"] for each in seen}
    assert set(prompts) >= {FIND, ""}
    assert all((count > 0) == bool(prompt) for prompt, count in prompts.items())
    seen.clear()
    run.scores()
    assert {each["prompt"] for each in seen} == {FIND, ""}  # of anchors and positives: none, also no default prompt
    monkeypatch.undo()
    run.finish({})
    model = tmp_path / "run" / "model"
    assert instruction_pooling_in(model) == "excluded"
    loaded = trusted(model)
    assert loaded.prompts["query"] == mote.instruction_with("Find answers")
    assert loaded.prompts["document"] == loaded.prompts["Classification"] == ""
    features = loaded[0].preprocess(["whales"], prompt=FIND, task="query")
    left_out = features["attention_mask"] - features["pooling_mask"]
    assert int(left_out.sum()) == len(loaded.tokenizer(FIND)["input_ids"]) - 1  # all but `[SEP]`
    again = load_recipe("mote", overrides(model, data, tmp_path / "more", f"model.kind={kind}"))
    built, _ = build_model(again, open_checkpoint(str(model)), tmp_path / "more")
    assert type(built[1]).__name__ == "TextPooling"


@pytest.mark.long
def test_a_mote_that_pools_instructions_is_trained_without(upcycled: Path, data: Path, tmp_path: Path) -> None:
    settings = overrides(upcycled, data, tmp_path / "run", "model.instruction_pooling=excluded", "model.max_length=64")
    model = train("mote", settings)
    assert instruction_pooling_in(model) == "excluded"
    assert instruction_pooling_in(upcycled) == "included"
