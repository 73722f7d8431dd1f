"""A teacher's embeddings: right, cached, and the same after a kill as without one."""

import errno
import io
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.checkpoints import dense_checkpoint
from helpers.paths import SMALL_MOTE
from hub.hub_server import HubServer
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer

from mote.reporting import HOW_TO_RESUME
from mote.training import teachers
from mote.training.data import load_data
from mote.training.recipe_files import parse_recipe
from mote.training.task_settings import TeacherSettings
from mote.training.teachers import Teacher

TEXTS = [f"text {'abcde'[i % 5] * (i % 7 + 1)} number {i}" for i in range(10)]
CHUNK = 4
RESUMES = re.escape(HOW_TO_RESUME)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a prompt of its own."""
    folder = tmp_path_factory.mktemp("teacher") / "tiny"
    return dense_checkpoint(folder, sentence_transformers={"prompts": {"query": "query: "}})


@pytest.fixture(autouse=True)
def _small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teachers, "CHUNK", CHUNK)


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of all chunks that a teacher encodes."""
    sizes: list[int] = []
    original = Teacher._encode

    def encode(self: Teacher, texts: Sequence[str], prompt: str | None) -> np.ndarray:
        sizes.append(len(texts))
        return original(self, texts, prompt)

    monkeypatch.setattr(Teacher, "_encode", encode)
    return sizes


def cut_short(error: BaseException) -> Callable[..., Any]:
    """Replace `Path.open`: writing a file ends with an error after some bytes."""

    class Full(io.FileIO):
        def write(self, content: Any) -> int:
            if self.tell():
                super().write(memoryview(content).cast("B")[:1])
                raise error
            return super().write(content)

    original = Path.open
    return lambda path, mode="r", *more, **how: Full(path, mode) if mode == "wb" else original(path, mode, *more, **how)


def embed(folder: Path, cache: Path, texts: Sequence[str] = TEXTS, prompt: str | None = None) -> np.ndarray:
    return Teacher(TeacherSettings(source=str(folder)), cache).embed(texts, prompt)


def files(cache: Path) -> list[Path]:
    return sorted(path for path in cache.rglob("*") if path.is_file())


def test_embeddings_are_the_teachers(teacher: Path, tmp_path: Path) -> None:
    embeddings = embed(teacher, tmp_path)
    assert isinstance(embeddings, np.memmap)
    assert embeddings.dtype == np.float32
    model = SentenceTransformer(str(teacher))
    chunks = [model.encode(TEXTS[start : start + CHUNK]) for start in range(0, len(TEXTS), CHUNK)]
    assert np.array_equal(embeddings, np.concatenate(chunks))
    assert np.allclose(embed(teacher, tmp_path, prompt="query: "), model.encode(TEXTS, prompt="query: "), atol=1e-6)
    assert not np.allclose(embeddings, embed(teacher, tmp_path, prompt="query: "), atol=1e-3)


def test_a_second_run_takes_the_cache(teacher: Path, tmp_path: Path, encoded: list[int]) -> None:
    first = embed(teacher, tmp_path)
    assert encoded == [4, 4, 2]
    assert np.array_equal(first, embed(teacher, tmp_path))
    assert encoded == [4, 4, 2]
    assert [path.name.partition("-")[0] for path in files(tmp_path)] == ["embeddings"]


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
from mote.training.task_settings import TeacherSettings

teachers.CHUNK = {CHUNK}
original = teachers.Teacher._encode

def encode(self, texts, prompt):
    if len(texts) < {CHUNK}:
        os.kill(os.getpid(), signal.SIGKILL)
    return original(self, texts, prompt)

teachers.Teacher._encode = encode
teachers.Teacher(TeacherSettings(source=sys.argv[1]), Path(sys.argv[2])).embed({TEXTS!r})
"""


def test_a_killed_run_resumes_from_the_finished_chunks(teacher: Path, tmp_path: Path, encoded: list[int]) -> None:
    command = [sys.executable, "-c", KILLED, str(teacher), str(tmp_path / "killed")]
    killed = subprocess.run(command, check=False, capture_output=True)  # with as many threads as here
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert [path.name.partition("-")[0] for path in files(tmp_path / "killed")] == ["chunk000000", "chunk000001"]
    resumed = embed(teacher, tmp_path / "killed")
    assert encoded == [2]
    np.testing.assert_array_equal(resumed, embed(teacher, tmp_path / "whole"))
    assert len(files(tmp_path / "killed")) == 1


def test_a_run_whose_chunks_another_one_removes(teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two runs share the cache; the first to finish removes the chunks that the other one has read."""
    whole = embed(teacher, tmp_path / "whole")
    encode = Teacher._encode

    def removing(self: Teacher, texts: Sequence[str], prompt: str | None) -> np.ndarray:
        for chunk in (tmp_path / "shared").glob("*/chunk*"):
            chunk.unlink()
        return encode(self, texts, prompt)

    monkeypatch.setattr(Teacher, "_encode", removing)
    np.testing.assert_array_equal(embed(teacher, tmp_path / "shared"), whole)


def test_an_interrupt_while_writing_leaves_nothing_half(
    teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoded: list[int]
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", cut_short(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            embed(teacher, tmp_path, TEXTS[:CHUNK])
    assert files(tmp_path) == []
    resumed = embed(teacher, tmp_path, TEXTS[:CHUNK])
    assert encoded == [4, 4]
    assert np.array_equal(resumed, embed(teacher, tmp_path / "whole", TEXTS[:CHUNK]))
    assert len(files(tmp_path)) == 2  # one each: the unfinished file is gone


def test_a_full_disk(teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", cut_short(OSError(errno.ENOSPC, "No space left on device")))
        with pytest.raises(OSError, match=rf"could not be written to {tmp_path}/\w+: .*No space left.*{RESUMES}"):
            embed(teacher, tmp_path)
    assert files(tmp_path) == []
    embed(teacher, tmp_path)


def test_the_file_is_the_one_that_numpy_writes(tmp_path: Path) -> None:
    arrays = [np.arange(6, dtype=np.float32).reshape(2, 3), np.ones((1, 3), dtype=np.float32)]
    np.save(tmp_path / "numpy.npy", np.concatenate(arrays))
    assert teachers._store(tmp_path, "name", arrays).read_bytes() == (tmp_path / "numpy.npy").read_bytes()


def test_what_a_kill_left_is_removed_after_a_day(teacher: Path, tmp_path: Path) -> None:
    (tmp_path / "of_other_texts").mkdir()
    names = (f".embeddings.{'0' * 32}", f".chunk000001.{'0' * 32}", f".embeddings.{'1' * 32}", ".embeddings.mine")
    left = [tmp_path / "of_other_texts" / name for name in names]
    for path in left:
        path.touch()
    for path in (left[0], left[1], left[3]):
        os.utime(path, (0, time.time() - 25 * 3600))
    embed(teacher, tmp_path)
    assert [path for path in left if path.exists()] == [left[2], left[3]]  # being written, and not ours


@pytest.mark.parametrize("damage", ["flipped", "short", "empty"])
@pytest.mark.parametrize("file", ["chunk000001", "embeddings"])
def test_a_damaged_file_is_computed_again(
    teacher: Path,
    tmp_path: Path,
    encoded: list[int],
    file: str,
    damage: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if file == "chunk000001":  # stop after two chunks
        with monkeypatch.context() as patch:
            patch.setattr(np, "isfinite", lambda array: np.array(len(array) == CHUNK))
            with pytest.raises(ValueError, match="are non-finite"):
                embed(teacher, tmp_path)
    else:
        embed(teacher, tmp_path)
    encoded.clear()
    (path,) = (path for path in files(tmp_path) if path.name.startswith(file))
    content = path.read_bytes()
    flipped = content[:-1] + bytes([content[-1] ^ 1])
    path.write_bytes({"flipped": flipped, "short": content[:-1], "empty": b""}[damage])
    caplog.set_level("INFO", "mote")
    mended = embed(teacher, tmp_path)
    assert f"{path} is damaged, and will be recomputed" in caplog.text
    assert encoded == ([4, 2] if file == "chunk000001" else [4, 4, 2])
    assert np.array_equal(mended, embed(teacher, tmp_path / "whole"))


def test_embeddings_that_are_not_finite_are_refused(
    teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Teacher, "_encode", lambda *_: np.full((4, 3), np.nan))
    with pytest.raises(ValueError, match="are non-finite"):
        embed(teacher, tmp_path)
    assert files(tmp_path) == []


def test_the_default_cache_is_huggingface_hubs(
    teacher: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, encoded: list[int]
) -> None:
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr(teachers, "cached_assets_path", lambda *names: asked.append(names) or tmp_path / "assets")
    own = Teacher(TeacherSettings(source=str(teacher)))
    assert not asked  # which would make the folder
    own.embed(TEXTS)
    assert asked == [("mote", "teachers")]
    assert len(files(tmp_path / "assets")) == 1


HUB = """
import sys
from pathlib import Path
from mote.training.task_settings import TeacherSettings
from mote.training.teachers import Teacher

for name, revision in (("user/teacher", None), ("user/teacher", sys.argv[2]), ("user/missing", None)):
    try:
        own = Teacher(TeacherSettings(source=name, revision=revision), Path(sys.argv[1]))
        print(own.commit, float(own.embed(["a", "b"]).sum()))
    except FileNotFoundError as error:
        print(error)
"""


def test_a_teacher_on_the_hub_is_that_of_a_revision(teacher: Path, tmp_path: Path) -> None:
    newer = shutil.copytree(teacher, tmp_path / "newer")
    weights = load_file(newer / "model.safetensors")
    save_file({name: 2 * tensor for name, tensor in weights.items()}, newer / "model.safetensors", {"format": "pt"})

    def run(cache: str) -> list[str]:
        command = [sys.executable, "-c", HUB, str(tmp_path / cache), first]
        environment = {**server.environment(tmp_path / "home"), "OMP_NUM_THREADS": "1"}
        output = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
        return output.splitlines()

    with HubServer() as server:
        first = server.add_repo("user/teacher", teacher)
        second = server.add_repo("user/teacher", newer)
        newest, older, missing = run("cache")
        server.fail("model_info", 400, "busy")  # as with 429 or 503, which are asked again for long
        assert run("cache")[:2] == [newest, older]
    assert [newest, older] == [
        f"{commit} {float(embed(folder, tmp_path / commit, ['a', 'b']).sum())}"
        for commit, folder in ((second, newer), (first, teacher))
    ]
    assert newest.split()[1] != older.split()[1]
    assert missing.startswith("The teacher user/missing is neither a folder nor available on the Hub: 404")
    unreachable = "The teacher user/missing is not a folder, and the Hub cannot be reached"
    assert run("cache") == run("other cache") == [newest, older, unreachable]  # without a connection


def test_a_mote_without_a_task_for_the_texts_says_how_to_set_one(tmp_path: Path) -> None:
    teacher = Teacher(TeacherSettings(source=str(SMALL_MOTE), trust_remote_code=True), tmp_path)
    with pytest.raises(ValueError, match=rf"The teacher {SMALL_MOTE} .*`mote set {SMALL_MOTE} --out DIR default_task="):
        teacher.embed(TEXTS)


def test_a_folder_has_no_revision(teacher: Path) -> None:
    with pytest.raises(ValueError, match=f"{re.escape(str(teacher))} is a folder: it has no revision 'v1', only"):
        Teacher(TeacherSettings(source=str(teacher), revision="v1"))


def distilled(folder: Path, teacher: Path, rows: str, **settings: Any) -> Any:
    (folder / "train.jsonl").write_text(rows)
    task = {"anchor": "search_query", "positive": "search_document", "batches": "homogeneous", "loss": "MSELoss"}
    dataset = {"path": "train.jsonl", **settings}
    own = {"source": str(teacher), "prompts": {"anchor": "query: "}}
    recipe = {"model": {"source": "none"}, "tasks": {"t": {**task, "datasets": [dataset], "teacher": own}}}
    data = load_data(parse_recipe({**recipe, "data": {"folder": str(folder)}}))
    (training_set,) = data.sets.values()
    return training_set


@pytest.fixture
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(teachers, "cached_assets_path", lambda *_: tmp_path / "cache")


@pytest.mark.usefixtures("_own_cache")
def test_labels_of_pairs_are_the_embeddings_of_both_sides(teacher: Path, tmp_path: Path) -> None:
    lines = "".join(f'{{"query": "{text}", "positive": "about {text}"}}\n' for text in TEXTS)
    training_set = distilled(tmp_path, teacher, lines, weight=1.5)
    assert training_set.label_type == "embeddings"
    assert len(training_set.rows) == 15
    assert training_set.column_tasks == {"anchor": "search_query", "positive": "search_document"}
    model = SentenceTransformer(str(teacher))
    assert training_set.teacher_dimension == model.get_embedding_dimension()
    anchors = model.encode(training_set.rows["anchor"][:], prompt="query: ")
    positives = model.encode(training_set.rows["positive"][:])
    assert np.allclose(training_set.rows["label"][:], np.stack([anchors, positives], axis=1), atol=1e-6)


@pytest.mark.usefixtures("_own_cache")
@pytest.mark.parametrize("label", ["", ', "label": "x"'])
def test_labels_of_texts_are_their_embeddings(teacher: Path, tmp_path: Path, label: str) -> None:
    training_set = distilled(tmp_path, teacher, "".join(f'{{"text": "{text}"{label}}}\n' for text in TEXTS))
    assert training_set.rows.column_names == ["anchor", "label"]
    expected = SentenceTransformer(str(teacher)).encode(training_set.rows["anchor"][:], prompt="query: ")
    assert np.allclose(training_set.rows["label"][:], expected, atol=1e-6)
