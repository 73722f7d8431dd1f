"""Pooling by attention: its mathematics, in Transformers and Sentence-Transformers, with masks, in half precision."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.attention_pooling import states_by_hand
from helpers.checkpoints import dense_checkpoint, files_in, read_json, trusted
from helpers.families import batch, difference, make_different, rows_of
from sentence_transformers import SentenceTransformer
from transformers import AutoModel

import mote
from mote import upcycle
from mote.training.memory import estimate_memory

SIZES: dict[str, Any] = {"pooling_latents": 6, "pooling_heads": 2, "pooling_head_dim": 5}
LATENT: dict[str, Any] = {"pooling": "latent_attention", **SIZES}
SELF: dict[str, Any] = {"pooling": "self_attention", "pooling_heads": 3}
TEXTS = ["a b c", "dd e f g h", "i"]
EXPERTS = ["alpha", "beta"]
FILES = {"attention_pooling_mote.py"}

kinds = pytest.mark.parametrize("kind", ["latent_attention", "self_attention"])


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A decoder in both directions with one kind, an encoder with the other; experts and pooling differ from fresh."""
    folder, made = tmp_path_factory.mktemp("pooled"), {}
    for name, settings in {"mistral": {**LATENT, "bidirectional": True}, "bert": SELF}.items():
        source = dense_checkpoint(folder / name, name)
        fresh = upcycle(source, folder / f"fresh-{name}", experts=EXPERTS, instructions={"beta": "b: "}, **settings)
        model = trusted(fresh)
        make_different(model[0].model)
        torch.manual_seed(4)
        with torch.no_grad():
            for weight in model[0].model.pooling.parameters():
                weight.add_(torch.randn_like(weight) * 0.3)
        model.save(str(folder / f"saved-{name}"))
        made[settings["pooling"]] = folder / f"saved-{name}"
    return made


def bare(folder: Path, **settings: Any) -> Any:
    return AutoModel.from_pretrained(folder, trust_remote_code=True, **settings)


@kinds
def test_its_mathematics(kind: str, saved: dict[str, Path]) -> None:
    model = bare(saved[kind])
    inputs = batch()
    chosen = inputs["attention_mask"].clone()
    chosen[:, 0] = inputs["attention_mask"].sum(dim=1) == 1  # all but the first token, unless it is the only one
    with torch.no_grad():
        out = model(**inputs, task="alpha", pooling_mask=chosen)
        all_pooled = model(**inputs, task="alpha").pooler_output
    assert difference(out.pooler_output, all_pooled) > 1e-2
    for row, (hidden, mask) in enumerate(zip(out.last_hidden_state, inputs["attention_mask"], strict=True)):
        states = states_by_hand(model.pooling.state_dict(), hidden, mask, model.config.pooling_heads)
        for vectors, pooled in ((all_pooled, mask), (out.pooler_output, chosen[row])):
            assert difference(vectors[row].double(), states[pooled.bool()].mean(dim=0)) <= 1e-5


@kinds
def test_sentence_transformers_pools_by_the_same_layer(kind: str, saved: dict[str, Path], tmp_path: Path) -> None:
    model = trusted(saved[kind])
    assert (type(model[1]).__name__, model.get_embedding_dimension()) == ("AttentionPooling", 16)
    assert sum(weight.numel() for weight in model[1].parameters()) == 0
    vectors = model.encode(TEXTS, task="beta", convert_to_tensor=True)
    inputs = model.tokenizer(TEXTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        expected = bare(saved[kind])(inputs["input_ids"], inputs["attention_mask"], task="beta").pooler_output
    assert difference(expected, vectors) <= 1e-6
    model.save(str(tmp_path))
    assert torch.equal(trusted(tmp_path).encode(TEXTS, task="beta", convert_to_tensor=True), vectors)
    assert files_in(tmp_path) >= FILES


@kinds
def test_batches_of_several_tasks_and_padding(kind: str, saved: dict[str, Path]) -> None:
    model = bare(saved[kind])
    inputs, tasks = batch(rows=3), ["beta", "alpha", "beta"]
    chosen = inputs["attention_mask"].clone()
    chosen[:, :2] = 0
    with torch.no_grad():
        mixed = model(**inputs, task=tasks, pooling_mask=chosen).pooler_output
        for row, task in enumerate(tasks):
            one = rows_of({**inputs, "pooling_mask": chosen}, row)
            assert difference(model(**one, task=task).pooler_output[0], mixed[row]) <= 1e-5
        if model.config.backbone_config.model_type == "mistral":  # BERT's positions are absolute
            right = {**inputs, "pooling_mask": chosen}
            left = {name: torch.stack([value[0], value[1].roll(2), value[2].roll(4)]) for name, value in right.items()}
            found, expected = (model(**one, task="alpha").pooler_output for one in (left, right))
            assert difference(found, expected) <= 1e-5


@kinds
def test_a_row_without_a_token_to_pool_is_an_error(kind: str, saved: dict[str, Path]) -> None:
    model, inputs = bare(saved[kind]), batch(rows=3)
    chosen = inputs["attention_mask"].clone()
    chosen[1] = 0
    pipeline = trusted(saved[kind])
    pipeline[1].include_prompt = False
    for call in (
        lambda: model(**inputs, task="alpha", pooling_mask=chosen),
        lambda: model(input_ids=inputs["input_ids"], attention_mask=chosen, task="alpha"),
        lambda: pipeline({**inputs, "route": "alpha", "pooling_mask": chosen}),
        lambda: pipeline({**inputs, "route": "alpha", "prompt_length": 7}),
    ):
        with pytest.raises(ValueError, match=r"No token to pool in the rows \[1"):
            call()


def pooled_without_prompt(model: SentenceTransformer, folder: Path) -> torch.Tensor:
    """Embeddings of "b: " and each text, by the model alone, where the text's tokens and [SEP] are pooled."""
    tokens = model.tokenizer(["b: " + text for text in TEXTS], padding=True, return_tensors="pt")
    chosen = tokens["attention_mask"].clone()
    chosen[:, :3] = 0  # [CLS] b :
    with torch.no_grad():
        return bare(folder)(
            tokens["input_ids"], tokens["attention_mask"], task="beta", pooling_mask=chosen
        ).pooler_output


@pytest.mark.long
@pytest.mark.parametrize("exactly", [False, True])
def test_instructions_are_left_out(exactly: bool, saved: dict[str, Path], dense: Path, tmp_path: Path) -> None:
    """As the library does, of all rows at once, or exactly, see `test_instruction.py`."""
    folder = saved["latent_attention"]
    if exactly:
        settings = {**SELF, "experts": EXPERTS, "instructions": {"beta": "b: "}, "instruction_pooling": "excluded"}
        folder = upcycle(dense, tmp_path / "out", **settings)
    model = trusted(folder)
    if not exactly:
        whole = model.encode(TEXTS, prompt="b: ", convert_to_tensor=True)
        model.set_pooling_include_prompt(False)
        assert difference(whole, model.encode(TEXTS, prompt="b: ", convert_to_tensor=True)) > 1e-3
    vectors = model.encode(TEXTS, prompt="b: ", convert_to_tensor=True)
    assert difference(vectors, pooled_without_prompt(model, folder)) <= 1e-6
    model.save(str(tmp_path / "saved"))
    again = trusted(tmp_path / "saved")
    assert [type(module).__name__ for module in again][-1] == "AttentionPooling"
    assert torch.equal(again.encode(TEXTS, prompt="b: ", convert_to_tensor=True), vectors)


@kinds
def test_half_precision_pools_in_float32(kind: str, saved: dict[str, Path]) -> None:
    inputs = batch(rows=3, length=40)
    half = bare(saved[kind], dtype=torch.bfloat16)
    with torch.no_grad():
        out = half(**inputs, task="alpha")
    assert half.pooling.to_q.weight.dtype == out.pooler_output.dtype == torch.bfloat16
    assert half.pooling(out.last_hidden_state, inputs["attention_mask"]).dtype == torch.float32
    for hidden, mask, found in zip(out.last_hidden_state, inputs["attention_mask"], out.pooler_output, strict=True):
        states = states_by_hand(half.pooling.state_dict(), hidden, mask, half.config.pooling_heads)
        exact = states[mask.bool()].mean(dim=0)
        assert difference(found.double(), exact) <= exact.abs().max() * 2**-7  # bfloat16 has 8 bits


@kinds
def test_every_weight_is_trained_and_counted(kind: str, saved: dict[str, Path]) -> None:
    model = trusted(saved[kind]).train()
    model(model.preprocess(TEXTS, task="alpha"))["sentence_embedding"].square().sum().backward()
    assert all(weight.grad.abs().sum() > 0 for weight in model[0].model.pooling.parameters())
    estimate = estimate_memory(model[0].model, batch_size=4, length=8)
    assert estimate.weights == sum(weight.nbytes for weight in model[0].model.parameters())
    assert estimate.activations > 0


@pytest.mark.long
def test_verbs_keep_the_pooling_or_refuse(saved: dict[str, Path], tmp_path: Path) -> None:
    source = saved["latent_attention"]
    with torch.no_grad():
        expected = bare(source)(**batch(), task="beta").pooler_output
    folder = mote.transform(source, tmp_path / "added", mote.experts.add, "gamma", "beta")
    folder = mote.transform(folder, tmp_path / "removed", mote.experts.remove, "alpha")
    with torch.no_grad():
        assert torch.equal(bare(folder)(**batch(), task="gamma").pooler_output, expected)
    assert files_in(folder) >= FILES
    verbs: list[tuple[Any, dict[str, Any]]] = [
        (mote.experts.export, {"name": "beta"}),
        (mote.experts.average, {}),
        (mote.experts.compress, {"rank": 2}),
    ]
    for verb, arguments in verbs:
        with pytest.raises(ValueError, match=r"Unknown pooling .*'latent_attention'"):
            mote.transform(source, tmp_path / "out", verb, **arguments)
    assert not (tmp_path / "out").exists()


@pytest.mark.long
def test_streamed_and_built_in_memory(tmp_path: Path) -> None:
    for name, dtype in {"bin": "bfloat16", "safetensors": "float32"}.items():
        source = dense_checkpoint(tmp_path / name, "bert", format=name)
        folder = upcycle(str(source), tmp_path / f"{name}-out", dtype=dtype, **LATENT)
        model = bare(folder)
        assert {weight.dtype for weight in model.pooling.parameters()} == {getattr(torch, dtype)}
        settings = read_json(folder / "config.json")
        assert {key: settings[key] for key in LATENT} == LATENT
        assert 0.7 < model.pooling.latents.float().std() < 1.3
