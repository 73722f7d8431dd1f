"""The files that a saved model carries: which, how long, and what a user reads where they do not work."""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.checkpoints import TASK_MOTE, code_in, trusted
from helpers.families import batch, difference, fresh_mote
from helpers.kinds import EIGHT_BITS, HIERARCHICAL, MOTE, TOKEN_ROUTED
from helpers.processes import run_as_stranger, run_python
from sentence_transformers import SentenceTransformer
from transformers import AutoModel, PreTrainedModel

from mote.remote.attention_pooling_mote import AttentionPoolingConfig, AttentionPoolingModel
from mote.remote.configuration_mote import INSTALL


def pooled(family: str) -> AttentionPoolingModel:
    settings = {**fresh_mote(family).config.to_dict(), "pooling": "latent_attention", "pooling_latents": 3}
    torch.manual_seed(0)
    return AttentionPoolingModel(AttentionPoolingConfig(**settings)).eval()


FILES = {
    MOTE.trained: set(),
    TOKEN_ROUTED.trained: {"token_routing_mote.py"},
    EIGHT_BITS.trained: {"compression_mote.py"},
    HIERARCHICAL.trained: {"hierarchical_mote.py", "token_routing_mote.py"},
    pooled: {"attention_pooling_mote.py"},
}


def test_a_task_model_carries_five_files_that_are_read_in_a_quarter_of_an_hour(trained_folder: Path) -> None:
    assert code_in(trained_folder) == TASK_MOTE
    texts = [(trained_folder / name).read_text(encoding="utf-8") for name in TASK_MOTE]
    assert sum(len(text.splitlines()) for text in texts) <= 1570
    for text in texts:
        text = text.replace("router_mapping", "")  # Sentence-Transformers' argument
        assert not any(word in text.lower() for word in ("router", "balanc", "aux_loss", "low-rank", "8-bit"))


@pytest.mark.parametrize("make", FILES)
def test_each_kind_of_model_carries_its_own_files(make: Callable[[str], PreTrainedModel], tmp_path: Path) -> None:
    model = make("bert")
    model_type = model.config.model_type
    with torch.no_grad():
        expected = model(**batch(), task=list(model.config.tasks)[1]).pooler_output
    for folder in (tmp_path / "one", tmp_path / "two"):  # saved by the installed classes, then by those of `one`
        model.save_pretrained(folder)
        assert code_in(folder) == TASK_MOTE - {"sentence_transformer_mote.py"} | FILES[make]
        model = AutoModel.from_pretrained(folder, trust_remote_code=True)
        assert type(model).__module__.startswith("transformers_modules.")
        assert model.config.model_type == model_type
        with torch.no_grad():
            out = model(**batch(), task=list(model.config.tasks)[1]).pooler_output
        assert difference(out, expected) == 0.0


def test_folders_of_one_name_run_their_own_code(upcycled: Path, tmp_path: Path) -> None:
    folders = [shutil.copytree(upcycled, tmp_path / name / "model") for name in ("a", "b")]
    code = folders[1] / "modeling_mote.py"
    code.write_text(f"{code.read_text()}\nCHANGED = True\n")
    for load in (AutoModel.from_pretrained, SentenceTransformer):
        loaded: list = [load(str(folder), trust_remote_code=True) for folder in folders]
        kinds = [type(one[0].model if load is SentenceTransformer else one) for one in loaded]
        assert [hasattr(sys.modules[kind.__module__], "CHANGED") for kind in kinds] == [False, True]


def test_a_model_saved_without_sentence_transformers_opens_there(
    model: Any, trained_folder: Path, tmp_path: Path
) -> None:
    AutoModel.from_pretrained(trained_folder, trust_remote_code=True).save_pretrained(tmp_path / "alone")
    again = trusted(tmp_path / "alone")
    for name in ("clustering", "search_query"):
        assert (again.encode("x", prompt_name=name) == model.encode("x", prompt_name=name)).all()


def last_lines(folder: Path, setup: str, status: int = 1) -> list[str]:
    """What someone reads last who loads a model where this project is not installed."""
    load = "transformers.AutoModel.from_pretrained(sys.argv[1], trust_remote_code=True)"
    script = f"import transformers\n{setup}\n{load}"
    return run_as_stranger(script, folder, cwd=folder.parent, status=status).stderr.strip().splitlines()


def test_auto_model_needs_no_sentence_transformers(trained_folder: Path) -> None:
    last_lines(trained_folder, "sys.modules['sentence_transformers'] = None", status=0)


PICKLED = """
import joblib, sys, transformers
from datasets.fingerprint import Hasher
from sentence_transformers import SentenceTransformer

plain = transformers.AutoModel.from_pretrained(sys.argv[1], trust_remote_code=bool(sys.argv[2]))
whole = SentenceTransformer(sys.argv[1], trust_remote_code=True)
assert Hasher.hash(plain) != Hasher.hash(whole)  # dill pickles both, without warnings of random hashes
joblib.dump((plain, whole), "pickle")
print(type(plain).__module__, type(whole[0]).__module__)
"""
OPENED = "import joblib; [*map(print, joblib.load('pickle')[1].encode('x', prompt_name='clustering'))]"


@pytest.mark.parametrize("installed", [True, False])
def test_a_pickled_model_opens_in_another_process(
    installed: bool, model: Any, trained_folder: Path, tmp_path: Path
) -> None:
    pytest.importorskip("joblib")
    arguments = (trained_folder, "" if installed else "True")
    printed = run_python("import mote.auto" * installed + PICKLED, *arguments, cwd=tmp_path).stdout
    assert printed.count("mote.remote." if installed else "transformers_modules.") == 2
    first = "" if installed else "from transformers.dynamic_module_utils import init_hf_modules; init_hf_modules()\n"
    values = run_python(first + OPENED, cwd=tmp_path).stdout.split()
    assert [*map(float, values)] == pytest.approx(model.encode("x", prompt_name="clustering"), abs=1e-6)


OLD_VERSION = """
import importlib.metadata
version = importlib.metadata.version
importlib.metadata.version = lambda name: "5.1.0" if name == {library!r} else version(name)
"""


@pytest.mark.parametrize("library", ["transformers", "sentence-transformers"])
def test_an_old_version_is_named(library: str, trained_folder: Path) -> None:
    setup = OLD_VERSION.format(library=library) + (
        "import sentence_transformers\nsys.modules['sentence_transformers.base.modules'] = None\n"
        f"sentence_transformers.SentenceTransformer({str(trained_folder)!r}, trust_remote_code=True)"
    )
    *_, found, remedy = last_lines(trained_folder, setup)
    assert f"{library}>=" in found
    assert remedy == INSTALL
