"""A MoTE, the same with one more expert, and that expert, for several test files."""

from pathlib import Path

import pytest
import torch
from helpers.checkpoints import dense_checkpoint
from helpers.families import make_different
from helpers.on_disk import add

from mote import upcycle
from mote.experts import extract
from mote.remote.modeling_mote import MoTEModel


@pytest.fixture(scope="session")
def tiny_mote(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny MoTE with Sentence-Transformers' files, and experts that differ."""
    folder = tmp_path_factory.mktemp("tiny")
    dense_checkpoint(folder / "tiny", sentence_transformers={"normalize": True, "prompts": {"mine": "My: "}})
    upcycle(str(folder / "tiny"), folder / "mote")
    make_different(MoTEModel.from_pretrained(folder / "mote")).save_pretrained(folder / "mote")
    return folder / "mote"


@pytest.fixture(scope="session")
def with_legal(tiny_mote: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("with") / "legal-mote"
    add(tiny_mote, "search_query", out, name="legal", instruction="legal: ", tasks=["contracts"])
    model = MoTEModel.from_pretrained(out)
    with torch.no_grad():
        for block in model.blocks:
            for parameter in block.experts["legal"].parameters():
                parameter.mul_(1.25)
    model.save_pretrained(out)
    return out


@pytest.fixture(scope="session")
def legal(with_legal: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return extract(str(with_legal), "legal", tmp_path_factory.mktemp("legal") / "legal.safetensors")
