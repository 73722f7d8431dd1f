"""Whether instructions are pooled, in the files of a model: set, kept, exported, refused."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest
from helpers.checkpoints import edit_json, files_in, read_json, trusted
from sentence_transformers import SentenceTransformer

import mote
from mote.checkpoints.st_settings import instruction_pooling_in
from mote.inference.runtimes import convert

TEXTS = ["how do whales breathe", "bread"]
CODE = {"instruction_mote.py", "task_instruction_mote.py"}


@pytest.fixture(scope="module")
def excluded(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("excluded") / "tiny"
    settings = {"instruction_pooling": "excluded", "instructions": {"search_document": ""}}
    return mote.configure(trained, folder, **settings)


@pytest.fixture(scope="module")
def queries(excluded: Path) -> np.ndarray:
    return trusted(excluded).encode_query(TEXTS)


@pytest.mark.long
def test_set_and_set_back(trained: Path, excluded: Path, queries: np.ndarray, tmp_path: Path) -> None:
    edit_json(excluded / "1_Pooling" / "config.json", include_prompt=None)  # as published before there was the setting
    mote.configure(excluded, instruction_pooling="excluded")
    assert instruction_pooling_in(excluded) == "excluded"
    assert files_in(excluded) >= CODE
    assert read_json(excluded / "1_Pooling" / "config.json")["include_prompt"] is False
    assert read_json(excluded / "mote.json")["steps"][-1]["settings"]["instruction_pooling"] == "excluded"
    assert "left out of the pooling" in (excluded / "README.md").read_text()
    back = mote.configure(excluded, tmp_path / "back", instruction_pooling="included")
    assert instruction_pooling_in(back) == "included"
    assert not CODE & files_in(back)
    assert "left out of the pooling" not in (back / "README.md").read_text()
    before = trusted(trained).encode_query(TEXTS)
    assert np.array_equal(trusted(back).encode_query(TEXTS), before)
    assert np.abs(queries - before).max() > 1e-2


@pytest.mark.long
def test_it_stays_through_saving_and_verbs(excluded: Path, queries: np.ndarray, tmp_path: Path) -> None:
    trusted(excluded).save(str(tmp_path / "saved"))
    assert files_in(tmp_path / "saved") >= CODE
    renamed = mote.transform(tmp_path / "saved", tmp_path / "renamed", mote.experts.rename, "clustering", "topics")
    by_count = mote.configure(renamed, tmp_path / "count", instruction_pooling="excluded_by_count")
    assert instruction_pooling_in(by_count) == "excluded_by_count"
    for folder in (tmp_path / "saved", renamed):
        assert instruction_pooling_in(folder) == "excluded"
        assert np.array_equal(trusted(folder).encode_query(TEXTS), queries)


def test_an_exported_expert(excluded: Path, queries: np.ndarray, tmp_path: Path) -> None:
    expert = mote.transform(excluded, tmp_path / "expert", mote.experts.export, "search_query")
    assert {path for path in files_in(expert) if path.endswith(".py")} == {"instruction_mote.py"}
    assert np.array_equal(trusted(expert).encode(TEXTS), queries)
    assert 'SentenceTransformer("expert", trust_remote_code=True)' in (expert / "README.md").read_text()
    with pytest.raises(ValueError, match="trust_remote_code"):
        SentenceTransformer(str(expert))
    again = mote.upcycle(str(expert), tmp_path / "again", experts=["search_query"])
    assert np.array_equal(trusted(again).encode_query(TEXTS), queries)


@pytest.mark.long
@pytest.mark.parametrize("backend", ["onnx", "openvino"])
def test_an_expert_in_a_runtime(excluded: Path, queries: np.ndarray, tmp_path: Path, backend: str) -> None:
    pytest.importorskip({"onnx": "onnxscript", "openvino": "nncf"}[backend])
    after = partial(convert, backend=backend, texts=TEXTS)
    expert = mote.transform(excluded, tmp_path / "expert", mote.experts.export, "search_query", after=after)
    precise = {"INFERENCE_PRECISION_HINT": "f32"}
    loaded = mote.load_exported(expert, backend, ov_config=precise, trust_remote_code=True)
    assert np.abs(loaded.encode(TEXTS) - queries).max() <= 1e-5


@pytest.mark.long
def test_a_token_routed_model(dense: Path, tmp_path: Path) -> None:
    options = {"routing": "token", "instruction_pooling": "excluded"}
    folder = mote.upcycle(str(dense), tmp_path / "routed", **options)
    model = trusted(folder)
    model.save(str(tmp_path / "saved"))
    assert np.array_equal(trusted(tmp_path / "saved").encode_query(TEXTS), model.encode_query(TEXTS))
    source = SentenceTransformer(str(dense))
    tokens = source.tokenizer("search_query: ")["input_ids"]
    states = source.encode(["search_query: " + text for text in TEXTS], output_value="token_embeddings")
    expected = np.stack([state[len(tokens) - 1 :].mean(dim=0).numpy() for state in states])
    assert np.abs(model.encode_query(TEXTS) - expected).max() <= 1e-5


def test_definitions(dense: Path, tmp_path: Path) -> None:
    folder = mote.upcycle(str(dense), tmp_path / "one", definitions={"search_query": "Find answers", "sts": "Compare"})
    prompts = trusted(folder).prompts
    assert prompts["query"] == prompts["Retrieval-query"] == "Instruct: Find answers\nQuery: "
    assert prompts["STS"] == "Instruct: Compare\nQuery: "
    assert prompts["document"] == prompts["Retrieval-document"] == prompts["Clustering"] == ""
    changed = mote.configure(folder, tmp_path / "two", instructions={"clustering": mote.instruction_with("Group")})
    assert trusted(changed).prompts["Clustering"] == "Instruct: Group\nQuery: "
    plan = mote.plan_upcycling(str(dense), definitions={"search_query": "Find"}, template="Do: {definition} | {text}")
    assert plan.config.instruction_of("query") == "Do: Find | "
    one = {"experts": ["all"], "tasks": {"search_query": "all", "search_document": "all", "sts": "all"}}
    plan = mote.plan_upcycling(str(dense), **one, definitions={"search_query": "Find"})
    assert set(plan.config.tasks) == {"all", "search_query", "search_document", "query", "document", "sts"}
    texts = {task: plan.config.instruction_of(task) for task in plan.config.tasks}
    find = "Instruct: Find\nQuery: "
    assert texts == {**dict.fromkeys(plan.config.tasks, ""), "search_query": find, "query": find}
    for options, message in [
        ({"definitions": {"sts": "a"}, "instructions": {"sts": "b"}}, "'sts' has an instruction and a definition"),
        ({"template": "Do {definition}"}, "The template is for definitions, but there are none"),
        ({"definitions": {"sts": "a"}, "template": "{text} {definition}"}, "must hold {definition} once"),
    ]:
        with pytest.raises(ValueError, match=message):
            mote.plan_upcycling(str(dense), **options)
    with pytest.raises(ValueError, match=r"Unknown instruction_pooling 'exclude'\. Did you mean 'excluded'"):
        mote.configure(folder, instruction_pooling="exclude")
