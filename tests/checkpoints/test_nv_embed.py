"""NV-Embed in its published format: every tensor, exactly, or an error that names what does not fit."""

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.attention_pooling import states_by_hand
from helpers.checkpoints import edit_json, llama_tokenizer, published_nv_embed, read_json, tensors_of
from helpers.families import dense_model, difference
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from transformers import AutoModel

from mote import upcycle
from mote.checkpoints import nv_embed
from mote.checkpoints.reading import open_checkpoint, open_mote
from mote.upcycling.plan import plan_upcycling

QUERY = "Instruct: Given a question, retrieve passages that answer the question\nQuery: "
LATENTS = "latent_attention_model.latents"
INDEX = "model.safetensors.index.json"
TO_Q = "latent_attention_model.cross_attend_blocks.0.fn.to_q.weight"


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return published_nv_embed(tmp_path_factory.mktemp("published") / "nv-embed")


@pytest.fixture(scope="module")
def converted(published: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return upcycle(str(published), tmp_path_factory.mktemp("converted") / "mote")


def reference(folder: Path, input_ids: torch.Tensor, pooled: slice) -> torch.Tensor:
    """The published weights in a native Mistral without a window, the pooling by hand: one row → its unit vector."""
    tensors = tensors_of(folder)
    settings = read_json(folder / "config.json")["text_config"]
    known = {key: settings[key] for key in settings.keys() - {"model_type", "rope_theta", "sliding_window"}}
    model = dense_model("mistral", **known, sliding_window=None, is_causal=False)
    prefix = "embedding_model."
    model.load_state_dict({key.removeprefix(prefix): one for key, one in tensors.items() if key.startswith(prefix)})
    with torch.no_grad():
        hidden = model(input_ids=input_ids[None]).last_hidden_state[0]
    weights = {ours.removeprefix("pooling."): tensors[theirs] for ours, theirs in nv_embed.POOLING_WEIGHTS.items()}
    states = states_by_hand(weights, hidden, torch.ones(len(input_ids)), 2)
    return torch.nn.functional.normalize(states[pooled].mean(dim=0), dim=0).float()


def test_queries_and_passages(published: Path, converted: Path) -> None:
    model = SentenceTransformer(str(converted), trust_remote_code=True)
    texts = [QUERY + "is it so?", "it is so", "a" * 200]
    tokens = model.tokenizer(texts, truncation=True, max_length=128)["input_ids"]
    query, passage, long = (torch.tensor(one) for one in tokens)
    for ids in (query, passage, long):
        assert (ids[0], ids[-1]) == (1, 2)  # <s> … </s>, also of a truncated text
    assert len(long) == 128
    whole = slice(None)
    text = slice(len(query) - 1 - len("is it so?"), None)  # one token for each character, and </s>
    found = model.encode_query("is it so?", convert_to_tensor=True)
    assert difference(found, reference(published, query, text)) <= 1e-5
    for words, ids in (("it is so", passage), ("a" * 200, long)):
        expected = reference(published, ids, whole)
        assert difference(model.encode_document(words, convert_to_tensor=True), expected) <= 1e-5
        assert difference(model.encode(words, convert_to_tensor=True), expected) <= 1e-5
    bare = AutoModel.from_pretrained(converted, trust_remote_code=True)
    with torch.no_grad():
        out = bare(input_ids=passage[None]).pooler_output[0]  # its only expert is the default
    assert difference(torch.nn.functional.normalize(out, dim=0), reference(published, passage, whole)) <= 1e-5


def test_every_tensor_is_used(published: Path, converted: Path) -> None:
    before, after = tensors_of(published), tensors_of(converted)
    assert len(before) == len(after)
    first, second = (sum(one.double().sum() for one in tensors.values()) for tensors in (before, after))
    assert first == pytest.approx(second)
    assert torch.equal(after["pooling.latents"], before[LATENTS])


def test_what_it_carries(published: Path, converted: Path, tmp_path: Path) -> None:
    config: Any = open_mote(str(converted)).config
    assert (config.experts, config.default_task, config.pooling_latents) == (["text"], "text", 6)
    assert (config.backbone_config.is_causal, config.backbone_config.sliding_window) == (False, None)
    assert [config.instruction_of(task) for task in ("text", "query", "document")] == ["", QUERY, ""]
    model = SentenceTransformer(str(converted), trust_remote_code=True)
    assert [type(one).__name__ for one in model] == ["InstructedMoTETransformer", "AttentionPooling", "Normalize"]
    assert (model.max_seq_length, model.tokenizer.padding_side) == (128, "right")
    fever = "Instruct: find facts\nQuery: "
    assert (model.prompts["FEVER"], model.prompts["FEVER-document"], model.prompts["query"]) == (fever, "", QUERY)
    assert (model.encode("a", prompt_name="FEVER") != model.encode("a")).any()
    card = (converted / "README.md").read_text()
    assert "license: cc-by-nc-4.0" in card
    assert "converted from" in card
    assert "Not trained yet" not in card
    bare = upcycle(str(published_nv_embed(tmp_path / "bare", files=False)), tmp_path / "out")
    again = SentenceTransformer(str(bare), trust_remote_code=True)
    assert (again.max_seq_length, type(again[-1]).__name__) == (4096, "Normalize")
    assert difference(*(one.encode("a b", convert_to_tensor=True) for one in (model, again))) == 0.0
    assert "license: cc-by-nc-4.0" in (bare / "README.md").read_text()


@pytest.mark.long
def test_task_experts_begin_as_the_model_as_published(published: Path, converted: Path, tmp_path: Path) -> None:
    experts = ["search_query", "search_document", "clustering"]
    folder = upcycle(str(published), tmp_path / "experts", experts=experts)
    model, dense = (SentenceTransformer(str(one), trust_remote_code=True) for one in (folder, converted))
    for encode in ("encode_query", "encode_document"):
        vectors = [getattr(one, encode)(["a b", "so it is"], convert_to_tensor=True) for one in (model, dense)]
        assert torch.equal(*vectors)
    assert model[0].config.experts == experts
    assert "FEVER" not in model.prompts  # it would be no expert's
    assert "Not trained yet" in (folder / "README.md").read_text()


def test_sizes_that_the_config_leaves_out() -> None:
    settings = {"text_config": {}, "latent_attention_config": {"model_type": "latent_attention"}}
    shapes = {LATENTS: (512, 4096), TO_Q: (8 * 4096, 4096)}
    found = nv_embed.pooling_settings(settings, shapes, "nvidia/NV-Embed-v2")
    sizes = {"pooling_latents": 512, "pooling_heads": 8, "pooling_head_dim": 4096}
    assert found == {"pooling": "latent_attention", **sizes}
    settings["latent_attention_config"] = {"output_normalize": False}
    with pytest.raises(ValueError, match=r"has output_normalize=False; MoTE can express True only"):
        nv_embed.pooling_settings(settings, shapes, "nvidia/NV-Embed-v2")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (LATENTS, None, r"lack 1 keys of MistralModel: .*\.latents"),
        ("latent_attention_model.scale", torch.zeros(1), r"hold unknown 1 keys of MistralModel: .*\.scale"),
        ("embedding_model.layers.1.mlp.up_proj.weight", None, r"lack 1 keys of MistralModel: layers\.1\.mlp\.up_proj"),
    ],
)
def test_weights_that_do_not_fit_are_refused(
    key: str, value: torch.Tensor | None, message: str, tmp_path: Path
) -> None:
    folder = published_nv_embed(tmp_path / "nv-embed", files=False)
    file = folder / read_json(folder / INDEX)["weight_map"].get(key, "model-00001-of-00002.safetensors")
    weights = {name: one for name, one in {**load_file(file), key: value}.items() if one is not None}
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=message):
        upcycle(str(folder), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("option", [{"pooling": "mean"}, {"pooling_heads": 3}, {"routing": "token"}])
def test_what_cannot_be_chosen(option: dict[str, Any], published: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot be chosen, .* whose weights are in its files"):
        plan_upcycling(str(published), **option)
    with pytest.raises(ValueError, match=f"is not a MoTE but a 'nv_embed': `mote upcycle --src {published}`"):
        open_checkpoint(str(published))


COMPARE = """
import sys, torch
from safetensors.torch import load_file
from sentence_transformers import SentenceTransformer
from transformers import AutoModel

folder, expected, attention = sys.argv[1], load_file(sys.argv[2]), sys.argv[3]
model = AutoModel.from_pretrained(folder, trust_remote_code=True, attn_implementation=attention).eval()
pipeline = SentenceTransformer(folder, trust_remote_code=True, model_kwargs={"attn_implementation": attention})
scored = []
for side, task in (("query", "query"), ("passage", "document")):
    name = {each: expected[f"{side}.{each}"] for each in ("input_ids", "attention_mask")}
    mask, real = expected[f"{side}.pool_mask"], name["attention_mask"].bool()
    with torch.no_grad():
        out = model(**name, task=task, pooling_mask=mask, output_hidden_states=True)
        last = out.last_hidden_state
        found = {f"hidden_states.{index}": state for index, state in enumerate(out.hidden_states)}
        found |= {"last_hidden_state": last, "after_cross_attention": model.pooling.attend(last)}
        found["after_latent_attention"] = model.pooling(last)
        of_pipeline = pipeline({**name, "route": task, "pooling_mask": mask})["sentence_embedding"]
    for key, value in found.items():
        print((value - expected[f"{side}.{key}"])[real].abs().max().item())
    for vectors in (torch.nn.functional.normalize(out.pooler_output), of_pipeline):
        print((vectors - expected[f"{side}.sentence_embeddings"]).abs().max().item())
    scored.append(of_pipeline)
print((scored[0] @ scored[1].T * 100 - expected["scores_x100"]).abs().max().item() / 100)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("experts", "attention"), [(None, "sdpa"), (None, "eager"), (["search_query", "search_document"], "sdpa")]
)
def test_the_original(shared: Path, experts: list[str] | None, attention: str, tmp_path: Path) -> None:
    """In a process of its own, which has nothing but the folder; also after a text is longer than the window."""
    fixture = shared / "fixtures/nv-embed-original"
    narrow = shutil.copytree(fixture, tmp_path / "narrow")
    decoder = read_json(narrow / "config.json")["text_config"]
    edit_json(narrow / "config.json", text_config={**decoder, "sliding_window": 4})
    tokenizer = str(llama_tokenizer(tmp_path / "tokenizer"))
    for source in (fixture, narrow):
        out = upcycle(str(source), tmp_path / f"mote-{source.name}", tokenizer=tokenizer, experts=experts)
        saved = tmp_path / f"saved-{source.name}"
        SentenceTransformer(str(out), trust_remote_code=True).save(str(saved))
        for folder in (out, saved) if source == fixture else (out,):
            words = [str(folder), str(fixture / "expected.safetensors"), attention]
            command = [sys.executable, "-P", "-c", COMPARE, *words]
            run = subprocess.run(command, capture_output=True, text=True, check=True)
            differences = [float(line) for line in run.stdout.splitlines()]
            assert len(differences) == 2 * (4 + 3 + 2) + 1
            assert max(differences) <= 1e-5
