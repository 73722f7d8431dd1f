"""One expert as a plain dense model, in torch and in the runtimes for CPUs."""

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.checkpoints import dense_checkpoint, files_in, read_json, trusted
from helpers.families import all_families, batch, trained_mote
from helpers.on_disk import average, export
from helpers.paths import SMALL_ENCODER
from sentence_transformers import SentenceTransformer
from transformers import AutoModel

from mote import upcycle
from mote.checkpoints import writing
from mote.checkpoints.provenance import read_steps
from mote.cli import main
from mote.remote.configuration_mote import PAPER_INSTRUCTIONS
from mote.remote.modeling_mote import MoTEModel

EXPERTS = list(PAPER_INSTRUCTIONS)
TEXTS = ["whales breathe air", "a recipe for bread", "a"]


def run(source: Path, out: Path, *options: str, expert: str = "clustering") -> int:
    return main(["export", str(source), "--out", str(out), "--expert", expert, *options])


# The same embeddings -------------------------------------------------------------------------------------------------


@all_families
def test_the_folder_loads_without_code_and_is_exact(name: str, tmp_path: Path) -> None:
    mote = trained_mote(name)
    mote.save_pretrained(tmp_path / "mote")
    dense_checkpoint(tmp_path / "tokenizer")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tmp_path / "tokenizer" / file, tmp_path / "mote" / file)
    for expert in ("alpha", "beta"):
        out = export(tmp_path / "mote", tmp_path / expert, expert=expert)
        assert not [file for file in files_in(out) if file.endswith(".py")]
        assert "auto_map" not in read_json(out / "config.json")
        dense = AutoModel.from_pretrained(out, attn_implementation=mote.backbone.config._attn_implementation).eval()
        assert type(dense).__module__.startswith("transformers.")
        with torch.no_grad():
            expected = mote(**batch(), task=expert).last_hidden_state
            assert dense(**batch()).last_hidden_state.equal(expected)


def test_a_token_routed_expert_becomes_a_token_routed_model(trained_hierarchical: Path, tmp_path: Path) -> None:
    out = export(trained_hierarchical, tmp_path / "out", expert="search_query")
    mote, routed = trusted(trained_hierarchical), trusted(out)
    assert type(routed[0].model).__name__ == "TokenRoutedModel"
    with torch.no_grad():
        expected = mote[0].model(**batch(), task="search_query").last_hidden_state
        assert routed[0].model(**batch()).last_hidden_state.equal(expected)
    assert np.array_equal(routed.encode(TEXTS), mote.encode(TEXTS, prompt_name="search_query"))
    assert np.array_equal(routed.encode_query(TEXTS), mote.encode_query(TEXTS))
    assert routed[0].config.tasks == {"search_query": "search_query", "query": "search_query"}
    card = " ".join((out / "README.md").read_text().split())
    assert "a **token router** made of the expert `search_query` of [tiny-hierarchical]" in card
    assert "Not trained yet" not in card
    with pytest.raises(ValueError, match="architecture could not be converted to onnx"):
        export(trained_hierarchical, tmp_path / "onnx", expert="clustering", backend="onnx")
    assert not (tmp_path / "onnx").exists()


@pytest.mark.parametrize("expert", EXPERTS)
def test_encode_without_a_prompt_is_that_of_the_task(expert: str, trained_folder: Path, tmp_path: Path) -> None:
    mote = trusted(trained_folder)
    dense = SentenceTransformer(str(export(trained_folder, tmp_path / "out", expert=expert)))
    expected = mote.encode(TEXTS, prompt_name=expert)
    assert np.array_equal(dense.encode(TEXTS), expected)
    assert np.array_equal(dense.encode(TEXTS, prompt_name=expert), expected)
    assert np.array_equal(dense.encode(TEXTS, prompt=""), mote.encode(TEXTS, task=expert))
    other = next(name for name in EXPERTS if name != expert)
    assert not np.allclose(mote.encode(TEXTS, prompt_name=other), expected, atol=1e-3)
    assert [type(module).__name__ for module in dense] == ["Transformer", "Pooling", "Normalize"]
    assert dense.max_seq_length == mote.max_seq_length


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_type_of_the_weights_stays(dtype: str, dense: Path, tmp_path: Path) -> None:
    upcycle(str(dense), tmp_path / "mote", dtype=dtype)
    exported = AutoModel.from_pretrained(export(tmp_path / "mote", tmp_path / "out", expert="clustering"))
    assert exported.dtype == getattr(torch, dtype)


def test_the_weights_of_other_experts_are_not_read(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    load = MoTEModel.from_pretrained
    monkeypatch.setattr(
        MoTEModel, "from_pretrained", lambda *a, **k: (asked.append(k.get("experts")), load(*a, **k))[1]
    )
    export(trained, tmp_path / "out", expert="clustering")
    assert asked == [["clustering"]]


def test_a_source_with_some_experts_only(trained: Path, tmp_path: Path) -> None:
    MoTEModel.from_pretrained(trained, experts=["clustering"]).save_pretrained(tmp_path / "partial")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(trained / file, tmp_path / "partial" / file)
    one = AutoModel.from_pretrained(export(tmp_path / "partial", tmp_path / "one", expert="clustering"))
    all_of = AutoModel.from_pretrained(export(trained, tmp_path / "all", expert="clustering"))
    with torch.no_grad():
        assert one(**batch()).last_hidden_state.equal(all_of(**batch()).last_hidden_state)
    with pytest.raises(ValueError, match="The expert 'search_query' was not loaded"):
        export(tmp_path / "partial", tmp_path / "other", expert="search_query")


# Prompts, card, record -----------------------------------------------------------------------------------------------


def test_prompts_are_those_of_its_tasks(trained: Path, tmp_path: Path) -> None:
    prompts = {
        expert: read_json(export(trained, tmp_path / expert, expert=expert) / "config_sentence_transformers.json")
        for expert in EXPERTS
    }
    assert [settings["default_prompt_name"] for settings in prompts.values()] == EXPERTS
    for expert, settings in prompts.items():
        assert set(settings["prompts"].values()) == {PAPER_INSTRUCTIONS[expert]}
    roles = {"query", "document"}
    assert set(prompts["clustering"]["prompts"]) == {"clustering", "Clustering"} | roles
    assert set(prompts["search_query"]["prompts"]) == {"search_query", "Retrieval-query", "Reranking-query"} | roles


def test_roles_that_the_expert_does_not_serve_have_its_instruction(trained_folder: Path, tmp_path: Path) -> None:
    dense = SentenceTransformer(str(export(trained_folder, tmp_path / "out", expert="clustering")))
    for encode in (dense.encode_query, dense.encode_document):
        assert np.array_equal(encode(TEXTS), dense.encode(TEXTS))


def test_an_expert_without_an_instruction(dense: Path, tmp_path: Path) -> None:
    upcycle(str(dense), tmp_path / "mote", experts=["a", "b"], instructions={"b": "b: "})
    out = export(tmp_path / "mote", tmp_path / "out", expert="a")
    settings = read_json(out / "config_sentence_transformers.json")
    assert settings["default_prompt_name"] is None
    assert settings["prompts"] == {"a": "", "query": "", "document": ""}
    assert "is put in front of each text" not in (out / "README.md").read_text()
    mote = trusted(tmp_path / "mote")
    assert np.array_equal(SentenceTransformer(str(out)).encode(TEXTS), mote.encode(TEXTS, task="a"))


@pytest.mark.long
def test_a_prompt_that_the_source_brought(tmp_path: Path) -> None:
    dense_checkpoint(tmp_path / "e5", sentence_transformers={"prompts": {"passage": "passage: ", "query": "query: "}})
    upcycle(str(tmp_path / "e5"), tmp_path / "mote")
    mote = trusted(tmp_path / "mote")
    for expert in EXPERTS:
        dense = SentenceTransformer(str(export(tmp_path / "mote", tmp_path / expert, expert=expert)))
        served = {mote[0].config.instruction_of(task) for task, name in mote[0].config.tasks.items() if name == expert}
        assert set(dense.prompts.values()) <= served


def test_the_record_and_the_card(trained: Path, tmp_path: Path) -> None:
    out = export(trained, tmp_path / "out", expert="search_query")
    step = read_steps(out)[-1]
    assert step["command"] == "mote export tiny-mote --expert search_query --out out"
    assert step["settings"] == {"name": "search_query"}
    card = (out / "README.md").read_text()
    assert "the expert `search_query` of [tiny-mote]" in card
    assert "| `query` | `search_query: ` |" in card
    assert "clustering: " not in card
    for word in ("trust_remote_code", "custom_code", "On a CPU", "prompt_name="):
        assert word not in card
    assert not [name for name in files_in(out) - {"model.safetensors"} if str(tmp_path) in (out / name).read_text()]


def test_the_average_keeps_all_prompts(trained: Path, tmp_path: Path) -> None:
    settings = read_json(average(trained, tmp_path / "out") / "config_sentence_transformers.json")
    assert set(EXPERTS) <= set(settings["prompts"])
    assert not settings.get("default_prompt_name")


# The command ---------------------------------------------------------------------------------------------------------


def test_the_command(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(trained, tmp_path / "out") == 0
    printed = capsys.readouterr().out
    assert f'Wrote {tmp_path / "out"}\nAutoModel.from_pretrained("{tmp_path / "out"}")' in printed
    assert "load_exported" not in printed
    assert run(trained, tmp_path / "out") == 1
    assert "is in use" in capsys.readouterr().err
    assert run(trained, tmp_path / "out", "--overwrite", expert="search_query") == 0
    assert read_steps(tmp_path / "out")[-1]["settings"] == {"name": "search_query"}


def refusals(dense: Path, trained: Path, tmp_path: Path) -> dict[str, tuple[Path, list[str]]]:
    """Message → source and options."""
    routed = tmp_path / "routed"
    upcycle(str(dense), routed, routing="token")
    broken = tmp_path / "broken"
    shutil.copytree(trained, broken)
    (broken / "model.safetensors").write_bytes((trained / "model.safetensors").read_bytes()[:-100])
    empty = tmp_path / "empty.txt"
    empty.write_text("\n \n")
    picture = tmp_path / "picture.png"
    picture.write_bytes(b"\x89PNG\xff")
    return {
        "Unknown expert 'clusterin'. Did you mean 'clustering'?": (
            trained,
            ["--expert", "clusterin"],
        ),
        "A token-routed model has no experts for tasks": (routed, []),
        "is not a MoTE but a 'bert'": (dense, []),
        "nowhere is neither a folder nor": (tmp_path / "nowhere", []),
        "cannot be read, is it truncated?": (broken, []),
        "'onx' is not one of 'torch', 'onnx', 'openvino'": (trained, ["--backend", "onx"]),
        "'int4' is not": (trained, ["--quantize", "int4"]),
        "'bert' has no published format besides the native one": (trained, ["--format", "published"]),
        "quantize is for the backends 'onnx' and 'openvino'": (trained, ["--quantize", "int8"]),
        "texts are for the backends 'onnx' and 'openvino'": (trained, ["--texts", str(SMALL_ENCODER / "README.md")]),
        "No such file": (trained, ["--texts", str(tmp_path / "no-such-file")]),
        "has no texts: expected one per line": (trained, ["--texts", str(empty)]),
        "not a text in UTF-8": (trained, ["--texts", str(picture)]),
    }


def test_what_is_refused(dense: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for message, (source, options) in refusals(dense, trained, tmp_path).items():
        capsys.readouterr()
        before = files_in(tmp_path)
        assert run(source, tmp_path / "out", *options) in (1, 2)
        assert message in capsys.readouterr().err
        assert files_in(tmp_path) == before
    with pytest.raises(ValueError, match="is the source itself"):
        export(trained, trained, expert="clustering", overwrite=True)


# Nothing half-written ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", ["write_model", "write_sentence_transformer", "write_steps"])
def test_a_full_disk(step: str, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(writing, step, fail)
    with pytest.raises(OSError, match="could not be written, nothing was left behind: No space left"):
        export(trained, tmp_path / "out", expert="clustering")
    assert not any(tmp_path.iterdir())


# In a process of its own: files that may not grow, or a kill at a step of the writing.
FAULTS = """
import os, resource, signal, sys
from mote.checkpoints import writing as repository
from mote.cli import main

source, out, how = sys.argv[1:]
if how == "limit":
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
else:
    step = getattr(repository, how)
    setattr(repository, how, lambda *a, **k: (step(*a, **k), os.kill(os.getpid(), signal.SIGKILL)))
sys.exit(main(["export", source, "--out", out, "--expert", "clustering"]))
"""


@pytest.fixture
def with_fault(trained: Path, tmp_path: Path) -> Callable[[str], "subprocess.CompletedProcess[str]"]:
    def run_it(how: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-c", FAULTS, str(trained), str(tmp_path / "out"), how]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.run(command, capture_output=True, text=True, check=False, env=environment)

    return run_it


@pytest.mark.processes
def test_files_that_cannot_grow(with_fault: Callable[[str], Any], tmp_path: Path) -> None:
    done = with_fault("limit")
    assert done.returncode == 1
    assert "could not be written, nothing was left behind" in done.stderr
    assert not any(tmp_path.iterdir())


@pytest.mark.processes
def test_killed_while_writing(with_fault: Callable[[str], Any], trained: Path, tmp_path: Path) -> None:
    for step in ("write_model", "write_steps"):
        assert with_fault(step).returncode == -signal.SIGKILL
        assert not (tmp_path / "out").exists()
    out = export(trained, tmp_path / "out", expert="clustering")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]  # the leftovers are gone
    SentenceTransformer(str(out)).encode(TEXTS)
