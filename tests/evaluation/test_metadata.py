"""What MTEB is told of a model."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from helpers.checkpoints import dense_checkpoint
from helpers.processes import run_python
from hub.hub_server import HubServer

mteb = pytest.importorskip("mteb")

import mote  # noqa: E402
from mote import experts, transform, upcycle  # noqa: E402
from mote.evaluation.tasks import load_tasks  # noqa: E402


def test_a_mote(trained_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(trained_folder, tmp_path / "small-mote")
    meta = mote.model_meta(folder)
    model = mote.load(folder)
    counts = experts.parameter_counts(model)
    embeddings = model.get_input_embeddings().weight.numel()
    assert (meta.name, meta.embed_dim, meta.max_tokens) == ("local/small-mote", model.config.hidden_size, 256)
    assert (meta.n_parameters, meta.n_embedding_parameters) == (counts["total"], embeddings)
    assert meta.n_active_parameters == counts["active"] - embeddings < counts["total"] - embeddings
    assert meta.memory_usage_mb == round(4 * counts["total"] / 2**20)
    assert meta.use_instructions is True
    assert meta.similarity_fn_name == "cosine"
    assert meta.loader_kwargs["trust_remote_code"] is True
    prompts = meta.loader_kwargs["model_prompts"]
    texts = [prompts[name] for name in ("query", "Clustering", "STS")]
    assert texts == ["search_query: ", "clustering: ", "classification: "]
    assert "clustering" not in prompts  # which MTEB would warn of
    assert str(tmp_path) not in json.dumps(meta.to_dict())  # what results say names no path of this machine
    again = mote.model_meta(str(folder))
    assert (again.revision, hash(again)) == (meta.revision, hash(meta))
    assert type(meta).model_validate(dict(meta)) == meta


def test_its_dense_source_has_as_many_active_parameters(tmp_path: Path) -> None:
    settings: Any = {"pooling": "cls", "normalize": True}
    source = dense_checkpoint(tmp_path / "dense", sentence_transformers=settings)
    dense: Any = mote.model_meta(source)
    routed: Any = mote.model_meta(upcycle(str(source), tmp_path / "mote", paper_instructions=True))
    tokens: Any = mote.model_meta(upcycle(str(source), tmp_path / "routed", routing="token"))
    pooler = 16 * 16 + 16  # which a MoTE does not have
    assert dense.n_active_parameters == routed.n_active_parameters + pooler
    assert dense.n_parameters < routed.n_parameters
    assert (dense.loader_kwargs, dense.use_instructions) == ({}, False)
    assert dense.n_active_parameters < tokens.n_active_parameters < tokens.n_parameters
    expert = mote.model_meta(transform(tmp_path / "mote", tmp_path / "expert", experts.export, "clustering"))
    assert (expert.n_parameters, expert.embed_dim) == (dense.n_parameters, dense.embed_dim)
    assert "trust_remote_code" not in expert.loader_kwargs
    assert expert.loader_kwargs["model_prompts"]["Clustering"] == "clustering: "


@pytest.mark.filterwarnings("ignore")  # mteb's own: its result format, unknown prompt names
def test_mteb_scores_with_it_and_records_it(trained_folder: Path, data: Path, tmp_path: Path) -> None:
    meta = mote.model_meta(trained_folder)
    how: dict[str, Any] = {"cache": mteb.ResultCache(tmp_path), "show_progress_bar": False, "co2_tracker": False}
    results = mteb.evaluate(meta, load_tasks(data, ["part0"]), **how)
    assert results.model_name == meta.name
    assert 0 < results.task_results[0].get_score() < 1
    (recorded,) = tmp_path.rglob("model_meta.json")
    found = json.loads(recorded.read_text())
    for name in ("name", "revision", "n_parameters", "n_active_parameters_override", "embed_dim", "max_tokens"):
        assert found[name] == getattr(meta, name) != None  # noqa: E711
    assert found["use_instructions"] is True


LOAD = """
import sys
import mote

meta = mote.model_meta("me/small-mote")
assert meta.name == "me/small-mote", meta.name
assert meta.revision == sys.argv[1], meta.revision
assert meta.reference == "https://huggingface.co/me/small-mote"
assert meta.embed_dim and meta.max_tokens and meta.n_active_parameters
model = meta.load_model(device="cpu")
print(model.model[0].config.experts)
"""


@pytest.mark.processes
def test_from_the_hub_without_a_question(trained_folder: Path, tmp_path: Path) -> None:
    with HubServer() as server:
        commit = server.add_repo("me/small-mote", trained_folder)
        done = run_python(LOAD, commit, cwd=tmp_path, environment=server.environment(tmp_path))
    assert "custom code" not in done.stdout + done.stderr
    assert done.stdout.startswith("['classification', ")
