"""A teacher's embeddings: right, cached, and the same after a kill as without one."""

import shutil
import signal
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.checkpoints import dense_checkpoint
from helpers.processes import run_python
from helpers.rows import write_rows
from hub.hub_server import HubServer
from safetensors.torch import load_file, save_file
from scipy.special import log_softmax, softmax
from sentence_transformers import SentenceTransformer

from mote.training import teachers
from mote.training.data import load_data
from mote.training.losses import build_loss
from mote.training.recipe import Recipe, TeacherSettings
from mote.training.teachers import TeacherEmbeddings

TEXTS = [f"text {'abcde'[i % 5] * (i % 7 + 1)} number {i}" for i in range(10)]
CHUNK = 4


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("teacher") / "tiny"
    return dense_checkpoint(folder, sentence_transformers={"prompts": {"query": "query: "}})


@pytest.fixture(autouse=True)
def _small_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a cache of its own for each test."""
    monkeypatch.setattr(teachers, "CHUNK", CHUNK)
    monkeypatch.setattr(teachers, "cached_assets_path", lambda *names: tmp_path.joinpath("assets", *names))


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    sizes: list[int] = []
    original = TeacherEmbeddings._encode

    def encode(self: TeacherEmbeddings, texts: list[str], prompt: str | None) -> np.ndarray:
        sizes.append(len(texts))
        return original(self, texts, prompt)

    monkeypatch.setattr(TeacherEmbeddings, "_encode", encode)
    return sizes


def embed(folder: Path, cache: Path | None, texts: Sequence[str] = TEXTS, prompt: str | None = None) -> np.ndarray:
    settings = TeacherSettings(source=str(folder), prompts={} if prompt is None else {"anchor": prompt})
    return np.concatenate(TeacherEmbeddings(settings, cache).embed({"anchor": list(texts)}))[:, 0]


def files(cache: Path) -> list[Path]:
    return sorted(path for path in cache.rglob("*") if path.is_file())


def test_embeddings_are_the_teachers_and_cached(teacher: Path, tmp_path: Path, encoded: list[int]) -> None:
    """By default in huggingface_hub's cache."""
    embeddings = embed(teacher, None)
    assert embeddings.dtype == np.float32
    model = SentenceTransformer(str(teacher))
    chunks = [model.encode(TEXTS[start : start + CHUNK]) for start in range(0, len(TEXTS), CHUNK)]
    assert np.array_equal(embeddings, np.concatenate(chunks))
    assert encoded == [4, 4, 2]
    assert np.array_equal(embeddings, embed(teacher, None))
    assert encoded == [4, 4, 2]
    assert len(files(tmp_path / "assets" / "mote" / "teachers")) == 3
    assert np.allclose(embed(teacher, None, prompt="query: "), model.encode(TEXTS, prompt="query: "), atol=1e-6)
    assert not np.allclose(embeddings, embed(teacher, None, prompt="query: "), atol=1e-3)


def test_the_cache_knows_texts_prompt_and_weights(teacher: Path, tmp_path: Path, encoded: list[int]) -> None:
    copy = Path(shutil.copytree(teacher, tmp_path / "copy"))
    cache = tmp_path / "cache"
    embed(teacher, cache)
    (copy / "README.md").write_text("another name")
    embed(copy, cache)
    assert len(encoded) == 3  # the same teacher in another place
    embed(teacher, cache, TEXTS[:-1])
    embed(teacher, cache, TEXTS, prompt="")
    embed(teacher, cache, [TEXTS[0] + TEXTS[1], *TEXTS[2:]])
    assert len(encoded) == 12
    weights = copy / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    embed(copy, cache)
    assert len(encoded) == 15


KILLED = f"""
import os, signal, sys
from pathlib import Path
from mote.training import teachers
from mote.training.recipe import TeacherSettings

teachers.CHUNK = {CHUNK}
original = teachers.TeacherEmbeddings._encode

def encode(self, texts, prompt):
    if len(texts) < {CHUNK}:
        os.kill(os.getpid(), signal.SIGKILL)
    return original(self, texts, prompt)

teachers.TeacherEmbeddings._encode = encode
teachers.TeacherEmbeddings(TeacherSettings(source=sys.argv[1]), Path(sys.argv[2])).embed({{"anchor": {TEXTS!r}}})
"""


def test_a_killed_run_resumes_from_the_finished_chunks(teacher: Path, tmp_path: Path, encoded: list[int]) -> None:
    run_python(KILLED, teacher, tmp_path / "killed", cwd=tmp_path, status=-signal.SIGKILL)
    assert [path.name for path in files(tmp_path / "killed")] == ["000000000.npy", "000000004.npy"]
    resumed = embed(teacher, tmp_path / "killed")
    assert encoded == [2]
    np.testing.assert_array_equal(resumed, embed(teacher, tmp_path / "whole"))


def test_embeddings_that_are_not_finite_are_refused(teacher: Path, tmp_path: Path) -> None:
    broken = Path(shutil.copytree(teacher, tmp_path / "broken"))
    weights = load_file(broken / "model.safetensors")
    save_file({name: weight * float("nan") for name, weight in weights.items()}, broken / "model.safetensors")
    with pytest.raises(ValueError, match="are non-finite"):
        embed(broken, tmp_path / "cache")
    assert files(tmp_path / "cache") == []


HUB = """
import sys
from pathlib import Path
from mote.training.recipe import TeacherSettings
from mote.training.teachers import TeacherEmbeddings

for name, revision in (("user/teacher", None), ("user/teacher", sys.argv[2]), ("user/missing", None)):
    try:
        own = TeacherEmbeddings(TeacherSettings(source=name, revision=revision), Path(sys.argv[1]))
        print(own.identity.partition("@")[2], float(own.embed({"text": ["a", "b"]})[0].sum()))
    except FileNotFoundError as error:
        print(error)
"""


def test_a_teacher_on_the_hub_is_that_of_a_revision(teacher: Path, tmp_path: Path) -> None:
    newer = shutil.copytree(teacher, tmp_path / "newer")
    weights = load_file(newer / "model.safetensors")
    save_file({name: 2 * tensor for name, tensor in weights.items()}, newer / "model.safetensors", {"format": "pt"})

    def run(cache: str) -> list[str]:
        environment = {**server.environment(tmp_path / "home"), "OMP_NUM_THREADS": "1"}
        done = run_python(HUB, tmp_path / cache, first, cwd=tmp_path, environment=environment)
        return done.stdout.splitlines()

    with HubServer() as server:
        first = server.add_repo("user/teacher", teacher)
        second = server.add_repo("user/teacher", newer)
        newest, older, missing = run("cache")
        server.faults["model_info"] = 400, "busy"  # as with 429 or 503, which are asked again for long
        assert run("cache")[:2] == [newest, older]
    assert [newest, older] == [
        f"{commit} {float(embed(folder, tmp_path / commit, ['a', 'b']).sum())}"
        for commit, folder in ((second, newer), (first, teacher))
    ]
    assert newest.split()[1] != older.split()[1]
    assert missing.startswith("user/missing is neither a folder nor available on the Hub: 404")
    for cache in ("cache", "other cache"):  # without a connection
        *found, unreachable = run(cache)
        assert found == [newest, older]
        assert unreachable.startswith("user/missing is neither a folder nor available on the Hub: ")
        assert "[Errno 111] Connection refused" in unreachable


@pytest.mark.parametrize(
    "row", ['{{"query": "{0}", "positive": "about {0}"}}', '{{"text": "{0}"}}', '{{"text": "{0}", "label": "x"}}']
)
def test_labels_are_the_embeddings_of_the_texts(row: str, teacher: Path, tmp_path: Path) -> None:
    """Of pairs, those of both sides."""
    (tmp_path / "train.jsonl").write_text("".join(f"{row.format(text)}\n" for text in TEXTS))
    task = {"anchor": "search_query", "positive": "search_document", "batches": "homogeneous", "loss": "MSELoss"}
    own = {"source": str(teacher), "prompts": {"anchor": "query: "}}
    tasks = {"t": {**task, "datasets": [{"path": "train.jsonl", "weight": 1.5}], "teacher": own}}
    found = Recipe.model_validate({"model": {"source": "none"}, "tasks": tasks, "data": {"folder": str(tmp_path)}})
    (training_set,) = load_data(found, teachers=teachers.teachers_of(found)).sets.values()
    assert training_set.label_type == "embeddings"
    assert len(training_set.rows) == 15
    model = SentenceTransformer(str(teacher))
    expected = model.encode(training_set.rows["anchor"][:], prompt="query: ")
    if "positive" in row:
        expected = np.stack([expected, model.encode(training_set.rows["positive"][:])], axis=1)
    assert training_set.rows.column_names == ["anchor", *["positive"] * ("positive" in row), "label"]
    assert np.allclose(training_set.rows["label"][:], expected, atol=1e-6)


@pytest.mark.parametrize("loss", ["MarginMSELoss", "DistillKLDivLoss"])
def test_losses_learn_a_teachers_scores(loss: str, teacher: Path, tmp_path: Path) -> None:
    """Also those of several positives, and of the negatives that are left."""
    rows = [
        {"query": TEXTS[0], "pos": TEXTS[1:3], "neg": [TEXTS[3], TEXTS[2], TEXTS[4]], "scores": [5, 4, 3, 4, 1]},
        {"query": TEXTS[5], "pos": [TEXTS[6]], "neg": [TEXTS[7], TEXTS[8]], "scores": [2, -2, -3]},
    ]
    write_rows(tmp_path / "train.jsonl", rows)
    temperatures = {"student_temperature": 0.5, "teacher_temperature": 2.0}
    task = {"anchor": "a", "datasets": ["train.jsonl"], "loss": loss}
    task |= {"loss_arguments": temperatures} if loss == "DistillKLDivLoss" else {}
    data = {"folder": str(tmp_path)}
    found = Recipe.model_validate({"model": {"source": "none"}, "tasks": {"t": task}, "data": data})
    (training_set,) = load_data(found).sets.values()
    columns = [training_set.rows[name][:] for name in ("anchor", "positive", "negative_1", "negative_2")]
    scores = np.array(training_set.rows["label"][:])
    assert sorted(scores.tolist()) == [[2, -2, -3], [4, 3, 1], [5, 3, 1]]
    assert [row.index(TEXTS[4]) for row in zip(*columns, strict=True) if TEXTS[4] in row] == [3, 3]

    model = SentenceTransformer(str(teacher), device="cpu")
    query, *documents = map(model.encode, columns)
    student = np.stack([(query * document).sum(axis=1) for document in documents], axis=1)
    margins = (student[:, :1] - student[:, 1:]) - (scores[:, :1] - scores[:, 1:])
    target = softmax(scores / 2, axis=1)
    divergence = (target * (np.log(target) - log_softmax(student / 0.5, axis=1))).sum(axis=1).mean() * 0.5**2
    value = build_loss(model, training_set, found)([model.preprocess(texts) for texts in columns], torch.tensor(scores))
    assert value.item() == pytest.approx((margins**2).mean() if loss == "MarginMSELoss" else divergence, rel=1e-4)

    write_rows(tmp_path / "train.jsonl", [{key: row[key] for key in ("query", "pos", "neg")} for row in rows])
    with pytest.raises(ValueError, match=f"{loss} takes pairs with hard negatives and a teacher's `scores`"):
        load_data(found)
