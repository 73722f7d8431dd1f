"""Decoders in both directions: the first token sees the last, in every family and attention, alone and in a batch."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.checkpoints import dense_checkpoint
from helpers.families import VOCAB_SIZE, dense_model, difference, family, mote_config
from transformers import AttentionInterface, AttentionMaskInterface, AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

from mote import upcycle
from mote.checkpoints.bidirectional import DECODERS, make_bidirectional
from mote.checkpoints.reading import open_checkpoint
from mote.remote.modeling_mote import MoTEModel
from mote.upcycling.plan import plan_upcycling

WINDOW = 4
LENGTH = 12  # longer than the window
SLIDING: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": WINDOW},
    "qwen2": {"sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 1},
    "qwen3": {"sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 1},
}  # gemma's are windowed in `FAMILIES`, llama has no window

decoders = pytest.mark.parametrize("name", [family(name, name in ("mistral", "gemma3_text")) for name in DECODERS])


def settings_of(name: str) -> dict[str, Any]:
    return {"max_position_embeddings": 64, **SLIDING.get(name, {})}


def mote(name: str, attention: str = "sdpa", both: bool = True) -> MoTEModel:
    dense = dense_model(name, attention, **settings_of(name))
    if both:
        weights = dense.state_dict()
        dense = AutoModel.from_config(
            make_bidirectional(dense.config, name), attn_implementation=dense.config._attn_implementation
        ).eval()
        dense.load_state_dict(weights)
    return MoTEModel(mote_config(dense), dense).eval()


def first_state(model: PreTrainedModel, last_token: int, **inputs: Any) -> torch.Tensor:
    tokens = torch.arange(10, 10 + LENGTH)[None]
    tokens[0, -1] = last_token
    with torch.no_grad():
        out: torch.Tensor = model(input_ids=tokens, **inputs).last_hidden_state[0, 0]
    return out


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@decoders
def test_the_first_token_sees_the_last(name: str, attention: str, tmp_path: Path) -> None:
    causal, both = mote(name, attention, both=False), mote(name, attention)
    both.save_pretrained(tmp_path)
    loaded = MoTEModel.from_pretrained(tmp_path, attn_implementation=both.backbone.config._attn_implementation)
    for padding in ({}, {"attention_mask": torch.ones(1, LENGTH, dtype=torch.long)}):
        for model in (both, loaded):
            changed = [first_state(model, token, task="alpha", **padding) for token in (30, 31)]
            assert difference(*changed) > 1e-3
        assert difference(*(first_state(causal, token, task="alpha", **padding) for token in (30, 31))) == 0.0
    assert loaded.config.backbone_config.is_causal is False
    assert loaded.config.backbone_config.use_cache is False


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@decoders
def test_padding_and_batches_change_nothing(name: str, attention: str) -> None:
    model = mote(name, attention)
    generator = torch.Generator().manual_seed(3)
    texts = [torch.randint(5, VOCAB_SIZE, (length,), generator=generator) for length in (LENGTH, 3, 7)]
    alone = [model(input_ids=text[None], task="beta").pooler_output[0] for text in texts]
    for side in ("left", "right"):
        rows = torch.zeros(2, 3, LENGTH, dtype=torch.long)  # tokens, mask
        for index, text in enumerate(texts):
            place = slice(LENGTH - len(text), None) if side == "left" else slice(len(text))
            rows[:, index, place] = torch.stack([text, torch.ones_like(text)])
        inputs = {"input_ids": rows[0], "attention_mask": rows[1]}
        together = model(**inputs, task="beta").pooler_output
        mixed = model(**inputs, task=["beta", "alpha", "beta"]).pooler_output
        assert difference(together, torch.stack(alone)) <= 1e-5
        assert difference(mixed, torch.stack(alone)) <= 1e-5  # the experts are copies


@decoders
def test_the_window_is_gone_and_positions_are_not(name: str) -> None:
    """As the same weights in a model that never had a window; gemma3's windowed layers keep their rotary positions."""
    model = mote(name)
    wide = {"sliding_window": 64} if name.startswith("gemma") else {**SLIDING.get(name, {}), "sliding_window": 64}
    wide = {} if name == "llama" else wide
    dense = dense_model(name, **{**settings_of(name), **wide}, is_causal=False)
    tokens = torch.arange(10, 10 + LENGTH)[None]
    with torch.no_grad():
        expected = dense(input_ids=tokens).last_hidden_state
        assert difference(model(input_ids=tokens, task="alpha").last_hidden_state, expected) <= 1e-6
        if name != "llama":
            windowed = dense_model(name, **settings_of(name), is_causal=False)
            assert difference(windowed(input_ids=tokens).last_hidden_state, expected) > 1e-3


@decoders
def test_what_flash_attention_is_told(name: str) -> None:
    """It has no mask to go by, but these two arguments."""
    told: list[tuple[Any, Any]] = []

    def spy(*args: Any, is_causal: Any = None, sliding_window: Any = None, **kwargs: Any) -> Any:
        told.append((is_causal, sliding_window))
        kwargs.pop("softcap", None)
        return sdpa_attention_forward(*args, is_causal=is_causal, **kwargs)

    AttentionInterface.register("spy", spy)
    AttentionMaskInterface.register("spy", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    model = mote(name, "eager")
    model.set_attn_implementation("spy")
    first_state(model, 30, task="alpha")
    assert len(told) == model.config.num_hidden_layers
    assert all(is_causal is False and (window is None or window >= 64) for is_causal, window in told)


def test_upcycling_in_both_directions(tmp_path: Path) -> None:
    source = dense_checkpoint(tmp_path / "source", "mistral", **settings_of("mistral"))
    assert "attention:         in both directions" in str(plan_upcycling(str(source), bidirectional=True))
    assert "in both directions" not in str(plan_upcycling(str(source)))
    for both in (True, False):
        folder = upcycle(str(source), tmp_path / f"out-{both}", bidirectional=both)
        model = AutoModel.from_pretrained(folder, trust_remote_code=True)
        changed = difference(*(first_state(model, token, task="clustering") for token in (30, 31)))
        assert (changed > 1e-3) == both
        config: Any = open_checkpoint(str(folder)).config
        assert config.backbone_config.sliding_window == (None if both else WINDOW)


def test_a_source_that_says_so(tmp_path: Path) -> None:
    source = dense_checkpoint(tmp_path / "source", "mistral", use_bidirectional_attention=True)
    config: Any = plan_upcycling(str(source)).config
    assert (config.backbone_config.is_causal, config.backbone_config.sliding_window) == (False, None)


@pytest.mark.parametrize("name", ["bert", "modernbert"])
def test_encoders_are_refused_by_name(name: str) -> None:
    config: PreTrainedConfig = dense_model(name).config
    with pytest.raises(ValueError, match=rf"tiny is a '{name}': .* already bidirectional, .* for decoders \(mistral"):
        make_bidirectional(config, "tiny")
