"""Upcycling out of the source's files gives, byte for byte, what building the model in memory and saving it gives."""

from pathlib import Path
from typing import Any

import pytest
from checkpoints import dense_checkpoint, files_in, published_nomic, tiny_tokenizer
from families import all_families

from modeling_mote import MoTEModel
from mote import upcycle, upcycling
from mote.sources import load_dense


def in_memory(source: Path, folder: Path, max_shard_size: str = "5GB", **arguments: Any) -> Path:
    """What `upcycle` would write if it loaded the model: weights, config and code."""
    plan = upcycling.plan_upcycling(str(source), max_shard_size=max_shard_size, **arguments)
    dense, _ = load_dense(plan.source, plan.config.dtype)
    for parameter in dense.parameters():  # parts of one tensor (queries, keys …) would count as one where files are cut
        parameter.data = parameter.data.clone()
    MoTEModel(plan.config, dense).save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


@pytest.fixture
def streamed_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where an upcycling loads the model."""
    monkeypatch.setattr(upcycling, "load_dense", lambda *args: pytest.fail("loaded in memory"))


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
@pytest.mark.parametrize("dtype", ["auto", "bfloat16"])
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


def test_a_router_is_drawn_in_memory(dense: Path, tmp_path: Path) -> None:
    lines: list[str] = []
    upcycle(str(dense), tmp_path / "out", router="token", report=lines.append)
    assert "Copying its blocks into 4 experts, in memory …" in lines
