"""Upcycling out of the source's files gives, byte for byte, what building the model in memory and saving it gives."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from helpers.checkpoints import contents, dense_checkpoint, published_nomic, tiny_tokenizer
from helpers.families import all_families
from helpers.paths import SMALL_ENCODER
from sentence_transformers.sentence_transformer.modules import Pooling

from mote import plan_upcycling, upcycle
from mote.checkpoints.models import load_dense
from mote.checkpoints.plain import POOLING_FLAGS
from mote.checkpoints.reading import open_dense
from mote.checkpoints.sentence_transformers import POOLING_NAMES, source_pooling
from mote.remote.modeling_mote import MoTEModel


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
    kinds, found = {".py", ".json", ".safetensors"}, contents(out)
    written = {name: content for name, content in contents(expected).items() if Path(name).suffix in kinds}
    assert any(name.endswith(".safetensors") for name in written)
    assert {name: found[name] == content for name, content in written.items()} == dict.fromkeys(written, True)
    assert {name for name in found if "model" in name} == {name for name in written if "model" in name}
    return out


@all_families
@pytest.mark.parametrize(("shards", "dtype"), [(False, "auto"), (True, "bfloat16")])
def test_families(name: str, dtype: str, shards: bool, tmp_path: Path, streamed_only: None) -> None:
    source = dense_checkpoint(tmp_path / "dense", name, shards=shards, tokenizer=False)
    assert_equal(source, tmp_path, dtype=dtype, max_shard_size="20KB" if shards else "5GB")


@pytest.mark.parametrize(("prefix", "dtype"), [(True, "auto"), (False, "float16")])
def test_published_nomic(prefix: bool, dtype: str, tmp_path: Path, streamed_only: None) -> None:
    assert_equal(published_nomic(tmp_path / "nomic", prefix), tmp_path, dtype=dtype)


@pytest.mark.parametrize(
    ("source", "arguments"),
    [
        ({"format": "bin", "shards": True}, {"max_shard_size": "40KB"}),
        ({"format": "legacy-bin"}, {"max_shard_size": "40KB"}),
        ({"head": "pretraining"}, {}),
        ({"family": "roberta", "head": "mlm"}, {}),
        ({"family": "qwen3", "head": "causal"}, {}),
        ({}, {"layers": "every_other", "experts": ["one", "two"]}),
        ({}, {"layers": [0], "experts": ["one", "two"]}),
    ],
)
def test_pickles_heads_and_layers(
    source: dict[str, Any], arguments: dict[str, Any], tmp_path: Path, streamed_only: None
) -> None:
    assert_equal(dense_checkpoint(tmp_path / "dense", **source, tokenizer=False), tmp_path, **arguments)


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


def test_upcycling_imports_no_more_than_it_needs(tmp_path: Path) -> None:
    code = (
        "import sys; from mote.cli import main; assert main(sys.argv[1:]) == 0; "
        "assert not {'sentence_transformers', 'datasets'} & sys.modules.keys()"
    )
    command = ["upcycle", "--src", str(SMALL_ENCODER), "--out", str(tmp_path / "out")]
    done = subprocess.run([sys.executable, "-c", code, *command], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
