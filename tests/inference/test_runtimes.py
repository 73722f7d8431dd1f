"""Exported experts in ONNX Runtime and OpenVINO."""

import logging
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.checkpoints import trusted
from helpers.families import all_families, batch, in_threads, trained_mote
from helpers.on_disk import export
from sentence_transformers import SentenceTransformer

import mote
from mote import load_exported
from mote.checkpoints.provenance import read_steps
from mote.cli import main
from mote.inference import runtimes

TEXTS = ["whales breathe air", "a recipe for bread", "a"]
CONVERTERS = {"onnx": ("onnx", "onnxscript", "onnxruntime"), "openvino": ("openvino", "nncf")}

backends = pytest.mark.parametrize("backend", list(CONVERTERS))


def need(backend: str) -> None:
    for package in CONVERTERS[backend]:
        pytest.importorskip(package)


@backends
def test_a_backend_that_is_not_installed(
    backend: str, trained_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(runtimes, "find_spec", lambda name: None)
    words = ["export", str(trained_folder), "--out", str(tmp_path / "out"), "--expert", "clustering"]
    assert main([*words, "--backend", backend]) == 1
    assert f'pip install "mote-embeddings[{backend}]"' in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


@pytest.fixture(scope="module")
def converted(trained_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    @cache
    def convert(backend: str, quantize: str | None) -> Path:
        need(backend)
        out = tmp_path_factory.mktemp("converted") / "out"
        return export(trained_folder, out, expert="search_query", backend=backend, quantize=quantize)

    return convert


@pytest.mark.slow
@backends
@pytest.mark.parametrize("quantize", [None, "int8"])
def test_a_runtime_embeds_as_torch(
    backend: str, quantize: str | None, converted: Callable[..., Path], trained_folder: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    out = converted(backend, quantize)
    expected = trusted(trained_folder).encode(TEXTS, prompt_name="search_query")
    assert np.array_equal(load_exported(out).encode(TEXTS), expected)
    model = load_exported(out, backend)
    found = model.encode(TEXTS)
    assert (found * expected).sum(1).min() > (0.99 if quantize else 0.9999)
    assert np.allclose(model.encode_query(TEXTS), found, atol=1e-6)
    told = read_steps(out)[-1]["converted"]
    assert (told["backend"], told["quantize"], told["texts"]) == (backend, quantize, 128)
    assert told["cosine"]["least"] <= told["cosine"]["mean"] <= 1 + 1e-6
    assert f'load_exported("out", backend="{backend}")' in (out / "README.md").read_text()
    files = [out / told["file"], (out / told["file"]).with_suffix(".bin")]
    size = sum(file.stat().st_size for file in files if file.is_file())
    assert size < (out / "model.safetensors").stat().st_size * (0.5 if quantize else 1.1)
    if backend == "onnx":  # the names that readers look for, transformers.js as "q8" and "fp32"
        names = {"model.onnx", "model_quantized.onnx"} if quantize else {"model.onnx"}
        assert {file.name for file in (out / backend).iterdir()} == names
        assert Path(told["file"]).name == max(names)
    assert logging.getLogger().handlers == []  # a handler there would print each of our lines twice


@pytest.mark.slow
@backends
def test_a_runtime_in_threads(backend: str, converted: Callable[..., Path]) -> None:
    model = load_exported(converted(backend, None), backend)
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
    write = runtimes.write_onnx if backend == "onnx" else runtimes._write_openvino
    write(runtimes.traced(model, example), file, None, [example])
    exact = {"INFERENCE_PRECISION_HINT": "f32"}
    runtime = (
        runtimes.onnx_encoder(file, model.config)
        if backend == "onnx"
        else runtimes.openvino_encoder(file, model.config, exact)
    )
    for rows, length in ((1, 5), (4, 9), (2, 23)):
        inputs = batch(rows, length, seed=rows)
        with torch.no_grad():
            difference = runtime(**inputs).last_hidden_state - model(**inputs).last_hidden_state
        assert difference[inputs["attention_mask"].bool()].abs().max() < 1e-5


@pytest.mark.slow
def test_texts_of_ones_own(trained_folder: Path, tmp_path: Path) -> None:
    need("onnx")
    # A batch of one row says nothing of others, nor may it seem to.
    convert = partial(runtimes.convert, backend="onnx", texts=["whales"])
    out = mote.transform(trained_folder, tmp_path / "one", mote.experts.export, "clustering", after=convert)
    assert read_steps(out)[-1]["converted"]["texts"] == 1
    assert load_exported(out, "onnx").encode(TEXTS).shape[0] == len(TEXTS)


@pytest.mark.long
def test_a_conversion_that_fails_or_goes_wrong(
    trained_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no such operation\nmore of it")

    monkeypatch.setattr(runtimes, "require", lambda *_, **__: None)
    monkeypatch.setattr(runtimes, "traced", fail)
    with pytest.raises(ValueError, match=r"could not be converted to onnx \(RuntimeError: no such operation\)"):
        export(trained_folder, tmp_path / "out", expert="clustering", backend="onnx")
    assert not any(tmp_path.iterdir())
    other = export(trained_folder, tmp_path / "other", expert="search_query")
    monkeypatch.setattr(runtimes, "traced", lambda *_: None)
    monkeypatch.setattr(runtimes, "write_onnx", lambda *_: None)
    monkeypatch.setattr(runtimes, "load_exported", lambda *_, **__: SentenceTransformer(str(other)))
    with pytest.raises(ValueError, match=r"embeddings of the converted model differ .* Export it for torch"):
        export(trained_folder, tmp_path / "out", expert="clustering", backend="onnx")
    assert {path.name for path in tmp_path.iterdir()} == {"other"}


def test_an_unknown_backend(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="Unknown backend 'tensorrt'"):
        load_exported(tmp_path, "tensorrt")


@pytest.mark.slow
@pytest.mark.parametrize("quantize", [None, "int8"])
def test_all_experts_over_one_file_of_weights(
    quantize: str | None, model: SentenceTransformer, trained_folder: Path, tmp_path: Path
) -> None:
    need("onnx")
    words = ["export", str(trained_folder), "--backend", "onnx", "--out", str(tmp_path / "out")]
    assert main([*words, *(["--quantize", quantize] if quantize else [])]) == 0
    exported = load_exported(tmp_path / "out", "onnx", trust_remote_code=True)
    several = {**model[0].preprocess(TEXTS, task="clustering"), "route": torch.tensor([0, 1, 0])}
    expected, found = [], []
    for one, vectors in ((model, expected), (exported, found)):
        vectors += one.encode(TEXTS, task="clustering"), one.encode(TEXTS, prompt_name="search_query")
        vectors.append(one(dict(several))["sentence_embedding"].numpy(force=True))
    for vectors, others in zip(expected, found, strict=True):
        assert np.allclose(vectors, others, atol=0.1 if quantize else 1e-5)
    sizes = [
        sum(file.stat().st_size for file in files)
        for files in (tmp_path.glob("out/onnx/*"), trained_folder.glob("*.safetensors"))
    ]
    assert sizes[0] < (0.4 if quantize else 1.05) * sizes[1]
    assert not [*tmp_path.glob("out/*.safetensors")]
    for place in ([], ["--out", str(trained_folder)]):  # the source would lose its weights
        assert main([*words[:4], *place, "--overwrite"]) == 1
    assert [*trained_folder.glob("*.safetensors")]
    assert main(["card", str(tmp_path / "out")]) == 0  # as `mote push` does
    assert "runs in ONNX Runtime" in (tmp_path / "out/README.md").read_text()
