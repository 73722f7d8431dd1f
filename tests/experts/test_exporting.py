"""One expert as a plain dense model, in torch and in the runtimes for CPUs."""

import signal
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from helpers.checkpoints import edit_json, files_in, read_json, tiny_tokenizer, trusted
from helpers.families import all_families, batch, trained_mote
from helpers.kills import stop_everywhere
from helpers.on_disk import export
from sentence_transformers import SentenceTransformer
from transformers import AutoModel

from mote import upcycle
from mote.checkpoints.provenance import read_steps
from mote.cli import main
from mote.remote.configuration_mote import PAPER_INSTRUCTIONS
from mote.remote.modeling_mote import MoTEModel

EXPERTS = list(PAPER_INSTRUCTIONS)
TEXTS = ["whales breathe air", "a recipe for bread", "a"]


def run(source: Path, out: Path, *options: str, expert: str = "clustering") -> int:
    return main(["export", str(source), "--out", str(out), "--expert", expert, *options])


@all_families
def test_the_folder_loads_without_code_and_is_exact(name: str, tmp_path: Path) -> None:
    mote = trained_mote(name)
    mote.save_pretrained(tiny_tokenizer(tmp_path / "mote"))
    config, attention = tmp_path / "mote" / "config.json", mote.backbone.config._attn_implementation
    asked = {"output_attentions": True, "return_dict": False}  # as a source's config may
    edit_json(config, backbone_config={**read_json(config)["backbone_config"], **asked})
    mote = MoTEModel.from_pretrained(config.parent, attn_implementation=attention).eval()
    for expert in ("alpha", "beta"):
        out = export(tmp_path / "mote", tmp_path / expert, expert=expert)
        assert not [file for file in files_in(out) if file.endswith(".py")]
        assert "auto_map" not in read_json(out / "config.json")
        dense = AutoModel.from_pretrained(out, attn_implementation=attention).eval()
        assert type(dense).__module__.startswith("transformers.")
        with torch.no_grad():
            expected = mote(**batch(), task=expert).last_hidden_state
            assert dense(**batch(), return_dict=True).last_hidden_state.equal(expected)
            assert mote(**batch(), task=expert, return_dict=False)[0].equal(expected)


def test_a_token_routed_expert(trained_hierarchical: Path, token_routed: Path, tmp_path: Path) -> None:
    out = export(trained_hierarchical, tmp_path / "out", expert="search_query")
    mote, routed = trusted(trained_hierarchical), trusted(out)
    assert type(routed[0].model).__name__ == "TokenRoutedModel"
    for model in (mote, routed):  # a mapped file begins at any multiple of 8, on which grouped_mm's last bit depends
        model.load_state_dict({key: weight.clone() for key, weight in model.state_dict().items()}, assign=True)
    with torch.no_grad():
        expected = mote[0].model(**batch(), task="search_query").last_hidden_state
        assert routed[0].model(**batch()).last_hidden_state.equal(expected)
    assert np.array_equal(routed.encode(TEXTS), mote.encode(TEXTS, prompt_name="search_query"))
    assert np.array_equal(routed.encode_query(TEXTS), mote.encode_query(TEXTS))
    assert routed[0].config.tasks == {"search_query": "search_query", "query": "search_query"}
    assert "a **token router** made of the expert `search_query`" in " ".join((out / "README.md").read_text().split())
    with pytest.raises(ValueError, match="architecture could not be converted to onnx"):
        export(trained_hierarchical, tmp_path / "onnx", expert="clustering", backend="onnx")
    with pytest.raises(ValueError, match="A token-routed model has no experts for tasks"):
        export(token_routed, tmp_path / "onnx", expert="clustering")
    assert not (tmp_path / "onnx").exists()


def test_encode_without_a_prompt_is_that_of_the_task(trained_folder: Path, tmp_path: Path) -> None:
    mote = trusted(trained_folder)
    for expert in ("clustering", "search_query"):
        dense = SentenceTransformer(str(export(trained_folder, tmp_path / expert, expert=expert)))
        expected = mote.encode(TEXTS, prompt_name=expert)
        assert np.array_equal(dense.encode(TEXTS), expected)
        assert np.array_equal(dense.encode(TEXTS, prompt_name=expert), expected)
        assert np.array_equal(dense.encode(TEXTS, prompt=""), mote.encode(TEXTS, task=expert))
        assert not np.allclose(mote.encode(TEXTS, prompt_name="classification"), expected, atol=1e-3)
        assert [type(module).__name__ for module in dense] == ["Transformer", "Pooling", "Normalize"]
        assert dense.max_seq_length == mote.max_seq_length
        of_role = dense.encode_document(TEXTS)  # which neither expert serves: it has their instruction
        assert np.array_equal(of_role, expected)


def test_the_type_of_the_weights_stays_and_others_are_not_read(dense: Path, tmp_path: Path, monkeypatch: Any) -> None:
    upcycle(str(dense), tmp_path / "mote", dtype="bfloat16")
    load = Mock(wraps=MoTEModel.from_pretrained)
    monkeypatch.setattr(MoTEModel, "from_pretrained", load)
    exported = AutoModel.from_pretrained(export(tmp_path / "mote", tmp_path / "out", expert="clustering"))
    assert exported.dtype == torch.bfloat16
    assert [call.kwargs["experts"] for call in load.call_args_list] == [["clustering"]]


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
    card = (tmp_path / "search_query" / "README.md").read_text()
    assert "| `query` | `search_query: ` |" in card
    assert "clustering: " not in card
    assert "prompt_name=" not in card


def test_an_expert_without_an_instruction(dense: Path, tmp_path: Path) -> None:
    upcycle(str(dense), tmp_path / "mote", experts=["a", "b"], instructions={"b": "b: "})
    out = export(tmp_path / "mote", tmp_path / "out", expert="a")
    settings = read_json(out / "config_sentence_transformers.json")
    assert settings["default_prompt_name"] is None
    assert settings["prompts"] == {"a": "", "query": "", "document": ""}
    assert "is put in front of each text" not in (out / "README.md").read_text()
    mote = trusted(tmp_path / "mote")
    assert np.array_equal(SentenceTransformer(str(out)).encode(TEXTS), mote.encode(TEXTS, task="a"))


def test_the_command(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(trained, tmp_path / "out", "--quantize", "int8") == 1
    assert "quantize is for other backends" in capsys.readouterr().err
    assert run(trained, tmp_path / "out") == 0
    printed = capsys.readouterr().out
    assert f'Wrote {tmp_path / "out"}\nSentenceTransformer("{tmp_path / "out"}")' in printed
    assert run(trained, tmp_path / "out", "--overwrite", expert="search_query") == 0
    assert read_steps(tmp_path / "out")[-1]["settings"] == {"name": "search_query"}


@pytest.mark.processes
def test_files_that_cannot_grow(trained: Path, tmp_path: Path) -> None:
    out = tmp_path / "place" / "out"
    for result in stop_everywhere(out, "export", trained, "--out", out, "--expert", "clustering", how="file size"):
        assert (result.status, result.out, result.left) == (1, "absent", [])
        assert "could not be written, nothing was left behind" in result.printed


@pytest.mark.processes
def test_killed_at_any_moment(trained: Path, tmp_path: Path) -> None:
    out = tmp_path / "place" / "out"
    killed = stop_everywhere(out, "export", trained, "--out", out, "--expert", "clustering")
    assert {result.status for result in killed} == {-signal.SIGKILL}
    assert {result.out for result in killed} <= {"absent", "new"}
