"""`mote mine` and `mote filter` on datasets: same rows, columns that recipes read, resumed runs, clear errors."""

import re
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import datasets
import numpy as np
import pytest
from helpers.checkpoints import contents, dense_checkpoint, edit_json, read_json, trusted
from helpers.kills import kill_at_random
from helpers.paths import ROOT, SMALL_MOTE
from helpers.rows import read_rows, write_rows
from sentence_transformers import CrossEncoder, SentenceTransformer, SparseEncoder
from sentence_transformers.util import mine_hard_negatives

import mote
from mote.cli import main
from mote.corpora import runs
from mote.corpora.encoder import Encoder
from mote.data.columns import check_row, find_columns
from mote.data.settings import DatasetSource
from mote.reporting import HOW_TO_RESUME

pytest.importorskip("bm25s")

ANIMALS = ["whale", "otter", "heron", "badger", "lynx", "gecko", "moose", "stoat", "finch", "viper"]
PLACES = ["river", "forest", "desert", "island"]
GOLDEN = [[15, 3, 10], [52, 25, 58], [55, 15, 6], [14, 18, 53], [27, 53, 9], [23, 51, 53], [28, 29, 41], [20, 30, 47]]
ROWS = [
    {"id": number, "query": f"{animal} {place}", "positive": f"the {animal} of the {place} {number}"}
    for number, (animal, place) in enumerate((animal, place) for animal in ANIMALS for place in PLACES)
]


@pytest.fixture
def data(tmp_path: Path) -> Path:
    write_rows(tmp_path / "data/retrieval/animals/train.jsonl.gz", ROWS)
    write_rows(tmp_path / "data/retrieval/few/train.jsonl", ROWS[:6])
    return tmp_path / "data"


def mine(data: Path, model: str | Path, name: str = "mined", **options: Any) -> Path:
    chosen = {"negatives": 3, "depth": 20, "relative_margin": None, "data": data, **options}
    return mote.mine_negatives(["retrieval/*"], data.parent / name, model, **chosen)


def entry_of(out: Path, name: str = "animals") -> dict[str, Any]:
    files = read_json(out / "record.json")["files"]
    return next(entry for entry in files.values() if entry["dataset"] == f"retrieval/{name}")


def test_rows_come_back_with_negatives_that_recipes_read(data: Path) -> None:
    out = data.parent / "mined"
    command = ["mine", "retrieval/*", "--model", "bm25", "--data", str(data), "--out", str(out), "--negatives", "3"]
    assert main([*command, "--relative-margin", "0.3"]) == 0
    mined = read_rows(out / "retrieval/animals/train.jsonl.gz")
    assert [{key: row[key] for key in ROWS[0]} for row in mined] == ROWS
    columns = find_columns(DatasetSource(path="x"), mined[0], "mined")
    for row in mined:
        negatives = check_row(row, columns).negatives
        animal, place = row["query"].split()
        assert len(negatives) == 3
        assert all(animal in text or place in text for text in negatives)  # near
        assert row["positive"] not in negatives
    entry = entry_of(out)
    assert (entry["rows"], entry["with_all_negatives"], entry["without_negatives"]) == (40, 40, 0)
    assert entry["mean_positive_score"] > entry["mean_negative_score"] > 0
    assert sorted(path.name for path in out.iterdir()) == ["record.json", "retrieval"]


def test_a_cross_encoder_scores_positives_and_negatives(
    data: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    teacher = CrossEncoder(str(model), num_labels=1, device="cpu")
    teacher.save_pretrained(str(tmp_path / "cross"))
    write_rows(data / "retrieval/few/train.jsonl", [{**row, "positive": [row["positive"], "both"]} for row in ROWS[:6]])
    monkeypatch.setattr(runs, "BLOCK", 7)
    without, out = mine(data, "bm25", "without"), mine(data, "bm25", scores=str(tmp_path / "cross"))
    for name in ("animals/train.jsonl.gz", "few/train.jsonl.gz"):
        rows = read_rows(out / "retrieval" / name)
        assert [{key: row[key] for key in row if key != "scores"} for row in rows] == read_rows(
            without / "retrieval" / name
        )
        columns = find_columns(DatasetSource(path="x"), rows[0], name)
        for row in (check_row(each, columns) for each in rows):
            texts = [*row.positives, *row.negatives]
            expected = teacher.predict([(row.anchor, text) for text in texts], show_progress_bar=False)
            assert [row.scores[text] for text in texts] == pytest.approx(expected.tolist(), abs=1e-5)
            assert len({*row.scores.values()}) > 1
    edit_json(tmp_path / "cross" / "config.json", another=True)
    with pytest.raises(ValueError, match="another run, which differs in scores"):
        mine(data, "bm25", scores=str(tmp_path / "cross"))


@pytest.mark.long
def test_the_negatives_are_those_of_sentence_transformers(tmp_path: Path) -> None:
    """Also pins them: the rows of the negatives of a dataset's first pairs."""
    rows = read_rows(ROOT / "examples/data/retrieval/arxiv/train.jsonl.gz")[:60]
    names = find_columns(DatasetSource(path="x"), rows[0], "arxiv").names
    (anchor,), (positive,) = names["anchor"], names["positive"]
    write_rows(tmp_path / "retrieval/arxiv/train.jsonl", rows)
    options = {"query_task": "query", "document_task": "document", "trust_remote_code": True}
    out = mote.mine_negatives(["retrieval/*"], tmp_path / "out", SMALL_MOTE, data=tmp_path, negatives=3, **options)
    texts = [row[positive] for row in rows]
    mined = [
        [texts.index(row[f"negative_{number}"]) for number in (1, 2, 3)]
        for row in read_rows(out / "retrieval/arxiv/train.jsonl.gz")
    ]
    assert mined[:8] == GOLDEN
    theirs = mine_hard_negatives(
        datasets.Dataset.from_list([{"anchor": row[anchor], "positive": row[positive]} for row in rows]),
        trusted(SMALL_MOTE),
        query_prompt_name="query",
        corpus_prompt_name="document",
        relative_margin=0.05,
        range_max=50,
        num_negatives=3,
        output_format="n-tuple",
        verbose=False,
    )
    assert mined == [[texts.index(row[f"negative_{number}"]) for number in (1, 2, 3)] for row in theirs]


@pytest.mark.long
def test_in_blocks_and_in_one_piece_the_same(data: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = mine(data, model, sampling="random")
    monkeypatch.setattr(runs, "BLOCK", 7)
    blocks = mine(data, model, "blocks", sampling="random")
    file = "retrieval/animals/train.jsonl.gz"
    assert (blocks / file).read_bytes() == (whole / file).read_bytes()


def test_a_corpus_adds_candidates_each_once(data: Path, model: Path) -> None:
    write_rows(data / "retrieval/few/train.jsonl", [ROWS[0], {**ROWS[0], "positive": ROWS[0]["positive"].upper()}] * 2)
    rows = [{"text": " "}, {"title": "One", "text": "two"}, {"text": "ONE  TWO "}]
    few = read_rows(
        mine(data, model, corpus=[write_rows(data.parent / "corpus.jsonl", rows)]) / "retrieval/few/train.jsonl.gz"
    )
    assert [row["negative_1"] for row in few] == ["One two"] * 4
    assert all("negative_2" not in row for row in few)


def test_a_dataset_on_the_hub(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = datasets.Dataset.from_list(ROWS[:8])
    for module in ("mote.data.rows", "mote.corpora.runs"):
        monkeypatch.setattr(f"{module}.load_from_hub", lambda settings: dataset)
    out = data.parent / "hub"
    options = {"subset": "small", "negatives": 1, "relative_margin": -1}
    mote.mine_negatives(["hub:me/animals"], out, "bm25", **options)
    mined = read_rows(out / "me/animals/small/train.jsonl.gz")
    assert [row["query"] for row in mined] == [row["query"] for row in ROWS[:8]]
    dataset = datasets.Dataset.from_list(ROWS[:9])
    with pytest.raises(ValueError, match="differs in datasets"):
        mote.mine_negatives(["hub:me/animals"], out, "bm25", **options)


def test_planted_mismatches_are_dropped_and_others_kept(data: Path) -> None:
    wrong = {3, 11, 30}
    positives = {number: ROWS[(number + 5) % 40]["positive"] for number in wrong}
    planted = [{**row, "positive": positives.get(row["id"], row["positive"])} for row in ROWS]
    write_rows(data / "retrieval/animals/train.jsonl.gz", planted)
    out = data.parent / "filtered"
    command = ["filter", "retrieval/animals", "--model", "bm25", "--data", str(data), "--out", str(out)]
    assert main([*command, "--nearest", "1", "--shard-size", "25"]) == 0
    assert read_rows(out / "retrieval/animals/train.jsonl.gz") == [
        row for index, row in enumerate(planted) if index not in wrong
    ]
    entry = entry_of(out)
    assert (entry["rows"], entry["kept"], entry["dropped"]) == (40, 37, 3)


def test_rows_of_test_sets_and_near_duplicates_are_dropped(data: Path) -> None:
    tests = data.parent / "tests"
    write_rows(tests / "beir/zoo/queries.jsonl", [{"_id": "q", "text": "Whale   river"}])
    corpus = [{"_id": f"d{number}", "title": "", "text": ROWS[number]["positive"]} for number in (7, 9)]
    write_rows(tests / "beir/zoo/corpus.jsonl", corpus)
    (tests / "beir/zoo/qrels").mkdir()
    (tests / "beir/zoo/qrels/test.tsv").write_text("query-id\tcorpus-id\tscore\nq\td7\t1\nq\td9\t0\n")
    long = "the heron stood for hours in cold shallow water near the old wooden bridge"
    write_rows(tests / "classification/birds/test.jsonl", [{"text": long, "label": "heron"}])
    near, contains = long.replace(" old ", " "), f"{long} {long.translate(str.maketrans('aeiou', 'uoiea'))}"
    labelled = [{"text": text, "label": label} for label, text in zip("abc", (near, contains, "other"), strict=True)]
    write_rows(data / "classification/notes/train.jsonl", labelled)
    out = data.parent / "clean"
    command = ["filter", "retrieval/animals", "classification/notes", "--model", "bm25", "--against", str(tests)]
    assert main([*command, "--data", str(data), "--out", str(out), "--threshold", "0.8"]) == 0
    kept = {row["id"] for row in read_rows(out / "retrieval/animals/train.jsonl.gz")}
    assert {*range(40)} - kept == {0, 7}  # with the query and its answer; 9 does not answer it
    assert [row["label"] for row in read_rows(out / "classification/notes/train.jsonl.gz")] == ["b", "c"]
    entry = entry_of(out)
    assert (entry["equal"], entry["test_sets"]) == (2, {"beir/zoo": 2})
    notes = next(one for one in read_json(out / "record.json")["files"].values() if one["dataset"].endswith("notes"))
    assert (notes["equal"], notes["near"], notes["test_sets"]) == (0, 1, {"classification/birds": 1})
    shutil.rmtree(tests / "classification")
    with pytest.raises(ValueError, match="differs in against"):
        mote.filter_pairs(command[1:3], out, "bm25", data=data, against=tests, threshold=0.8)


def test_a_finished_run_is_left_alone_and_another_one_refused(data: Path, caplog: pytest.LogCaptureFixture) -> None:
    out = mine(data, "bm25")
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*.gz")}
    assert mine(data, "bm25") == out
    assert before == {path: path.stat().st_mtime_ns for path in out.rglob("*.gz")}
    with pytest.raises(ValueError, match=r"another run, which differs in negatives \(3, now 2\): choose another"):
        mine(data, "bm25", negatives=2)
    write_rows(data / "retrieval/few/train.jsonl", ROWS[:7])
    with pytest.raises(ValueError, match="differs in datasets"):
        mine(data, "bm25")
    mine(data, "bm25", negatives=2, overwrite=True)
    assert len(read_rows(out / "retrieval/few/train.jsonl.gz")) == 7
    (out / "retrieval/few/train.jsonl.gz").write_bytes(b"damaged")
    mine(data, "bm25", negatives=2)
    assert len(read_rows(out / "retrieval/few/train.jsonl.gz")) == 7


def test_the_teacher_is_loaded_once_and_known_by_its_weights(
    data: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads: list[str] = []
    load = Encoder.model.func
    monkeypatch.setattr(Encoder.model, "func", lambda self: loads.append(self.source) or load(self))
    folder = Path(shutil.copytree(model, tmp_path / "teacher"))
    mine(data, folder)  # two datasets, two sides each
    assert len(loads) == 1
    mine(data, folder.rename(tmp_path / "moved"))
    assert len(loads) == 1  # all is finished
    folder = (tmp_path / "moved").rename(folder)
    (weights,) = folder.rglob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-4] + b"\0\0\0?")
    with pytest.raises(ValueError, match="another run, which differs in model"):
        mine(data, folder)


def test_embeddings_are_kept_for_other_runs(data: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {"embeddings": data.parent / "embeddings"}
    first = contents(mine(data, model, "first", **kept))
    monkeypatch.setattr(Encoder.model, "func", lambda *_: pytest.fail("the embeddings are there"))
    assert contents(mine(data, model, "again", **kept)) == first
    none = entry_of(mine(data, model, "margin", relative_margin=1.0, **kept), "few")
    assert (none["without_negatives"], none["negatives"], none["mean_negative_score"]) == (6, 0, None)
    mote.filter_pairs(["retrieval/*"], data.parent / "filtered", model, data=data, **kept)  # one shard: the same texts
    with pytest.raises(pytest.fail.Exception):
        mine(data, model, "fewer", dimensions=8, **kept)


@pytest.mark.slow
def test_on_ray(data: Path, model: Path) -> None:
    pytest.importorskip("ray")
    local = contents(mine(data, model))
    assert contents(mine(data, model, "ray", engine="ray", workers=1)) == local


@pytest.mark.processes
def test_two_processes_start_once_and_change_nothing(data: Path, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one = contents(mine(data, model))
    starts: list[list[str]] = []
    start = SentenceTransformer.start_multi_process_pool
    counted = lambda self, devices: starts.append(devices) or start(self, devices)  # noqa: E731
    monkeypatch.setattr(SentenceTransformer, "start_multi_process_pool", counted)
    assert contents(mine(data, model, "two", device=["cpu", "cpu"])) == one
    assert starts == [["cpu", "cpu"]]


def test_an_interrupted_run_keeps_its_blocks_and_says_that_it_resumes(
    data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "BLOCK", 10)
    whole = contents(mine(data, "bm25", "whole"))
    with monkeypatch.context() as patched:
        patched.setattr(runs, "write_rows", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt, match=re.escape(HOW_TO_RESUME)):
            mine(data, "bm25")
    assert len([*(data.parent / "mined/.work").rglob("block-*.npz")]) == 4
    assert contents(mine(data, "bm25")) == whole


@pytest.mark.processes
def test_killed_at_random_moments_it_ends_the_same(data: Path, model: Path) -> None:
    whole, killed = data.parent / "whole", data.parent / "killed"
    options = ["--model", model, "--data", data, "--negatives", 3, "--depth", 20, "--out", "OUT"]
    kill_at_random(whole, killed, 10, "mine", "retrieval/*", *map(str, options))
    assert contents(killed) == contents(whole)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"query": "a", "positive": ""}], r"train\.jsonl:1: 'positive': String should have at least 1 character"),
        ([ROWS[0], {**ROWS[1], "negative_1": "n"}], "already has negatives, and no others can be added"),
        ([{"text": "a", "label": "b"}], r"'label', 'text' are not pairs \(anchor, positive\)"),
        ([{"query": "a", "positive": "b", "of": [{"page": "\ud800"}]}], r"train\.jsonl:1: .* encode .*ud800"),
        ([{"query": "a", "positive": "b", "raw": b"c"}], r"row 1: .*bytes is not JSON serializable"),
    ],
)
def test_rows_that_cannot_be_mined(rows: list[dict[str, Any]], message: str, data: Path) -> None:
    packed = any(isinstance(value, bytes) for row in rows for value in row.values())
    (data / "retrieval/few/train.jsonl").unlink()
    write_rows(data / f"retrieval/few/train.{'parquet' if packed else 'jsonl'}", rows)
    with pytest.raises(ValueError, match=message):
        mine(data, "bm25")


@pytest.mark.parametrize("retrieval", ["sparse", "hybrid"])
def test_a_sparse_teacher(retrieval: Any, data: Path, tmp_path: Path) -> None:
    source = dense_checkpoint(tmp_path / "tiny", head="mlm")
    folder = mote.upcycle(source, tmp_path / "sparse", retrieval=retrieval)
    command = ["mine", "retrieval/few", "--model", str(folder), "--data", str(data), "--trust-remote-code"]
    command += ["--negatives", "1", "--relative-margin", "-1", "--batch-size", "4", "--device", "cpu"]
    assert main([*command, "--out", str(tmp_path / "mined")]) == 0
    encoder = SparseEncoder(str(folder), trust_remote_code=True, device="cpu")
    documents = [row["positive"] for row in ROWS[:6]]
    queries = encoder.encode_query([row["query"] for row in ROWS[:6]]).to_dense()
    scores = (queries @ encoder.encode_document(documents).to_dense().T).fill_diagonal_(-np.inf)
    nearest = [documents[place] for place in scores.argmax(dim=1)]
    assert [row["negative_1"] for row in read_rows(tmp_path / "mined/retrieval/few/train.jsonl.gz")] == nearest
    with pytest.raises(ValueError, match="truncate_dim"):
        mine(data, folder, "fewer", trust_remote_code=True, dimensions=8)
