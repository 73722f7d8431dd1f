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
from helpers.checkpoints import dense_checkpoint, edit_json, files_in, read_json, trusted
from helpers.families import all_families, batch, in_threads, make_different, trained_mote
from helpers.paths import SMALL_ENCODER
from sentence_transformers import SentenceTransformer
from transformers import AutoModel

import mote
from configuration_mote import PAPER_INSTRUCTIONS
from modeling_mote import MoTEModel
from mote import average, export, load_exported, upcycle
from mote.checkpoints import writing as repository
from mote.cli import main
from mote.inference import runtimes

EXPERTS = list(PAPER_INSTRUCTIONS)
TEXTS = ["whales breathe air", "a recipe for bread", "a"]
CONVERTERS = {"onnx": ("onnx", "onnxscript", "onnxruntime"), "openvino": ("openvino", "nncf")}

backends = pytest.mark.parametrize("backend", list(CONVERTERS))


def need(backend: str) -> None:
    for package in CONVERTERS[backend]:
        pytest.importorskip(package)


@pytest.fixture(scope="module")
def trained(upcycled: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny MoTE, with experts that differ."""
    folder = tmp_path_factory.mktemp("exporting") / "tiny-mote"
    shutil.copytree(upcycled, folder)
    make_different(MoTEModel.from_pretrained(upcycled)).save_pretrained(folder)
    return folder


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
        out = export(str(tmp_path / "mote"), tmp_path / expert, expert=expert)
        assert not [file for file in files_in(out) if file.endswith(".py")]
        assert "auto_map" not in read_json(out / "config.json")
        dense = AutoModel.from_pretrained(out, attn_implementation=mote.backbone.config._attn_implementation).eval()
        assert type(dense).__module__.startswith("transformers.")
        with torch.no_grad():
            expected = mote(**batch(), task=expert).last_hidden_state
            assert dense(**batch()).last_hidden_state.equal(expected)


@pytest.mark.parametrize("expert", EXPERTS)
def test_encode_without_a_prompt_is_that_of_the_task(expert: str, trained_folder: Path, tmp_path: Path) -> None:
    mote = trusted(trained_folder)
    dense = SentenceTransformer(str(export(str(trained_folder), tmp_path / "out", expert=expert)))
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
    exported = AutoModel.from_pretrained(export(str(tmp_path / "mote"), tmp_path / "out", expert="clustering"))
    assert exported.dtype == getattr(torch, dtype)


def test_the_weights_of_other_experts_are_not_read(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []
    load = MoTEModel.from_pretrained
    monkeypatch.setattr(
        MoTEModel, "from_pretrained", lambda *a, **k: (asked.append(k.get("experts")), load(*a, **k))[1]
    )
    export(str(trained), tmp_path / "out", expert="clustering")
    assert asked == [["clustering"]]


def test_a_source_with_some_experts_only(trained: Path, tmp_path: Path) -> None:
    MoTEModel.from_pretrained(trained, experts=["clustering"]).save_pretrained(tmp_path / "partial")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(trained / file, tmp_path / "partial" / file)
    one = AutoModel.from_pretrained(export(str(tmp_path / "partial"), tmp_path / "one", expert="clustering"))
    all_of = AutoModel.from_pretrained(export(str(trained), tmp_path / "all", expert="clustering"))
    with torch.no_grad():
        assert one(**batch()).last_hidden_state.equal(all_of(**batch()).last_hidden_state)
    with pytest.raises(ValueError, match="The expert 'search_query' was not loaded"):
        export(str(tmp_path / "partial"), tmp_path / "other", expert="search_query")


# Prompts, card, record -----------------------------------------------------------------------------------------------


def test_prompts_are_those_of_its_tasks(trained: Path, tmp_path: Path) -> None:
    prompts = {
        expert: read_json(export(str(trained), tmp_path / expert, expert=expert) / "config_sentence_transformers.json")
        for expert in EXPERTS
    }
    assert [settings["default_prompt_name"] for settings in prompts.values()] == EXPERTS
    for expert, settings in prompts.items():
        assert set(settings["prompts"].values()) == {PAPER_INSTRUCTIONS[expert]}
    roles = {"query", "document"}
    assert set(prompts["clustering"]["prompts"]) == {"clustering", "Clustering"} | roles
    assert set(prompts["search_query"]["prompts"]) == {"search_query", "Retrieval-query", "Reranking-query"} | roles


def test_roles_that_the_expert_does_not_serve_have_its_instruction(trained_folder: Path, tmp_path: Path) -> None:
    dense = SentenceTransformer(str(export(str(trained_folder), tmp_path / "out", expert="clustering")))
    for encode in (dense.encode_query, dense.encode_document):
        assert np.array_equal(encode(TEXTS), dense.encode(TEXTS))


def test_an_expert_without_an_instruction(dense: Path, tmp_path: Path) -> None:
    upcycle(str(dense), tmp_path / "mote", experts=["a", "b"], instructions={"b": "b: "})
    out = export(str(tmp_path / "mote"), tmp_path / "out", expert="a")
    settings = read_json(out / "config_sentence_transformers.json")
    assert settings["default_prompt_name"] is None
    assert settings["prompts"] == {"a": "", "query": "", "document": ""}
    assert "Where no prompt is given" not in (out / "README.md").read_text()
    mote = trusted(tmp_path / "mote")
    assert np.array_equal(SentenceTransformer(str(out)).encode(TEXTS), mote.encode(TEXTS, task="a"))


def test_a_prompt_that_the_source_brought(tmp_path: Path) -> None:
    dense_checkpoint(tmp_path / "e5", sentence_transformers={"prompts": {"passage": "passage: ", "query": "query: "}})
    upcycle(str(tmp_path / "e5"), tmp_path / "mote")
    mote = trusted(tmp_path / "mote")
    for expert in EXPERTS:
        dense = SentenceTransformer(str(export(str(tmp_path / "mote"), tmp_path / expert, expert=expert)))
        served = {mote[0].config.instruction_of(task) for task, name in mote[0].config.tasks.items() if name == expert}
        assert set(dense.prompts.values()) <= served


def test_the_record_and_the_card(trained: Path, tmp_path: Path) -> None:
    out = export(str(trained), tmp_path / "out", expert="search_query")
    record = read_json(out / "merging.json")
    assert record["command"] == "mote export tiny-mote --out out --expert search_query"
    assert record["arguments"] == {"expert": "search_query"}
    card = (out / "README.md").read_text()
    assert "the expert `search_query` of [tiny-mote]" in card
    assert "| `query` | `search_query: ` |" in card
    assert "clustering: " not in card
    for word in ("trust_remote_code", "custom_code", "On a CPU", "prompt_name="):
        assert word not in card
    assert not [name for name in files_in(out) - {"model.safetensors"} if str(tmp_path) in (out / name).read_text()]


def test_the_average_keeps_all_prompts(trained: Path, tmp_path: Path) -> None:
    settings = read_json(average(str(trained), tmp_path / "out") / "config_sentence_transformers.json")
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
    assert read_json(tmp_path / "out" / "merging.json")["arguments"] == {"expert": "search_query"}


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
        "Unknown expert 'clusterin'. Did you mean 'clustering'?": (trained, ["--expert", "clusterin"]),
        "The experts of a token router are not experts for tasks: they are not exported": (routed, []),
        "is no MoTE but a 'bert'": (dense, []),
        "nowhere is neither a folder nor": (tmp_path / "nowhere", []),
        "is a file cut short?": (broken, []),
        "Unknown backend 'onx'. Did you mean 'onnx'? Available: 'torch', 'onnx', 'openvino'.": (
            trained,
            ["--backend", "onx"],
        ),
        "Unknown quantization 'int4'": (trained, ["--quantize", "int4"]),
        "quantize is for the backends 'onnx' and 'openvino'": (trained, ["--quantize", "int8"]),
        "texts are for the backends 'onnx' and 'openvino'": (trained, ["--texts", str(SMALL_ENCODER / "README.md")]),
        "There is no file": (trained, ["--texts", str(tmp_path / "no-such-file")]),
        "has no texts: expected one per line": (trained, ["--texts", str(empty)]),
        "not a text in UTF-8": (trained, ["--texts", str(picture)]),
    }


def test_what_is_refused(dense: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for message, (source, options) in refusals(dense, trained, tmp_path).items():
        capsys.readouterr()
        before = files_in(tmp_path)
        assert run(source, tmp_path / "out", *options) == 1
        assert message in capsys.readouterr().err
        assert files_in(tmp_path) == before
    with pytest.raises(ValueError, match="is the source itself"):
        export(str(trained), trained, expert="clustering", overwrite=True)


@backends
def test_a_backend_that_is_not_installed(
    backend: str, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runtimes, "find_spec", lambda name: None)
    assert run(trained, tmp_path / "out", "--backend", backend) == 1
    assert f'not installed: pip install -e ".[{backend}]"' in capsys.readouterr().err
    assert not any(tmp_path.iterdir())
    with pytest.raises(OSError, match="not installed"):
        load_exported(trained, backend)


# Nothing half-written ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step", ["write_model", "write_sentence_transformer", "write_dense_card", "write_record"])
def test_a_full_disk(step: str, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(repository, step, fail)
    with pytest.raises(OSError, match="could not be written, nothing was left behind: No space left"):
        export(str(trained), tmp_path / "out", expert="clustering")
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


def test_files_that_cannot_grow(with_fault: Callable[[str], Any], tmp_path: Path) -> None:
    done = with_fault("limit")
    assert done.returncode == 1
    assert "could not be written, nothing was left behind" in done.stderr
    assert not any(tmp_path.iterdir())


def test_killed_while_writing(with_fault: Callable[[str], Any], trained: Path, tmp_path: Path) -> None:
    for step in ("write_model", "write_record"):
        assert with_fault(step).returncode == -signal.SIGKILL
        assert not (tmp_path / "out").exists()
    out = export(str(trained), tmp_path / "out", expert="clustering")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]  # the leftovers are gone
    SentenceTransformer(str(out)).encode(TEXTS)


# Runtimes ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def converted(trained_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    made: dict[tuple[str, str | None], Path] = {}

    def convert(backend: str, quantize: str | None = None) -> Path:
        need(backend)
        key = (backend, quantize)
        if key not in made:
            out = tmp_path_factory.mktemp("converted") / "out"
            made[key] = export(str(trained_folder), out, expert="search_query", backend=backend, quantize=quantize)
        return made[key]

    return convert


@pytest.mark.slow
@backends
@pytest.mark.parametrize("quantize", [None, "int8"])
def test_a_runtime_embeds_as_torch(
    backend: str, quantize: str | None, converted: Callable[..., Path], trained_folder: Path
) -> None:
    out = converted(backend, quantize)
    expected = trusted(trained_folder).encode(TEXTS, prompt_name="search_query")
    assert np.array_equal(load_exported(out).encode(TEXTS), expected)
    model = load_exported(out, backend)
    found = model.encode(TEXTS)
    assert (found * expected).sum(1).min() > (0.99 if quantize else 0.9999)
    assert np.allclose(model.encode_query(TEXTS), found, atol=1e-6)
    told = read_json(out / "merging.json")["converted"]
    assert (told["backend"], told["quantize"], told["texts"]) == (backend, quantize, 128)
    assert told["cosine"]["least"] <= told["cosine"]["mean"] <= 1 + 1e-6
    assert f'load_exported("out", backend="{backend}")' in (out / "README.md").read_text()
    size = sum(file.stat().st_size for file in (out / backend).iterdir())
    assert size < (out / "model.safetensors").stat().st_size * (0.5 if quantize else 1.1)
    with pytest.raises(ValueError, match="copy the folder"):
        model.save(str(out.parent / "again"))


@pytest.mark.slow
@backends
def test_a_runtime_in_threads(backend: str, converted: Callable[..., Path]) -> None:
    model = load_exported(converted(backend), backend)
    texts = [" ".join(TEXTS * (1 + i)) for i in range(8)]
    expected = [model.encode(text) for text in texts]
    wrong: list[int] = []

    def serve(thread: int) -> None:
        for _ in range(5):
            if not np.allclose(model.encode(texts[thread]), expected[thread], atol=1e-6):
                wrong.append(thread)

    in_threads(8, serve)
    assert not wrong


@pytest.mark.slow
@backends
@all_families
def test_every_family_is_converted(name: str, backend: str, tmp_path: Path) -> None:
    need(backend)
    model = mote.experts.export(trained_mote(name), "alpha")
    example = batch(3, 8)
    file = tmp_path / Path(runtimes.FILES[backend]).name
    write = runtimes._write_onnx if backend == "onnx" else runtimes._write_openvino
    write(runtimes._traced(model, example), file, None, [example])
    exact = {"INFERENCE_PRECISION_HINT": "f32"}
    runtime = (
        runtimes.OnnxEncoder(file, model.config)
        if backend == "onnx"
        else runtimes.OpenVinoEncoder(file, model.config, exact)
    )
    for rows, length in ((1, 5), (4, 9), (2, 23)):
        inputs = batch(rows, length, seed=rows)
        with torch.no_grad():
            difference = runtime(**inputs).last_hidden_state - model(**inputs).last_hidden_state
        assert difference[inputs["attention_mask"].bool()].abs().max() < 1e-5


@pytest.mark.slow
def test_texts_of_ones_own(trained_folder: Path, tmp_path: Path) -> None:
    need("onnx")
    (tmp_path / "texts.txt").write_text("whales\n\nbread and olives\n")
    out = tmp_path / "out"
    assert run(trained_folder, out, "--backend", "onnx", "--texts", str(tmp_path / "texts.txt")) == 0
    assert read_json(out / "merging.json")["converted"]["texts"] == 2
    (tmp_path / "texts.txt").write_text("whales\n")  # a batch of one row says nothing of others, nor may it seem to
    out = tmp_path / "one"
    assert run(trained_folder, out, "--backend", "onnx", "--texts", str(tmp_path / "texts.txt")) == 0
    assert load_exported(out, "onnx").encode(TEXTS).shape[0] == len(TEXTS)


def test_the_texts_that_come_with_mote() -> None:
    assert len(runtimes.read_texts()) == 128


def test_a_conversion_that_fails_or_goes_wrong(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no such operation\nmore of it")

    monkeypatch.setattr(runtimes, "require", lambda *_, **__: None)
    monkeypatch.setattr(runtimes, "_traced", fail)
    with pytest.raises(ValueError, match=r"'bert' could not be converted to onnx \(RuntimeError: no such operation\)"):
        export(str(trained), tmp_path / "out", expert="clustering", backend="onnx")
    assert not any(tmp_path.iterdir())
    other = export(str(trained), tmp_path / "other", expert="search_query")
    monkeypatch.setattr(runtimes, "_traced", lambda *_: None)
    monkeypatch.setattr(runtimes, "_write_onnx", lambda *_: None)
    monkeypatch.setattr(runtimes, "load_exported", lambda *_, **__: SentenceTransformer(str(other)))
    with pytest.raises(ValueError, match=r"does not embed as the one in torch: .* Export it for torch"):
        export(str(trained), tmp_path / "out", expert="clustering", backend="onnx")
    assert {path.name for path in tmp_path.iterdir()} == {"other"}


@backends
def test_a_folder_without_the_runtimes_file(
    backend: str, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtimes, "find_spec", lambda name: name)
    out = export(str(trained), tmp_path / "out", expert="clustering")
    with pytest.raises(
        FileNotFoundError, match=f"has no {runtimes.FILES[backend]}: `mote export … --backend {backend}`"
    ):
        load_exported(out, backend)
    with pytest.raises(FileNotFoundError, match="is not a folder with an exported model"):
        load_exported(tmp_path / "nowhere", backend)
    with pytest.raises(ValueError, match="Unknown backend 'tensorrt'"):
        load_exported(out, "tensorrt")


@pytest.mark.slow
@backends
def test_a_real_model_in_int8(backend: str, shared: Path, tmp_path: Path) -> None:
    need(backend)
    source = str(shared / "checkpoints" / "all-MiniLM-L6-v2")
    upcycle(source, tmp_path / "mote")
    out = export(str(tmp_path / "mote"), tmp_path / "out", expert="search_query", backend=backend, quantize="int8")
    texts = runtimes.read_texts(SMALL_ENCODER / "README.md")
    expected = SentenceTransformer(source).encode(texts)
    cosines = (load_exported(out, backend).encode(texts, prompt="") * expected).sum(1)
    assert cosines.mean() > (0.99 if backend == "openvino" else 0.985)  # ONNX Runtime's activations have one scale
    edit_json(out / "config_sentence_transformers.json", default_prompt_name=None)
    assert np.array_equal(SentenceTransformer(str(out)).encode(texts), expected)
