"""Chains: stages of mining and training, checked before they begin, resumed after a kill."""

import gzip
import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from helpers.checkpoints import dense_checkpoint
from helpers.rows import write_rows
from helpers.runs import train_step, weights
from sentence_transformers import SparseEncoder

from mote import chains
from mote.chains import Chain, chain, plan_chain
from mote.cli import main
from mote.training.recipe_files import load_recipe, shipped_recipes

pytest.importorskip("faiss")
pytest.importorskip("bm25s")

ANIMALS = ["whale", "otter", "heron", "badger", "lynx"]
PLACES = ["river", "forest", "desert", "island"]
ROWS = [
    {"query": f"{animal} {place}", "positive": f"the {animal} of the {place}"} for animal in ANIMALS for place in PLACES
]
TRAINING = {"batch_size": 10, "max_steps": 3, "learning_rate": 1e-2, "warmup_steps": 0, "save_steps": 1}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny encoder, `dense`, and a data folder, `data`."""
    place = tmp_path_factory.mktemp("chains")
    dense_checkpoint(place / "dense", sentence_transformers={})
    write_rows(place / "data/retrieval/animals/train.jsonl", ROWS)
    write_rows(place / "data/classification/few/train.jsonl", [{"text": "a", "label": "b"}])
    write_rows(place / "data/loose.jsonl", ROWS)
    return place


def chain_file(place: Path, folder: Path, **changes: Any) -> Path:
    """The shipped chain, small: three negatives and two steps in each stage."""
    mining = {"negatives": 3, "depth": 10, "relative_margin": None}
    stages: dict[str, Any] = {
        "stage1": {"mining": {**mining, "sampling": "top"}},
        "stage2": {"mining": {**mining, "sampling": "top"}, "train": {"model": {"instructions": False}}},
    }
    for name, of_stage in changes.pop("stages", {}).items():
        stages[name] = {**stages.get(name, {}), **of_stage}
    settings = {
        "extends": "cot",
        "name": "small",
        "data": {"folder": str(place / "data")},
        "train": {
            "model": {"source": str(place / "dense")},
            "training": TRAINING,
            "validation": {"share": 0.2},
        },
        "stages": stages,
        "output": str(folder / "out"),
        **changes,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "chain.yaml").write_text(yaml.safe_dump(settings, sort_keys=False))
    return folder / "chain.yaml"


def negatives_in(stage: Path) -> list[list[str]]:
    with gzip.open(stage / "mined/retrieval/animals/train.jsonl.gz", "rt", encoding="utf-8") as lines:
        return [[json.loads(line)[f"negative_{number}"] for number in (1, 2, 3)] for line in lines]


def test_the_shipped_chain() -> None:
    assert shipped_recipes(Chain.PLACE) == ["cot"]
    shipped = load_recipe("cot", ["train.model.source=x"], Chain)
    assert [(stage.teacher.model, stage.recipe) for stage in shipped.stages.values()] == [
        ("bm25", "cot-stage1"),
        ("stage1", "cot-stage2"),
    ]
    assert shipped.folder == Path("runs/cot")
    assert "mote chain cot" in (Chain.PLACE / "cot.yaml").read_text().split("\nname:")[0]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stages": {"stage1": {"teacher": {"model": "stage2"}}}}, "stage1: its teacher .* is trained later; .*: none"),
        ({"stages": {"stage1": {"teacher": {"model": "bm25", "batch_size": 8}}}}, "Stage stage1: batch_size is a sett"),
        ({"stages": {"stage1": {"teacher": {"model": "bm25", "btch": 8}}}}, "teacher.btch: Unexpected keyword"),
        ({"stages": {"stage1": {"mining": {"negatives": 0}}}}, "mining: negatives must be at least 1"),
        ({"stages": {"stage1": {"teacher": {"model": "user/none"}}}}, "Stage stage1: .*user/none"),
        ({"stages": {"stage2": {"recipe": "cot-stag2"}}}, "Stage stage2: There is no recipe 'cot-stag2'. Did you mean"),
        ({"stages": {"stage2": {"train": {"training": {"batchsize": 8}}}}}, r"Stage stage2: .*\n.*'batchsize'"),
        ({"stages": {"stage2": {"train": {"model": {"source": "no/where"}}}}}, "Stage stage2: .*no/where"),
        (
            {"stages": {"stage2": {"teacher": {"model": "stage1", "query_task": "search_qery"}}}},
            "Stage stage2: teacher: the model of 'stage1' has no task 'search_qery'. Did you mean 'search_query'",
        ),
        (
            {"stages": {"stage1": {"train": {"tasks": {"retrieval": {"datasets": ["*/*"]}}}}}},
            "Stage stage1: tasks.retrieval: no negatives are mined for classification/few",
        ),
        (
            {
                "datasets": ["retrieval/*", "loose.jsonl"],
                "stages": {"stage1": {"train": {"tasks": {"retrieval": {"datasets": ["loose.jsonl"]}}}}},
            },
            "mined rows of loose.jsonl are in a folder loose, .*: move the dataset to loose/train.jsonl",
        ),
        ({"datasets": ["nothing/*"]}, r"Nothing matches the pattern nothing/\*"),
        ({"stages": {"a/b": {"teacher": {"model": "bm25"}, "recipe": "cot-stage1"}}}, "the stage 'a/b' names a folder"),
        ({"extends": "none"}, "There is no recipe 'none'. Available: 'cot'"),
        ({"stagess": {}}, "unknown key 'stagess'. Did you mean 'stages'"),
    ],
)
def test_a_bad_chain_is_refused_before_anything_is_run(
    changes: dict[str, Any], message: str, place: Path, tmp_path: Path
) -> None:
    file = chain_file(place, tmp_path, **changes)
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        chain(file)
    assert {path.name for path in tmp_path.iterdir()} == {"chain.yaml"}


def test_a_plan_and_a_folder_of_something_else(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = chain_file(place, tmp_path)
    assert main(["chain", str(file), "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "datasets: retrieval/animals\n" in printed
    assert all(name in printed for name in ("bm25", "cot-stage1", "cot-stage2", "stage2/train"))
    assert not (tmp_path / "out").exists()
    (tmp_path / "out").mkdir()
    (tmp_path / "out/notes.txt").write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(FileExistsError, match="holds something other than a chain"):
            chain(file, overwrite=overwrite)


@pytest.mark.long
def test_each_stage_trains_on_what_is_mined_for_it(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "mote")
    file, out = chain_file(place, tmp_path), tmp_path / "out"
    done = chains.train
    monkeypatch.setattr(chains, "train", lambda recipe: (_ for _ in ()).throw(KeyboardInterrupt("now")))
    with pytest.raises(KeyboardInterrupt, match="in the stage stage1: now"):
        chain(file)
    trained: list[str] = []
    monkeypatch.setattr(chains, "train", lambda recipe: (trained.append(recipe.name), done(recipe)))
    changes = ["description=resumed", "stages.stage2.teacher.max_length=20"]
    model = chain(file, changes)
    assert model == out / "stage2/train/model"
    assert trained == ["cot-stage1", "cot-stage2"]
    bm25, mined = (negatives_in(out / stage) for stage in ("stage1", "stage2"))
    assert all(
        set(row["query"].split()) & set(text.split()) for row, texts in zip(ROWS, bm25, strict=True) for text in texts
    )
    assert mined != bm25
    first = SparseEncoder(str(out / "stage1/train/model"), trust_remote_code=True)
    first.max_seq_length = 20  # of up to 22
    queries, documents = (first.encode_query([row["query"] for row in ROWS]), [row["positive"] for row in ROWS])
    scores = queries.to_dense() @ first.encode_document(documents).to_dense().T
    ranked = scores.argsort(dim=1, descending=True).tolist()
    nearest = [[ROWS[place]["positive"] for place in row if place != number][:3] for number, row in enumerate(ranked)]
    assert mined == nearest  # hybrid scores of the trained model, both sides through their experts
    for stage in ("stage1", "stage2"):
        step = train_step(out / stage / "train/model")
        assert step["steps"] == 3
        assert step["sources"][0]["name"] == "dense"  # both from the same start
    record = json.loads((out / "chain.json").read_text())
    assert [(name, one["teacher"], one["negatives"]) for name, one in record.items()] == [
        ("stage1", "bm25", sum(map(len, bm25))),
        ("stage2", "stage1", 60),
    ]
    assert caplog.messages[-1].splitlines()[-1].replace("|", " ").split()[:5] == ["stage2", "stage1", "20", "60", "3"]
    with pytest.raises(FileExistsError, match=r"holds a finished chain: its model is in .*stage2/train/model"):
        chain(file)
    (out / "chain.json").write_text(json.dumps({"stage1": record["stage1"]}))  # killed before the last record
    assert chain(file, changes) == model
    assert json.loads((out / "chain.json").read_text()) == record
    assert trained == ["cot-stage1", "cot-stage2"]
    with pytest.raises(ValueError, match=r"was trained by another recipe, which differs in training\.max_steps"):
        chain(file, ["train.training.max_steps=2"])
    assert "yes" in plan_chain(file)
    before = weights(out / "stage1/train/model")
    chain(file, ["train.training.max_steps=1", "stages.stage2.train.model.source=stage1"], overwrite=True)
    assert train_step(model)["sources"][0]["name"] == "train"
    assert any(not tensor.equal(before[name]) for name, tensor in weights(out / "stage1/train/model").items())


def test_a_stage_trained_from_another_model_of_an_earlier_stage_is_refused(place: Path, tmp_path: Path) -> None:
    stage = {"teacher": {"model": "bm25"}, "mining": {"negatives": 1}, "recipe": "cot-stage1"}
    second = {**stage, "train": {"model": {"source": "stage1"}}}
    settings = yaml.safe_load(chain_file(place, tmp_path).read_text())
    file, out = tmp_path / "chain.yaml", tmp_path / "out"
    del settings["extends"]
    file.write_text(
        yaml.safe_dump({**settings, "datasets": ["retrieval/*"], "stages": {"stage1": stage, "stage2": second}})
    )
    chain(file)
    shutil.rmtree(out / "stage1")
    again = ["stages.stage1.train.training.learning_rate=1e-3"]
    with pytest.raises(
        ValueError, match=r"stage2/train/model was trained from other weights than .*stage1/train/model"
    ):
        chain(file, again)
    shutil.rmtree(out / "stage2/train")  # as the message says
    assert chain(file, again) == out / "stage2/train/model"


def test_a_killed_chain_is_resumed_to_the_same_models(place: Path, tmp_path: Path) -> None:
    file, other = chain_file(place, tmp_path / "killed"), chain_file(place, tmp_path / "whole")
    out = tmp_path / "killed/out"
    moments: list[Callable[[], bool]] = [
        (out / "stage1/mined/record.json").is_file,
        lambda: any((out / "stage1/train").glob("checkpoints/checkpoint-*/checkpoint.json")),
        (out / "stage2/mined/record.json").is_file,
        lambda: any((out / "stage2/train").glob("checkpoints/checkpoint-*/checkpoint.json")),
    ]
    for moment in moments:
        process = os.fork()  # which need not import anything
        if process == 0:
            try:
                chain(file)
            finally:
                os._exit(1)
        while not moment():
            assert os.waitpid(process, os.WNOHANG) == (0, 0), "it ended before it was killed"
            time.sleep(0.01)
        os.kill(process, signal.SIGKILL)
        assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == -signal.SIGKILL
    assert not (out / "stage2/train/model").exists()
    chain(file)
    chain(other)
    for stage in ("stage1", "stage2"):
        one, two = (weights(tmp_path / name / "out" / stage / "train/model") for name in ("killed", "whole"))
        assert one.keys() == two.keys()
        assert all(tensor.equal(two[name]) for name, tensor in one.items())
        assert negatives_in(out / stage) == negatives_in(tmp_path / "whole/out" / stage)
