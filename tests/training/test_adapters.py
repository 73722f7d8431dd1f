"""Adapters of PEFT in recipes: only they change, merging changes no embedding, and a killed run ends with the same."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.checkpoints import dense_checkpoint, tensors_of
from helpers.families import EXPERTS, all_families, batch, dense_model, difference, mote_config
from helpers.runs import assert_same_weights, break_off, overrides
from peft import PeftModel
from sentence_transformers import SentenceTransformer, SparseEncoder
from transformers import AutoModel

from mote import upcycle
from mote.remote.modeling_mote import MoTEModel
from mote.training.adapters import adapt, merge_adapters, network_of, share_weights, trained_weights
from mote.training.train import TrainingRun, train
from mote.training.trainer_settings import PeftSettings

LORA = "training.peft={r: 4, alpha: 8, dropout: 0.1}"
FAST = ("training.learning_rate=1e-2", "validation.share=0", "training.save_steps=100")


@pytest.fixture(scope="module")
def tiny_mote(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return upcycle(str(tiny), tmp_path_factory.mktemp("upcycled") / "mote")


def run_of(source: Path, data: Path, out: Path, *more: str) -> Any:
    return TrainingRun("mote", overrides(source, data, out, *FAST, LORA, *more)).prepare()


@pytest.mark.parametrize(
    ("targets", "adapted", "checkpointing"),
    [
        pytest.param("experts", (".experts.",), "true", marks=pytest.mark.long),
        pytest.param("shared", (".shared.",), "false", marks=pytest.mark.long),
        ("all-linear", (".experts.", ".shared."), "false"),
    ],
)
def test_only_the_adapters_change(
    targets: str, adapted: tuple[str, ...], checkpointing: str, tiny: Path, data: Path, tmp_path: Path
) -> None:
    """Bit for bit; and merged, the model embeds as before."""
    more = (f"training.peft.targets={targets}", f"training.gradient_checkpointing={checkpointing}")
    run = run_of(tiny, data, tmp_path / "run", *more)
    network = network_of(run.model)
    base = {name: weight.clone() for name, weight in network.named_parameters() if "lora_" not in name}
    start = {name: weight.clone() for name, weight in trained_weights(network).items()}
    assert {part for part in adapted if any(part in name for name in start)} == set(adapted)
    assert all("lora_" in name and any(part in name for part in adapted) for name in start)
    first, second = (network.blocks[0].experts[name] for name in ("classification", "clustering"))
    assert first.output.dense.weight is second.output.dense.weight  # the memory of one model
    run.train()
    after = dict(network.named_parameters())
    assert all(torch.equal(weight, after[name]) for name, weight in base.items())
    moved = {name for name, weight in start.items() if not torch.equal(weight, after[name])}
    trained = [f".{part}" for part in ("classification", "clustering", "search_query", "search_document")]
    assert moved
    if targets == "experts":  # two steps: experts without data stay as they were
        assert any(all(part not in name for name in moved) for part in trained)
    unmerged = run.model.encode(["a text", "another, longer text"], task="classification")
    merge_adapters(network_of(run.model))
    merged = run.model.encode(["a text", "another, longer text"], task="classification")
    assert abs(unmerged - merged).max() <= 1e-5
    assert not any("lora" in name for name, _ in network.named_parameters())
    assert len({id(weight) for weight in network.parameters()}) == len([*network.state_dict()])


@all_families
def test_experts_are_low_rank_differences_to_one_model(name: str) -> None:
    """In every family: copies are the dense model, an adapted expert is its own, and merging changes nothing."""
    dense, inputs, (one, other) = dense_model(name), batch(), EXPERTS
    config = mote_config(dense)
    config.load_only([one])
    model = MoTEModel(config, dense).eval()
    before, weights_of_one = model(**inputs, task=one).pooler_output, model.num_parameters()
    share_weights(model)
    assert model.num_parameters() == weights_of_one
    assert torch.equal(model(**inputs, task=other).pooler_output, before)
    adapt(model, PeftSettings(r=2, dropout=0))
    torch.manual_seed(3)
    for weight in trained_weights(model).values():
        weight.add_(torch.randn_like(weight) * 0.05)
    model(**inputs, task=one).pooler_output.sum().backward()
    trained = {key for key, weight in model.named_parameters() if weight.grad is not None}
    assert any(f".experts.{one}." in key for key in trained)
    assert all("lora_" in key and f".experts.{other}." not in key for key in trained)
    unmerged = [model(**inputs, task=task).pooler_output for task in EXPERTS]
    assert difference(*unmerged) > 1e-4
    merge_adapters(model)
    for task, expected in zip(EXPERTS, unmerged, strict=True):
        assert difference(model(**inputs, task=task).pooler_output, expected) <= 1e-5
    assert model.state_dict().keys() == MoTEModel(mote_config(dense_model(name))).state_dict().keys()


@pytest.mark.long
@pytest.mark.parametrize("kind", ["dense", "mote"])
def test_adapters_are_loaded_by_both_libraries(
    kind: str, tiny: Path, tiny_mote: Path, data: Path, tmp_path: Path
) -> None:
    source = tiny if kind == "dense" else tiny_mote
    settings = overrides(source, data, tmp_path / "run", *FAST, LORA, f"model.kind={kind}", "training.peft.merge=false")
    adapters = train("mote", settings)
    assert (adapters / "adapter_model.safetensors").is_file()
    assert not (adapters / "model.safetensors").exists()
    trusted = {} if kind == "dense" else {"trust_remote_code": True}
    routed = {} if kind == "dense" else {"task": "search_query"}
    loaded = SentenceTransformer(str(adapters), **trusted)
    before = SentenceTransformer(str(source), **trusted)
    text = ["a text that is embedded"]
    expected = loaded.encode(text, prompt_name="search_query")
    assert abs(expected - before.encode(text, prompt="search_query: ", **routed)).max() > 1e-4
    base = AutoModel.from_pretrained(source, **trusted)
    tokens = loaded.preprocess(text, prompt="search_query: ")
    inputs = {name: tokens[name] for name in ("input_ids", "attention_mask")}
    states = PeftModel.from_pretrained(base, adapters)(**inputs, **routed).last_hidden_state
    pooled = torch.nn.functional.normalize(states.mean(dim=1), dim=-1).detach().numpy()
    assert abs(pooled - expected).max() <= 1e-5
    assert "- peft\n" in (adapters / "README.md").read_text()


@pytest.mark.long
def test_a_resumed_run_is_bit_for_bit_the_same(
    tiny: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With dropout; the checkpoint holds the adapters alone."""
    settings = {
        name: overrides(tiny, data, tmp_path / name, LORA, "training.max_steps=4", "validation.share=0")
        for name in ("whole", "killed")
    }
    break_off(settings["killed"], monkeypatch, at=4)
    files = {path.name for path in (tmp_path / "killed/checkpoints/checkpoint-3").iterdir()}
    assert "adapters.safetensors" in files
    assert not files & {"model.safetensors", "adapter_model.safetensors"}
    assert_same_weights(train("mote", settings["killed"]), train("mote", settings["whole"]))


@pytest.mark.long
def test_only_one_expert(tiny_mote: Path, data: Path, tmp_path: Path) -> None:
    only = "tasks={topics: {anchor: clustering, batches: homogeneous, datasets: [clustering/*]}}"
    settings = overrides(tiny_mote, data, tmp_path / "run", *FAST, LORA, only, "training.only_experts=[clustering]")
    model = train("mote", settings)
    before, after = tensors_of(tiny_mote), tensors_of(model)
    moved = {key for key in after if not torch.equal(after[key], before[key])}
    assert moved
    assert all(".experts.clustering." in key for key in moved)


@pytest.mark.long
def test_modules_in_full_and_half_precision(tiny: Path, data: Path, tmp_path: Path) -> None:
    more = (
        "validation.share=0.1",
        "training.peft.arguments={modules_to_save: word_embeddings}",
        "training.peft.base_dtype=bfloat16",
        "training.bf16=true",
    )
    run = run_of(tiny, data, tmp_path / "run", "model.kind=dense", *more)
    network = network_of(run.model)
    trained = trained_weights(network)
    start = {name: weight.clone() for name, weight in trained.items()}
    assert any("word_embeddings" in name for name in trained)
    assert {weight.dtype for weight in trained.values()} == {torch.float32}
    frozen = {name: weight.dtype for name, weight in network.named_parameters() if not weight.requires_grad}
    wide = ("embeddings", "LayerNorm")
    assert all((dtype == torch.float32) == any(part in name for part in wide) for name, dtype in frozen.items())
    run.train()
    after = {name: weight.clone() for name, weight in trained_weights(network).items()}
    run.finish(run.scores())
    dense, written = tensors_of(tiny), tensors_of(tmp_path / "run/model")
    embeddings = "embeddings.word_embeddings.weight"
    assert (written[embeddings] - dense[embeddings]).abs().max() > 0.01
    for key in written.keys() - {embeddings}:  # the source as it is, not rounded, and what was learned
        one, other = (key.replace(".weight", f".lora_{part}.default.weight") for part in "AB")
        learned = after[other] @ after[one] * 2 if one in after else torch.zeros(())
        assert torch.allclose(written[key], dense[key] + learned, rtol=0, atol=1e-6), key
    assert any(not torch.equal(weight, start[name]) for name, weight in after.items() if "lora_B" in name)


@pytest.mark.long
@pytest.mark.parametrize(("recipe", "sparse_from"), [("sparse", "head"), ("hybrid", "embeddings")])
def test_a_sparse_model_stays_tied(recipe: str, sparse_from: str, data: Path, tmp_path: Path) -> None:
    """Its head and its embeddings are one weight after saving and loading; only what has adapters changes."""
    source = dense_checkpoint(tmp_path / "tiny", head="mlm")
    more = (f"retrieval.sparse_from={sparse_from}", "tasks.retrieval.batches=heterogeneous")
    settings = overrides(source, data, tmp_path / "run", *FAST, LORA, *more)
    run = TrainingRun(recipe, settings).prepare()
    network = network_of(run.model)
    adapted = {f"{name.split('.lora_')[0]}.weight" for name in trained_weights(network)}
    base = network.named_parameters(remove_duplicate=False)  # experts share theirs, and so do head and embeddings
    start = {name.replace("base_layer.", ""): weight.clone() for name, weight in base if "lora_" not in name}
    assert all("lora_" in name for name in trained_weights(network))
    run.train()
    run.finish({})
    loaded: Any = SparseEncoder(str(tmp_path / "run" / "model"), trust_remote_code=True)
    after = dict(network_of(loaded).named_parameters())
    assert after.keys() <= start.keys()
    moved = {name for name, weight in after.items() if not torch.equal(weight, start[name])}
    assert moved
    assert moved <= adapted
    if sparse_from == "head":
        assert network_of(loaded).get_output_embeddings().weight is network_of(loaded).get_input_embeddings().weight
        assert network.get_output_embeddings().weight is network.get_input_embeddings().weight


@pytest.mark.long
def test_a_new_pooling_is_trained_in_full(tiny: Path, data: Path, tmp_path: Path) -> None:
    more = ("model.pooling=latent_attention", "model.pooling_latents=4", "model.pooling_heads=2")
    run = run_of(tiny, data, tmp_path / "run", *more)
    network = network_of(run.model)
    trained = trained_weights(network)
    assert any(name.startswith("pooling.") for name in trained)
    assert not any(name.startswith("pooling.") and "lora" in name for name in trained)
    start = {name: weight.clone() for name, weight in trained.items() if name.startswith("pooling.")}
    run.train()
    assert all(not torch.equal(weight, trained_weights(network)[name]) for name, weight in start.items())
    unmerged = run.model.encode(["a text"], task="classification")
    run.finish({})
    loaded = SentenceTransformer(str(tmp_path / "run" / "model"), trust_remote_code=True)
    assert abs(unmerged - loaded.encode(["a text"], task="classification")).max() <= 1e-5


@pytest.mark.slow
def test_two_stages(data: Path, tmp_path: Path) -> None:
    """The second one makes experts of what the first has learned."""
    decoder = dense_checkpoint(tmp_path / "decoder", "mistral", sentence_transformers={"max_seq_length": 96})
    short = ("model.max_length=96", 'model.end_token="[SEP]"', "validation.share=0")
    first = train("nv-stage1", overrides(decoder, data, tmp_path / "1", *short))
    negatives = "tasks.retrieval.in_batch_negatives=true"  # the texts have none of their own
    settings = overrides(first, data, tmp_path / "2", *short, negatives)
    run = TrainingRun("nv-stage2", settings).prepare()
    backbone = network_of(run.model).backbone
    assert backbone.config.is_causal is False
    stored, experts = tensors_of(first), backbone.layers[0].experts
    for expert in experts.values():
        layer = expert.mlp.down_proj.base_layer.weight
        assert torch.equal(layer, stored["layers.0.mlp.down_proj.weight"].bfloat16())
    run.train()
    run.finish({})
    loaded = SentenceTransformer(str(tmp_path / "2" / "model"), trust_remote_code=True)
    assert loaded.encode(["a text"], prompt_name="text_matching").shape == (1, 16)
