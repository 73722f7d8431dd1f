"""`mote embed`: embeddings are those of `encode`, and a run that ends early resumes."""

import json
import re
import shutil
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.checkpoints import contents, dense_checkpoint, read_json, trusted
from helpers.families import make_different
from helpers.kills import kill_at_random
from helpers.rows import write_rows
from pyarrow import parquet
from sentence_transformers import SentenceTransformer

import mote
from mote.cli import main
from mote.corpora import engines, record
from mote.corpora.embed import read_embeddings
from mote.corpora.encoder import Encoder
from mote.corpora.options import CorpusOptions
from mote.corpora.record import Record
from mote.files import lock
from mote.inference.loading import load_encoder
from mote.remote.modeling_mote import MoTEModel
from mote.reporting import HOW_TO_RESUME

WORDS = ["whales", "breathe", "air", "rain", "tomorrow", "proof", "theorem", "card", "bank", "list", "files", "folder"]
TEXTS = [" ".join([chr(97 + number), *WORDS[: (7 * number) % 12]]) for number in range(20)]


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    rows = [{"_id": f"d{number}", "text": text} for number, text in enumerate(TEXTS)]
    return write_rows(tmp_path / "corpus.jsonl.gz", rows)


def embed(model: Path, corpus: Path, name: str = "out", **settings: Any) -> Path:
    return mote.embed_corpus(model, corpus, corpus.parent / name, **{"shard_size": 6, **settings})


def embeddings_in(folder: Path) -> np.ndarray:
    return np.concatenate(list(read_embeddings(folder)[1]))


def expected(model: Path, **arguments: Any) -> np.ndarray:
    return np.asarray(SentenceTransformer(str(model)).encode(TEXTS, **arguments))


def test_embeddings_are_those_of_encode(model: Path, corpus: Path) -> None:
    out = corpus.parent / "out"
    assert main(["embed", str(model), str(corpus), "--out", str(out), "--shard-size", "6"]) == 0
    shards = [f"shard-0000{number}.parquet" for number in range(4)]
    assert sorted(path.name for path in out.iterdir()) == ["manifest.json", *shards]
    ids, parts = read_embeddings(out)
    assert ids == [f"d{number}" for number in range(20)]
    assert np.allclose(np.concatenate(list(parts)), expected(model), atol=1e-5)
    manifest = read_json(out / "manifest.json")
    assert (manifest["texts"]["rows"], manifest["complete"]) == (20, True)
    assert [shard["rows"] for shard in manifest["files"].values()] == [6, 6, 6, 2]


@pytest.mark.parametrize(
    ("settings", "arguments"),
    [
        ({"task": "query"}, {"prompt_name": "query"}),
        ({"task": "document"}, {"prompt_name": "document"}),
        ({"prompt": "rain "}, {"prompt": "rain "}),
        ({"dimensions": 5}, {"truncate_dim": 5}),
        ({"max_length": 4}, {}),
        ({"model_dtype": "bfloat16"}, {}),
    ],
)
def test_settings(settings: Any, arguments: Any, model: Path, corpus: Path) -> None:
    dtype = settings.get("model_dtype", "float32")
    encoder = SentenceTransformer(str(model), device="cpu", model_kwargs={"dtype": dtype})
    encoder.max_seq_length = settings.get("max_length", encoder.max_seq_length)
    found = embeddings_in(embed(model, corpus, **settings))
    assert np.allclose(found, encoder.encode(TEXTS, **arguments), atol=1e-5 if dtype == "float32" else 2e-2)
    if not arguments:
        assert not np.allclose(found, expected(model), atol=1e-5)
        with pytest.raises(ValueError, match="another run, which differs in model"):
            embed(model, corpus)


def test_experts(trained_folder: Path, corpus: Path) -> None:
    encoder = trusted(trained_folder)
    found = embeddings_in(embed(trained_folder, corpus, task="clustering", trust_remote_code=True))
    assert np.allclose(found, encoder.encode(TEXTS, prompt_name="clustering"), atol=1e-5)
    assert not np.allclose(found, encoder.encode(TEXTS, prompt_name="classification"), atol=1e-2)
    index = read_json(trained_folder / "model.safetensors.index.json")["metadata"]["mote"]
    expert = Path(index["experts"]["clustering"]).stem.removeprefix("model-expert-clustering-")
    weights = {"base": index["base"], "experts": {"clustering": expert}}
    assert read_json(corpus.parent / "out" / "manifest.json")["weights"] == weights
    other = shutil.copytree(trained_folder, corpus.parent / "other")
    make_different(MoTEModel.from_pretrained(other)).save_pretrained(other)
    with pytest.raises(ValueError, match="another run, which differs in model"):
        embed(other, corpus, task="clustering", trust_remote_code=True)


def test_truncated_texts_are_counted(model: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    """Also those of shards that were embedded before an interruption."""
    with monkeypatch.context() as patched:
        interrupted(patched, engines, "write_shard", lambda path, *_: "00002" in path.name, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            embed(model, corpus, prompt="rain ", max_length=20)
    embed(model, corpus, prompt="rain ", max_length=20)
    tokenizer = SentenceTransformer(str(model)).tokenizer
    alone, expected = (
        sum(len(ids) > 20 for ids in tokenizer([prompt + text for text in TEXTS])["input_ids"])
        for prompt in ("", "rain ")
    )
    assert 0 < alone < expected < 20
    assert [entry.message for entry in caplog.records if "truncated" in entry.message] == [
        f"{expected} texts are longer than the model reads, and were truncated: split them"
    ]


def test_a_role_by_another_name_is_not_hidden(corpus: Path, tmp_path: Path) -> None:
    """Sentence-Transformers gives the model an empty prompt `document`."""
    prompts = {"prompts": {"query": "query: ", "passage": "passage: "}}
    dense = dense_checkpoint(tmp_path / "dense" / "tiny", sentence_transformers=prompts)
    with pytest.raises(ValueError, match=r"Unknown task 'document'\. Available: 'passage'"):
        embed(dense, corpus, task="document")
    named = embed(dense, corpus, task="passage")
    assert np.allclose(embeddings_in(named), expected(dense, prompt_name="passage"), atol=1e-6)


def test_a_column_of_tasks(model: Path, tmp_path: Path) -> None:
    tasks = ["query" if number % 3 else "document" for number in range(20)]
    rows = [{"text": text, "role": task} for text, task in zip(TEXTS, tasks, strict=True)]
    found = embeddings_in(embed(model, write_rows(tmp_path / "rows.parquet", rows), task_column="role"))
    by_task = {task: expected(model, prompt_name=task) for task in ("query", "document")}
    assert np.allclose(found, [by_task[task][row] for row, task in enumerate(tasks)], atol=1e-5)
    rows[9]["role"] = "qery"
    with pytest.raises(ValueError, match=r"Unknown task 'qery'. Did you mean 'query'\?"):
        embed(model, write_rows(tmp_path / "rows.parquet", rows), "other", task_column="role")


def test_batches_hold_texts_with_as_many_tokens(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = 2 * ["whales " * 7, "whales " * 7, "w h a l e s " * 4, "w h a l e s " * 4 + "in"]  # 49, 49, 48, 50 letters
    corpus = write_rows(tmp_path / "corpus.jsonl.gz", [{"text": text} for text in texts])
    encoder = SentenceTransformer(str(model))
    own = Encoder(str(model), CorpusOptions())
    own.model = encoder
    counted = own._count_tokens(texts)
    assert counted == [len(ids) for ids in encoder.tokenizer(texts)["input_ids"]]
    monkeypatch.setattr(Encoder, "model", encoder)
    shapes: list[torch.Size] = []
    encoder[0].register_forward_pre_hook(lambda _, args: shapes.append(args[0]["input_ids"].shape))
    found = embeddings_in(embed(model, corpus, batch_size=4, shard_size=8))
    assert shapes == [(4, length) for length in sorted(counted, reverse=True)[::4]]
    assert np.allclose(found, encoder.encode(texts), atol=1e-5)


def interrupted(monkeypatch: pytest.MonkeyPatch, place: Any, name: str, at: Callable[..., bool], error: Any) -> None:
    original = getattr(place, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        if at(*args, **kwargs):
            raise error
        return original(*args, **kwargs)

    monkeypatch.setattr(place, name, call)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_an_interrupted_run_resumes(
    dtype: str, model: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = contents(embed(model, corpus, "whole", dtype=dtype))
    with monkeypatch.context() as patched:
        interrupted(patched, engines, "write_shard", lambda path, *_: "00002" in path.name, KeyboardInterrupt())
        words = ["embed", str(model), str(corpus), "--out", str(corpus.parent / "out"), "--shard-size", "6"]
        assert main([*words, "--dtype", dtype]) == 130
    assert HOW_TO_RESUME in capsys.readouterr().err
    with pytest.raises(ValueError, match="are incomplete: run the same command again to resume"):
        read_embeddings(corpus.parent / "out")
    column = parquet.read_schema(corpus.parent / "out/shard-00001.parquet").field("embedding")
    assert str(column.type) == f"fixed_size_list<element: {'halffloat' if dtype == 'float16' else 'float'}>[16]"
    counts: list[int] = []
    encode = Encoder.encode
    monkeypatch.setattr(
        Encoder, "encode", lambda self, _, rows, *more: counts.append(len(rows)) or encode(self, _, rows, *more)
    )
    out = embed(model, corpus, dtype=dtype)
    assert counts == [6, 2]
    assert contents(out) == whole
    assert np.allclose(embeddings_in(out), expected(model), atol=1e-3)
    monkeypatch.setitem(sys.modules, "ray", None)
    for engine in ("local", "ray"):  # no cluster is needed where nothing is left
        embed(model, corpus, dtype=dtype, engine=engine)
    assert counts == [6, 2]


LAST = (Record, "update", lambda *_, complete=False, **__: complete, KeyboardInterrupt)
FIRST = (Record, "add", lambda *_, **__: True, KeyboardInterrupt)  # before it is recorded
THIRD = (engines, "write_shard", lambda path, *_: "00002" in path.name, RuntimeError)


@pytest.mark.parametrize(
    ("interrupt", "settings"), [(LAST, {}), (FIRST, {}), (FIRST, {"overwrite": True}), (THIRD, {"batch_size": 2})]
)
def test_an_interrupt_elsewhere(
    interrupt: Any, settings: Any, model: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, name, at, error = interrupt
    with monkeypatch.context() as patched:
        interrupted(patched, place, name, at, error("interrupted"))
        with pytest.raises(error):
            embed(model, corpus)
    assert (corpus.parent / "out/shard-00000.parquet").exists()
    assert np.allclose(embeddings_in(embed(model, corpus, **settings)), expected(model), atol=1e-5)
    if not settings:
        assert contents(corpus.parent / "out") == contents(embed(model, corpus, "whole"))


def test_other_embeddings_are_refused_or_replaced(model: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = embed(model, corpus)
    with lock(out / ".lock"), pytest.raises(OSError, match="out is in use by process"):
        embed(model, corpus)
    with pytest.raises(ValueError, match=r"in task \(None, now 'query'\), shard_size \(6, now 7\): .*--overwrite"):
        embed(model, corpus, task="query", shard_size=7)
    write_rows(corpus, [{"_id": "x", "text": "another"}])
    with pytest.raises(ValueError, match="differs in texts: "):
        embed(model, corpus)
    whole = contents(out)
    with pytest.raises(ValueError, match="nonsense"):
        embed(model, corpus, task="nonsense", overwrite=True)
    assert contents(out) == whole
    for place, name, at in (
        (engines, "write_shard", lambda *_: True),
        (record, "write_json", lambda path, _: path == out / "manifest.json"),
    ):
        with monkeypatch.context() as patched:
            interrupted(patched, place, name, at, KeyboardInterrupt())
            with pytest.raises(KeyboardInterrupt):
                embed(model, corpus, overwrite=True)
        assert name == "write_json" or contents(out).items() >= whole.items()
    embed(model, corpus)  # ends what was interrupted while it took the place
    assert read_embeddings(out)[0] == ["x"]
    assert sorted(path.name for path in out.iterdir()) == ["manifest.json", "shard-00000.parquet"]


def test_a_damaged_shard_is_made_again(model: Path, corpus: Path) -> None:
    shard = embed(model, corpus) / "shard-00001.parquet"
    whole = contents(shard.parent)
    shard.write_bytes(shard.read_bytes()[:-9])
    assert contents(embed(model, corpus)) == whole
    shard.unlink()
    assert contents(embed(model, corpus)) == whole


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("shard-00000.parquet", "mine", "holds other files, or another run"),
        ("manifest.json", "{", "is not valid JSON"),
        ("manifest.json", '{"files": {"notes.txt": {}}}', "another run, which differs in format"),
        ("manifest.json", '{"command": "embed", "files": {"../corpus.jsonl.gz": {}}}', "manifest.json is damaged"),
    ],
)
def test_what_others_left_is_not_touched(name: str, text: str, message: str, model: Path, corpus: Path) -> None:
    out = corpus.parent / "out"
    out.mkdir()
    (out / name).write_text(text)
    (out / "notes.txt").write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(ValueError, match=message):
            embed(model, corpus, overwrite=overwrite)
    assert contents(out) == {name: text.encode(), "notes.txt": b"mine"}


@pytest.mark.parametrize(("value", "dtype"), [(np.nan, "float32"), (1e6, "float16")])
def test_an_embedding_that_is_not_finite(
    value: float, dtype: str, model: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = Encoder.encode

    def broken(self: Encoder, *arguments: Any) -> Any:
        for rows, embeddings in encode(self, *arguments):
            embeddings[[row == 3 for row in rows]] = value
            yield rows, embeddings

    monkeypatch.setattr(Encoder, "encode", broken)
    message = f"1 embeddings are not finite in {dtype}, first that of 'd3'"
    with pytest.raises(ValueError, match=message):
        embed(model, corpus, dtype=dtype)
    assert not (corpus.parent / "out").exists()


def test_wrong_settings(model: Path, corpus: Path) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"task": "qery"}, "Unknown task 'qery'. Did you mean 'query'? Available: 'query', 'document'."),
        ({"task": "query", "prompt": "x"}, "exclude each other"),
        ({"workers": 4}, "device is for the engine local, workers are for the engine ray"),
        ({"device": "cuda:0", "engine": "ray"}, "device is for the engine local, workers are for the engine ray"),
        ({"device": "cuda:9"}, "tiny does not load in Sentence-Transformers: "),
    ]
    for settings, message in cases:
        with pytest.raises(ValueError, match=re.escape(message)):
            embed(model, corpus, **settings)
    assert not (corpus.parent / "out").exists()


@pytest.mark.slow
def test_memory_does_not_grow_with_the_corpus(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Encoder, "model", load_encoder(model))
    monkeypatch.setattr(Encoder, "encode", lambda _, __, rows, *___: [(rows, np.ones((len(rows), 16), np.float32))])
    peaks = []
    # More rows than the two batches that are in memory at once. The first run imports what is imported on first use.
    for size in (2_000, 2_000, 10_000):
        lines = (json.dumps({"text": "whales " * 100 + str(row)}) + "\n" for row in range(size))
        (tmp_path / "corpus.jsonl").write_text("".join(lines))
        tracemalloc.start()
        embed(model, tmp_path / "corpus.jsonl", f"out{len(peaks)}", shard_size=200)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[2] < 1.1 * peaks[1], peaks  # the record grows by a line for each shard


@pytest.mark.processes
def test_killed_at_random_moments(model: Path, tmp_path: Path) -> None:
    rows = [{"text": f"{text} {number}"} for number in range(100) for text in TEXTS]
    corpus = write_rows(tmp_path / "corpus.jsonl.gz", rows)
    options = ["--out", "OUT", "--shard-size", "100"]
    kill_at_random(tmp_path / "whole", tmp_path / "killed", 20, "embed", str(model), str(corpus), *options)
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")


def test_workers_end_with_a_killed_parent(tmp_path: Path) -> None:
    (tmp_path / "parent.py").write_text("""
import multiprocessing, os, time
from mote.corpora.encoder import _EndsWithParent
def wait(_):
    print(os.getpid(), flush=True)
    time.sleep(600)
if __name__ == "__main__":
    multiprocessing.get_context("spawn").Process(target=wait, args=(_EndsWithParent(),)).start()
    time.sleep(600)
""")
    command = [sys.executable, str(tmp_path / "parent.py")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as parent:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        parent.kill()
        assert parent.stdout.read() == b""  # ends once the worker has closed it, too
    assert not Path(f"/proc/{worker}/cmdline").exists() or not Path(f"/proc/{worker}/cmdline").read_bytes()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_ray(model: Path, corpus: Path) -> None:
    ray = pytest.importorskip("ray")
    one = contents(embed(model, corpus, "one"))
    ray.init(address="local", num_cpus=2, include_dashboard=False)  # once, as it takes long
    try:
        assert contents(embed(model, corpus, "ray", engine="ray", workers=2)) == one
        write_rows(corpus, [{"text": "a"}, {"text": None}])
        with pytest.raises(ValueError, match=r"corpus.jsonl.gz:2: 'text': Input should be a valid string, got None"):
            embed(model, corpus, "broken", engine="ray")
        assert not (corpus.parent / "broken").exists()
    finally:
        ray.shutdown()
