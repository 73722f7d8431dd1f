"""Dense results in the files that old and new readers take."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.checkpoints import dense_checkpoint, edit_json, read_json, tiny_tokenizer
from helpers.families import FAMILIES, all_families, dense_model, family
from helpers.inference_server import ARCHITECTURES, read_as_server
from helpers.on_disk import export
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.sentence_transformer.modules import Pooling
from tokenizers import Tokenizer
from transformers import AutoConfig

from mote import upcycle
from mote.checkpoints.plain import plain_pooling, write_plainly

TEXTS = ["whales breathe air", "a recipe for bread", "a", "a long text " * 20]
NOT_IN_TRANSFORMERS_4 = {"nomic_bert", "gte", "jina_embeddings_v3", "eurobert"}
NOT_IN_THE_SERVER = {"electra", "ernie", "eurobert", "gemma2", "jina_embeddings_v3"}

# Of the decoders: what their checkpoints have, and text-embeddings-inference wants.
TOKEN_IDS = {"eos_token_id": 1, "vocab_size": 64}


def exported(name: str, folder: Path, **settings: Any) -> Path:
    """An expert of a tiny model of a family, upcycled and exported as users do."""
    dense_checkpoint(folder / "dense", name, **{"vocab_size": 64, **settings})
    upcycle(str(folder / "dense"), folder / "mote", experts=["clustering"])
    return export(folder / "mote", folder / "out", expert="clustering")


@pytest.mark.parametrize("name", [family(name) for name in ARCHITECTURES if name != "nomic_bert"])
def test_text_embeddings_inference_reads_every_key_that_it_wants(name: str, tmp_path: Path) -> None:
    read = read_as_server(exported(name, tmp_path, **TOKEN_IDS))
    assert read["pooling"] == "mean"
    assert read["max_input_length"] == read_json(tmp_path / "out" / "tokenizer_config.json")["model_max_length"]
    assert read["prompts"]["clustering"] == "clustering: "


def test_all_families_are_accounted_for() -> None:
    assert set(FAMILIES) == set(ARCHITECTURES) | NOT_IN_THE_SERVER


@all_families
def test_transformers_5_reads_the_same_config(name: str, tmp_path: Path) -> None:
    exported(name, tmp_path)
    found, expected = (AutoConfig.from_pretrained(tmp_path / folder).to_dict() for folder in ("out", "dense"))
    differing = {key for key in expected if found[key] != expected[key]}
    assert differing <= {"_name_or_path", "use_cache"}  # a MoTE has no cache


LINEAR = {"rope_type": "linear", "factor": 2.0}
FULL, SLIDING = ({"rope_type": "default", "rope_theta": theta} for theta in (5e5, 2e4))


@pytest.mark.parametrize(
    ("name", "rope", "read_by_transformers_4"),
    [
        ("llama", FULL, {"rope_theta": 5e5}),
        ("llama", {**LINEAR, "rope_theta": 300.0}, {"rope_theta": 300.0, "rope_scaling": LINEAR}),
        (
            "gemma3_text",
            {"full_attention": {**LINEAR, "rope_theta": 2e6}, "sliding_attention": SLIDING},
            {"rope_theta": 2e6, "rope_local_base_freq": 2e4, "rope_scaling": LINEAR},
        ),
        (
            "modernbert",
            {"full_attention": FULL, "sliding_attention": SLIDING},
            {"global_rope_theta": 5e5, "local_rope_theta": 2e4},
        ),
    ],
)
def test_rotary_positions_in_the_names_of_transformers_4(
    name: str, rope: dict[str, Any], read_by_transformers_4: dict[str, Any], tmp_path: Path
) -> None:
    model = dense_model(name, rope_parameters=rope)
    SentenceTransformer(modules=[_saved(model, tmp_path / "dense"), Pooling(16)]).save(str(tmp_path / "out"))
    write_plainly(tmp_path / "out", model)
    config = read_json(tmp_path / "out" / "config.json")
    assert {key: config[key] for key in read_by_transformers_4} == read_by_transformers_4
    assert AutoConfig.from_pretrained(tmp_path / "out").rope_parameters == model.config.rope_parameters


def _saved(model: Any, folder: Path) -> Transformer:
    model.save_pretrained(folder)
    tiny_tokenizer(folder)
    return Transformer(str(folder))


def test_attention_in_both_directions_that_transformers_4_does_not_know(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = read_json(exported("llama", tmp_path, is_causal=False, **TOKEN_IDS) / "config.json")
    assert (config["is_causal"], config["use_bidirectional_attention"]) == (False, True)
    assert "Transformers 4 has no llama with attention in both directions" in caplog.text


def test_token_types_are_left_out_where_the_model_has_none(tmp_path: Path) -> None:
    for name, expected in (("distilbert", ["input_ids", "attention_mask"]), ("bert", None)):
        settings = read_json(exported(name, tmp_path / name) / "tokenizer_config.json")
        assert settings.get("model_input_names") == expected


@pytest.mark.parametrize("modes", [("cls",), ("mean",), ("lasttoken",), ("max", "weightedmean")])
def test_poolings_as_flags(modes: tuple[Any, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Pooling(16, modes).save(str(tmp_path))
    settings = plain_pooling(read_json(tmp_path / "config.json"))
    assert settings == plain_pooling(settings)
    assert [flag for flag, value in settings.items() if flag.startswith("pooling_mode") and value]
    (tmp_path / "config.json").write_text(json.dumps(settings))
    loaded = Pooling.load(str(tmp_path)).pooling_mode
    assert ((loaded,) if isinstance(loaded, str) else loaded) == modes
    ordered = {"embedding_dimension": 16, "pooling_mode": ["mean", "cls"], "include_prompt": True}
    assert plain_pooling(ordered) == ordered  # which flags cannot say
    assert "read by Sentence-Transformers 5.4 and later only" in caplog.text


def test_a_model_with_a_dense_layer(tmp_path: Path) -> None:
    transformer = _saved(dense_model("bert"), tmp_path / "dense")
    transformer.max_seq_length = 13
    modules = [transformer, Pooling(16, "cls"), Dense(16, 8, activation_function=torch.nn.Tanh()), Normalize()]
    model = SentenceTransformer(modules=modules)
    model.save(str(tmp_path / "out"))
    write_plainly(tmp_path / "out", transformer.auto_model)
    read = read_as_server(tmp_path / "out")
    assert (read["pooling"], read["max_input_length"], read["dense"]) == ("cls", 13, ["2_Dense"])
    assert set(read_json(tmp_path / "out" / "2_Dense" / "config.json")) == {
        *("in_features", "out_features", "bias", "activation_function")
    }
    assert np.array_equal(SentenceTransformer(str(tmp_path / "out")).encode(TEXTS), model.encode(TEXTS))


def test_lower_case_is_in_the_tokenizer(tmp_path: Path) -> None:
    """Sentence-Transformers puts texts in lower case by a setting that servers do not read."""
    source = dense_checkpoint(tmp_path / "dense", sentence_transformers={"max_seq_length": 30})
    edit_json(source / "sentence_bert_config.json", max_seq_length=30, do_lower_case=True)
    tokenizer = read_json(source / "tokenizer.json")
    tokenizer["normalizer"]["lowercase"] = False
    (source / "tokenizer.json").write_text(json.dumps(tokenizer))
    edit_json(source / "tokenizer_config.json", do_lower_case=False)
    upper = [text.upper() for text in TEXTS]
    expected = SentenceTransformer(str(source)).encode(upper)
    write_plainly(source, dense_model("bert"))
    assert np.array_equal(SentenceTransformer(str(source)).encode(upper), expected)
    for_servers = Tokenizer.from_file(str(source / "tokenizer.json"))
    assert [for_servers.encode(text).ids for text in upper] == [for_servers.encode(text).ids for text in TEXTS]


def test_no_pooler_is_made_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Sentence-Transformers would report, at each loading, that its weights are missing."""
    source = dense_checkpoint(tmp_path / "dense", sentence_transformers={})
    for _ in range(2):
        write_plainly(source, dense_model("bert"))
    assert not caplog.messages
    assert SentenceTransformer(str(source))[0].model.pooler is None
    made = upcycle(str(source), tmp_path / "mote")  # which takes no such argument
    assert np.array_equal(
        SentenceTransformer(str(made), trust_remote_code=True).encode(TEXTS, task="clustering"),
        SentenceTransformer(str(source)).encode(TEXTS),
    )


def test_names_of_tokenizers_in_transformers_4(tmp_path: Path) -> None:
    source = dense_checkpoint(tmp_path / "dense", sentence_transformers={})
    changes = {"tokenizer_class": "TokenizersBackend", "extra_special_tokens": ["[MASK]"]}
    edit_json(source / "tokenizer_config.json", **changes)
    expected = SentenceTransformer(str(source)).encode(TEXTS)
    write_plainly(source, dense_model("bert"))
    settings = read_json(source / "tokenizer_config.json")
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert settings["additional_special_tokens"] == ["[MASK]"]
    assert "extra_special_tokens" not in settings
    assert np.array_equal(SentenceTransformer(str(source)).encode(TEXTS), expected)


ENCODE = """
import sys
import numpy as np
from sentence_transformers import SentenceTransformer
texts = sys.argv[1].split("|")
for folder in sys.argv[2:]:
    np.save(folder + "/found.npy", SentenceTransformer(folder).encode(texts))
"""


@pytest.fixture(scope="session")
def old_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Python with Sentence-Transformers 5.1 and transformers 4; MOTE_OLD_PYTHON names one that is there already."""
    if "MOTE_OLD_PYTHON" in os.environ:
        return os.environ["MOTE_OLD_PYTHON"]
    folder = tmp_path_factory.mktemp("old")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    install = [str(folder / "bin" / "python"), "-m", "pip", "install", "-q"]
    subprocess.run([*install, "torch==2.13.*"], check=True)
    subprocess.run([*install, "sentence-transformers==5.1.*", "transformers==4.57.*"], check=True)
    return install[0]


@pytest.mark.slow
def test_old_releases_compute_the_same(old_python: str, tmp_path: Path) -> None:
    names = [name for name in FAMILIES if name not in NOT_IN_TRANSFORMERS_4]
    folders = [str(exported(name, tmp_path / name)) for name in names]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    subprocess.run([old_python, "-c", ENCODE, "|".join(TEXTS), *folders], check=True, env=environment)
    for folder in folders:
        expected = SentenceTransformer(folder).encode(TEXTS)
        assert np.abs(np.load(folder + "/found.npy") - expected).max() <= 1e-6, folder
