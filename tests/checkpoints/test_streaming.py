"""Upcycling out of the source's files gives, byte for byte, what building the model in memory and saving it gives."""

import importlib
import json
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.checkpoints import dense_checkpoint, files_in, published_nomic, read_json, tiny_tokenizer
from helpers.families import all_families
from helpers.paths import ROOT, SMALL_ENCODER
from safetensors import safe_open
from sentence_transformers.base.modules import Transformer
from sentence_transformers.sentence_transformer.modules import Pooling

from mote import plan_upcycling, upcycle
from mote.checkpoints.models import load_dense
from mote.checkpoints.plain import POOLING_FLAGS
from mote.checkpoints.reading import open_dense
from mote.checkpoints.sentence_transformers import POOLING_NAMES, source_pooling
from mote.checkpoints.st_settings import OUR_TRANSFORMER, POOLING, TRANSFORMER
from mote.cli import main
from mote.remote.modeling_mote import MoTEModel
from mote.remote.sentence_transformer_mote import MoTETransformer


def in_memory(source: Path, folder: Path, max_shard_size: str = "5GB", **arguments: Any) -> Path:
    """What `upcycle` would write if it loaded the model: weights, config and code."""
    plan = plan_upcycling(str(source), max_shard_size=max_shard_size, **arguments)
    dense, _ = load_dense(plan.source, plan.config.dtype)
    for parameter in dense.parameters():  # parts of one tensor (queries, keys …) would count as one where files are cut
        parameter.data = parameter.data.clone()
    MoTEModel(plan.config, dense).save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


@pytest.fixture
def streamed_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where an upcycling loads the model."""
    monkeypatch.setattr("mote.upcycling.upcycle.load_dense", lambda *args: pytest.fail("loaded in memory"))


def assert_equal(source: Path, tmp_path: Path, **arguments: Any) -> Path:
    """Upcycle both ways; all files of the model must be equal in all bytes."""
    expected = in_memory(source, tmp_path / "expected", **arguments)
    out = upcycle(str(source), tmp_path / "out", tokenizer=str(tiny_tokenizer(tmp_path / "tokenizer")), **arguments)
    kinds = {".py", ".json", ".safetensors"}
    written = {name for name in files_in(expected) if Path(name).suffix in kinds}
    assert any(name.endswith(".safetensors") for name in written)
    for name in written:
        assert (out / name).read_bytes() == (expected / name).read_bytes(), name
    assert {name for name in files_in(out) if "model" in name} == {name for name in written if "model" in name}
    return out


@all_families
@pytest.mark.parametrize("dtype", ["auto", pytest.param("bfloat16", marks=pytest.mark.long)])
@pytest.mark.parametrize("shards", [False, True])
def test_families(name: str, dtype: str, shards: bool, tmp_path: Path, streamed_only: None) -> None:
    source = dense_checkpoint(tmp_path / "dense", name, shards=shards, tokenizer=False)
    assert_equal(source, tmp_path, dtype=dtype, max_shard_size="20KB" if shards else "5GB")


@pytest.mark.parametrize("dtype", ["auto", "float16"])
@pytest.mark.parametrize("prefix", [True, False])
def test_published_nomic(prefix: bool, dtype: str, tmp_path: Path, streamed_only: None) -> None:
    assert_equal(published_nomic(tmp_path / "nomic", prefix), tmp_path, dtype=dtype)


@pytest.mark.parametrize("format", ["bin", "legacy-bin"])
@pytest.mark.parametrize("shards", [False, True])
def test_pickles(format: str, shards: bool, tmp_path: Path, streamed_only: None) -> None:  # noqa: A002
    source = dense_checkpoint(tmp_path / "dense", format=format, shards=shards)
    assert_equal(source, tmp_path, max_shard_size="40KB")


@pytest.mark.parametrize(("name", "head"), [("bert", "pretraining"), ("roberta", "mlm"), ("qwen3", "causal")])
def test_heads(name: str, head: str, tmp_path: Path, streamed_only: None) -> None:
    assert_equal(dense_checkpoint(tmp_path / "dense", name, head, tokenizer=False), tmp_path)


@pytest.mark.parametrize("layers", ["every_other", [0]])
def test_layers(layers: str | list[int], dense: Path, tmp_path: Path, streamed_only: None) -> None:
    assert_equal(dense, tmp_path, layers=layers, experts=["one", "two"])


def test_a_router_is_drawn_in_memory(dense: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "mote")
    upcycle(str(dense), tmp_path / "out", routing="token")
    assert "Copying its blocks into 4 experts, in memory …" in caplog.messages


# What is not imported, because it takes longer than the work ----------------------------------------------------------


def test_names_of_modules_are_the_library_s() -> None:
    for ours, cls in (
        (TRANSFORMER, Transformer),
        (POOLING, Pooling),
        (f"mote.remote.{OUR_TRANSFORMER}", MoTETransformer),
    ):
        assert ours == f"{cls.__module__}.{cls.__name__}"


@pytest.mark.parametrize(
    "settings",
    [
        *({"embedding_dimension": 16, "pooling_mode": mode, "include_prompt": True} for mode in Pooling.POOLING_MODES),
        *({"word_embedding_dimension": 16, flag: True} for flag in POOLING_FLAGS.values()),
        {"word_embedding_dimension": 16, "pooling_mode_mean_tokens": False, "pooling_mode_cls_token": True},
        {"word_embedding_dimension": 16, "pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True},
        {"word_embedding_dimension": 16, "pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True},
        {"word_embedding_dimension": 16, "pooling_mode_mean_tokens": True, "pooling_mode": "cls"},
        {"word_embedding_dimension": 16, "pooling_mode": ["cls"]},
        {"word_embedding_dimension": 16},
    ],
)
def test_a_pooling_is_read_as_the_library_reads_it(settings: dict[str, Any], tmp_path: Path) -> None:
    source = dense_checkpoint(tmp_path, sentence_transformers={"pooling": "mean"})
    (tmp_path / "1_Pooling" / "config.json").write_text(json.dumps(settings))
    theirs = str(Pooling.load(str(source), subfolder="1_Pooling").pooling_mode)
    if theirs in POOLING_NAMES:
        assert source_pooling(open_dense(str(source))) == POOLING_NAMES[theirs]
    else:
        with pytest.raises(ValueError, match=f"pools by {re.escape(repr(theirs))}; MoTE knows"):
            source_pooling(open_dense(str(source)))


@pytest.mark.parametrize("pooling", ["mean", "cls", "last_token"])
def test_a_pooling_is_written_as_the_library_writes_it(pooling: str, dense: Path, tmp_path: Path) -> None:
    out = upcycle(str(dense), tmp_path / "out", pooling=pooling)
    loaded = Pooling.load(str(out), subfolder="1_Pooling")
    assert POOLING_NAMES[str(loaded.pooling_mode)] == pooling
    loaded.save(str(tmp_path))
    assert read_json(tmp_path / "config.json") == read_json(out / "1_Pooling" / "config.json")


def test_upcycling_imports_no_more_than_it_needs(tmp_path: Path) -> None:
    code = (
        "import sys; from mote.cli import main; assert main(sys.argv[1:]) == 0; "
        "assert not {'sentence_transformers', 'datasets'} & sys.modules.keys()"
    )
    command = ["upcycle", "--src", str(SMALL_ENCODER), "--out", str(tmp_path / "out")]
    done = subprocess.run([sys.executable, "-c", code, *command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


# Memory and disk -----------------------------------------------------------------------------------------------------

# Prints the most memory that the process has taken after its imports, and at the end; of this process alone, which
# `getrusage` does not tell: there a process begins with what its parent took.
MEASURED = """
import re, sys
from pathlib import Path

import mote.upcycling.upcycle
from mote.cli import main


def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024


imported = peak()
assert main(["upcycle", *sys.argv[1:]]) == 0
print(imported, peak())
"""


@pytest.fixture
def write_large_model(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """The benchmark's model of random weights in files of a given size."""
    monkeypatch.syspath_prepend(ROOT)
    return importlib.import_module("benchmarks.performance.upcycling").write_large_model


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="peak memory is read where Linux tells it")
@pytest.mark.parametrize(("dtype", "layers"), [("bfloat16", 14), ("float32", 7)])
def test_memory_is_that_of_a_file_not_of_the_model(
    dtype: str, layers: int, write_large_model: Callable[..., Path], tmp_path: Path
) -> None:
    source = write_large_model(tmp_path / "large", 512, layers, shard=20_000_000)
    out = tmp_path / "out"
    options = ["--src", str(source), "--out", str(out), "--dtype", dtype, "--max-shard-size", "20MB"]
    done = subprocess.run([sys.executable, "-c", MEASURED, *options], capture_output=True, text=True, check=True)
    imported, peak = map(int, done.stdout.splitlines()[-1].split())
    files = [[path.stat().st_size for path in folder.glob("*.safetensors")] for folder in (source, out)]
    allowed = sum(map(max, files)) + 80_000_000  # for what is imported later, the tokenizer, the card
    assert peak - imported <= allowed
    assert sum(files[1]) > 2 * allowed  # the model is much larger than that
    assert len(re.findall(r"model-\d+-of-\d+\.safetensors: [\d.]+ of [\d.]+ MB written", done.stdout)) == len(files[1])


@pytest.fixture
def limited() -> Iterator[Callable[[int], list[str]]]:
    """Words in front of a command by which the operating system kills it where it takes more memory than that."""
    version_1 = Path("/sys/fs/cgroup/memory")
    group = version_1 / f"mote-test-{os.getpid()}"
    if os.access(version_1 / "cgroup.procs", os.W_OK):
        group.mkdir()

        def of_version_1(limit: int) -> list[str]:
            (group / "memory.limit_in_bytes").write_text(str(limit))
            return ["sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"]

        yield of_version_1
        group.rmdir()
        return
    scope = ["systemd-run", "--scope", "--quiet", *([] if os.geteuid() == 0 else ["--user"])]
    try:
        subprocess.run([*scope, "-p", "MemoryMax=1G", "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"neither cgroups of version 1 nor systemd-run can limit memory here: {error}")
    yield lambda limit: [*scope, "-p", f"MemoryMax={limit}", "-p", "MemorySwapMax=0"]


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A folder for gigabytes, which pytest would keep."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.mark.slow
def test_a_model_larger_than_memory(
    write_large_model: Callable[..., Path], limited: Callable[[int], list[str]], scratch: Path
) -> None:
    source, out = write_large_model(scratch / "large", 2048, 13), scratch / "out"
    limit = 1_100_000_000  # less than the source, and a quarter of the result
    run = [*limited(limit), sys.executable, "-c"]
    in_memory = "import sys; from transformers import AutoModel; m = AutoModel.from_pretrained(sys.argv[1]); m.float()"
    killed = subprocess.run([*run, in_memory, str(source)], capture_output=True, check=False)
    assert killed.returncode in (-signal.SIGKILL, 128 + signal.SIGKILL)  # the limit holds
    code = "import sys; from mote.cli import main; sys.exit(main(sys.argv[1:]))"
    options = ["upcycle", "--src", str(source), "--out", str(out), "--max-shard-size", "500MB"]
    subprocess.run([*run, code, *options], check=True)
    written = sorted(out.glob("*.safetensors"))
    assert sum(path.stat().st_size for path in written) > 3.5 * limit
    stored = {
        key: source / name for key, name in read_json(source / "model.safetensors.index.json")["weight_map"].items()
    }
    for path in written:
        with safe_open(path, "pt") as file:
            for key in file.keys():  # noqa: SIM118 - it is not a dict
                dense_key = re.sub(r"\.(shared|experts\.\w+)\.", ".", key.removeprefix("backbone."))
                with safe_open(stored[dense_key], "pt") as of_source:
                    assert file.get_tensor(key).equal(of_source.get_tensor(dense_key)), key


def test_a_disk_that_is_too_small(dense: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / "small"
    place.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)], check=False, capture_output=True
    )
    if mounted.returncode:
        pytest.skip(f"a small disk cannot be had here: {mounted.stderr.decode().strip()}")
    try:
        assert main(["upcycle", "--src", str(dense), "--out", str(place / "new" / "out")]) == 1
        said = r"error: \S+out needs 0\.1 MB, but its disk has 0\.1 MB left: free some, or write elsewhere"
        assert re.search(said, capsys.readouterr().err)
        assert not any(place.iterdir())
    finally:
        subprocess.run(["umount", str(place)], check=True)
