"""Dense checkpoints in the formats in which they are published, and sources that must not pass."""

import os
import pickle
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.checkpoints import dense_checkpoint, edit_json, edit_weights, published_nomic, tiny_tokenizer, to_bin
from helpers.families import EAGER_ONLY, batch, dense_model
from safetensors.torch import load_file

from mote import plan_upcycling, upcycle
from mote.checkpoints.models import HEADS, load_dense, load_tokenizer
from mote.checkpoints.reading import open_dense, stored_dtype
from mote.checkpoints.tensors import read_shapes


@pytest.mark.parametrize(
    ("name", "head", "heads"),
    [
        ("nomic_bert", None, set()),
        ("nomic_bert", "mlm", {"cls"}),
        ("bert", "mlm", {"cls"}),
        ("bert", "pretraining", {"cls"}),
        ("bert", "classification", {"classifier"}),
        ("roberta", "mlm", {"lm_head"}),
        ("roberta", "classification", {"classifier"}),
        ("xlm-roberta", "mlm", {"lm_head"}),
        ("camembert", "mlm", {"lm_head"}),
        ("mpnet", "mlm", {"lm_head"}),
        ("distilbert", "mlm", {"vocab_layer_norm", "vocab_projector", "vocab_transform"}),
        ("distilbert", "classification", {"classifier", "pre_classifier"}),
        ("electra", "pretraining", {"discriminator_predictions"}),
        ("electra", "mlm", {"generator_lm_head", "generator_predictions"}),
        ("ernie", "mlm", {"cls"}),
        ("modernbert", "mlm", {"decoder", "head"}),
        ("modernbert", "classification", {"classifier", "head"}),
        ("eurobert", "mlm", {"lm_head"}),
        ("mistral", "causal", {"lm_head"}),
        ("mistral", "classification", {"score"}),
        ("qwen3", "causal", {"lm_head"}),
        ("llama", "causal", {"lm_head"}),
        ("gemma2", "causal", set()),  # its head is the embeddings
    ],
)
def test_heads_are_left_out_knowingly(name: str, head: str | None, heads: set[str], tmp_path: Path) -> None:
    folder = dense_checkpoint(tmp_path, name, head, tokenizer=False)
    model, left_out = load_dense(open_dense(str(folder)))
    if name in EAGER_ONLY:
        model.set_attn_implementation("eager")
    inputs = batch()
    with torch.no_grad():
        expected = dense_model(name)(**inputs).last_hidden_state
        hidden = model(**inputs).last_hidden_state
    mask = inputs["attention_mask"].bool()
    assert hidden[mask].equal(expected[mask])
    found = {key.split(".")[0] for key in left_out} - {"pooler"}
    assert found <= set(HEADS)
    assert found == heads


@pytest.mark.parametrize(
    ("file_format", "shards"),
    [("safetensors", False), ("safetensors", True), ("bin", True), ("legacy-bin", False), ("legacy-bin", True)],
)
def test_file_formats(file_format: str, shards: bool, tmp_path: Path) -> None:
    folder = dense_checkpoint(tmp_path / "tiny", format=file_format, shards=shards, tokenizer=False)
    if file_format == "safetensors":
        (folder / "pytorch_model.bin").write_bytes(b"not even a pickle")  # comes second
    source = open_dense(str(folder))
    assert (len(source.weights) > 1) == shards
    model, left_out = load_dense(source)
    assert left_out == []
    assert model.config._name_or_path == "tiny"  # no folder of this machine
    weights = dense_model("bert").state_dict()
    assert all(value.equal(weights[key]) for key, value in model.state_dict().items())
    assert read_shapes(source.weights) == {key: tuple(value.shape) for key, value in weights.items()}
    edit_json(folder / "config.json", dtype=None)
    assert stored_dtype(open_dense(str(folder))) is torch.float32


@pytest.mark.parametrize("file_format", ["safetensors", "bin"])
def test_buffers_of_old_checkpoints(file_format: str, tmp_path: Path) -> None:
    folder = dense_checkpoint(tmp_path, tokenizer=False, dtype="bfloat16")
    assert stored_dtype(open_dense(str(folder))) is torch.bfloat16
    edit_weights(folder, embeddings__position_ids=torch.arange(512)[None])
    if file_format == "bin":
        to_bin(folder)
    edit_json(folder / "config.json", dtype=None)  # as in checkpoints of that time
    source = open_dense(str(folder))
    assert stored_dtype(source) is torch.bfloat16  # not that of the buffer
    assert load_dense(source)[1] == []


def cut(path: Path) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2])


def config(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / "config.json", **changes)


def weights(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: edit_weights(folder, **changes)


Case = tuple[dict[str, Any], Callable[[Path], Any], str]


def wrapped(prefix: str) -> Case:
    def wrap(folder: Path) -> None:
        stored = load_file(folder / "model.safetensors")
        edit_weights(folder, **dict.fromkeys(stored), **{f"{prefix}.{key}": stored[key] for key in stored})

    return {}, wrap, f"source lack .* of a model wrapped as '{prefix}': save the model itself"


def begins_with(name: str) -> Case:
    text = f'[{{"path": "", "type": "sentence_transformers.{name}"}}]'
    spoil = lambda folder: (folder / "config.json").rename(folder / "modules.json").write_text(text)  # noqa: E731
    return {}, spoil, f"source begins with a {name}, not with a T"


def pointer(name: str, **settings: Any) -> Case:
    text = "version https://git-lfs.github.com/spec/v1\noid sha256:1f\nsize 4\n"
    return settings, lambda folder: (folder / name).write_text(text), f"{name} is a Git LFS pointer: run `git lfs pull`"


BIN, SHARDS, ST = {"format": "bin"}, {"shards": True}, {"sentence_transformers": {}}
ST_FILE = "config_sentence_transformers.json"

SPOILED: dict[str, Case] = {
    "no config": ({}, lambda folder: (folder / "config.json").unlink(), "No such file or directory: .*config.json"),
    "no weights": ({}, lambda folder: (folder / "model.safetensors").unlink(), "has no weights: .*found config.json, "),
    "unknown architecture": (
        {},
        config(model_type="nope"),
        "source has the architecture 'nope'.*Supported by MoTE: nomic_bert, .*gemma3_text",
    ),
    "albert": ({}, config(model_type="albert"), "does not support 'albert': it uses one layer again and again"),
    "t5": ({}, config(model_type="t5"), "does not support 't5'.*'modernbert'"),
    "a PEFT adapter": (
        {},
        lambda folder: (folder / "config.json").rename(folder / "adapter_config.json"),
        "source is a PEFT adapter: merge it",
    ),
    "cut bin": (BIN, lambda folder: cut(folder / "pytorch_model.bin"), r"model\.bin.* cannot be read"),
    "bin of a list": (BIN, lambda folder: torch.save([1], folder / "pytorch_model.bin"), "cannot be read, .*'list'"),
    "missing shard": (
        SHARDS,
        lambda folder: next(folder.glob("*-00002-of-*")).unlink(),
        "model-00002-of-.* cannot be read",
    ),
    "missing key": ({}, weights(encoder__layer__1__output__dense__weight=None), "source lack 1 keys of BertModel: enc"),
    "unexpected key": ({}, weights(encoder__layer__1__new=torch.zeros(3)), "source hold unknown 1 keys of BertModel"),
    "wrong shape": ({}, weights(embeddings__LayerNorm__weight=torch.zeros(17)), "source misshape 1 keys of BertModel"),
    "no tokenizer": ({"tokenizer": False}, lambda folder: None, "source has no tokenizer: name one with `--tokenizer`"),
    "cut tokenizer": ({}, lambda folder: cut(folder / "tokenizer.json"), "The tokenizer .*source .*cannot be loaded"),
    "large tokenizer": ({"vocab_size": 59}, lambda folder: tiny_tokenizer(folder, 60), "has embeddings for 59 only"),
    "no vocabulary": ({}, lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer .*source has no vocabulary"),
    "SentencePiece without its package": (
        {"family": "xlm-roberta", "tokenizer": False},
        lambda folder: (folder / "sentencepiece.bpe.model").write_text("x"),
        "cannot be loaded: .*pip install sentencepiece",
    ),
    "quantised": ({}, config(quantization_config={"quant_method": "gptq"}), r"source is quantised \(gptq\)"),
    "quantised long ago": ({}, config(quantization_config={"load_in_8bit": True}), r"quantised \(bitsandbytes\)"),
    "a reranker": (ST, lambda folder: edit_json(folder / ST_FILE, model_type="CrossEncoder"), "is a CrossEncoder"),
    "an old reranker": ({}, config(sentence_transformers={"version": "4.0.1"}), "source is a CrossEncoder"),
    "a router": begins_with("Router"),
    "static embeddings": begins_with("StaticEmbedding"),
    "no pooling": (ST, lambda folder: (folder / "1_Pooling/config.json").unlink(), "No such file.*1_Pooling/config"),
    "a pointer": pointer("model.safetensors"),
    "a pointer in place of bin": pointer("pytorch_model.bin", format="bin"),
    "a pointer in place of the tokenizer": pointer("tokenizer.json"),
    **{prefix: wrapped(prefix) for prefix in ("module", "_orig_mod", "0.auto_model", "base_model.model")},
    "weights in a dict": (BIN, lambda folder: torch.save({"a": {}}, folder / "pytorch_model.bin"), "no weights"),
    "a module of its own code": (
        {},
        lambda folder: (folder / "modules.json").write_text('[{"path": "", "type": "user/other--custom.Module"}]'),
        "source has a module with code of its own, user/other--custom.Module",
    ),
}


@pytest.mark.parametrize("case", SPOILED)
def test_spoiled_sources(case: str, tmp_path: Path) -> None:
    settings, spoil, message = SPOILED[case]
    folder = dense_checkpoint(tmp_path / "source", **settings)
    spoil(folder)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        upcycle(str(folder), tmp_path / "out")
    assert sorted(tmp_path.rglob("*")) == before


def test_what_is_not_taken_from_a_source_is_announced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = dense_checkpoint(tmp_path / "source", "qwen3")
    edit_json(folder / "config.json", auto_map={"AutoModel": "modeling_both.BothWays"})
    plan_upcycling(str(folder), bidirectional=True)
    for settings in ({"is_causal": False}, {"use_bidirectional_attention": True}):
        copy = shutil.copytree(folder, tmp_path / next(iter(settings)))
        edit_json(copy / "config.json", **settings)
        plan_upcycling(str(copy))
    assert not caplog.records
    plan_upcycling(str(folder))
    assert re.search("modeling_both.BothWays, is not run.*pass `--bidirectional`", caplog.text)
    (folder / "retrieval").mkdir()
    (folder / "retrieval" / "adapter_config.json").touch()
    open_dense(str(folder))
    assert re.search("The adapters in .* are ignored: retrieval", caplog.messages[-1])


@pytest.mark.parametrize("name", ["absent", "no body/at-all", "nobody/at-all", "../absent"])
def test_a_source_that_is_not_there(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match=f"^{re.escape(name)} is (neither a folder nor|not a folder)"):
        open_dense(name)
    with pytest.raises(FileNotFoundError, match=f"{tmp_path.name}/config.json"):
        open_dense(str(tmp_path))


def test_names_of_sources(upcycled: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="tiny-mote is already a MoTE"):
        open_dense(str(upcycled))
    source = open_dense(str(dense_checkpoint(tmp_path / "my-run" / "model")))
    assert source.short_name == "model"
    (tmp_path / "my-run" / "recipe.yaml").touch()
    assert source.short_name == "my-run"
    with pytest.raises(ValueError, match="is a folder: it has no revision 'v2'"):
        open_dense(source.name, revision="v2")
    with pytest.raises(ValueError, match=r"The tokenizer nobody/nothing for .*model cannot be loaded"):
        load_tokenizer(source, "nobody/nothing")


class Malicious:
    """Makes a folder when it is unpickled."""

    def __init__(self, proof: Path) -> None:
        self.proof = str(proof)

    def __reduce__(self) -> tuple[Callable, tuple[str]]:
        return os.mkdir, (self.proof,)


@pytest.mark.parametrize(
    ("kind", "dtype", "nomic_schema"),
    [("zip", None, False), ("legacy", "float32", False), ("plain pickle", None, True), ("zip", "float32", True)],
)
def test_a_malicious_pickle_is_not_run(kind: str, dtype: str | None, nomic_schema: bool, tmp_path: Path) -> None:
    source, proof = tmp_path / "source", tmp_path / "proof"
    _ = published_nomic(source, True) if nomic_schema else dense_checkpoint(source, format="bin")
    edit_json(source / "config.json", dtype=dtype)
    state = {"embeddings.word_embeddings.weight": torch.zeros(60, 16), "x": Malicious(proof)}
    path = source / "pytorch_model.bin"
    if kind == "plain pickle":
        path.write_bytes(pickle.dumps(state, protocol=2))
    else:
        torch.save(state, path, _use_new_zipfile_serialization=kind == "zip")
    with pytest.raises(ValueError, match="cannot be read, it is damaged, or holds more than tensors"):
        upcycle(str(source), tmp_path / "out")
    assert not proof.exists()
    pickle.loads(pickle.dumps(Malicious(proof)))
    assert proof.is_dir()  # it would have worked
