"""Model families as rows of a table: a new one joins every property test by one line."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModel, PreTrainedModel

from mote.remote.configuration_mote import MoTEConfig
from mote.remote.modeling_mote import MoTEModel

VOCAB_SIZE = 60

_ENCODER = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
_DECODER = {**_ENCODER, "num_key_value_heads": 1, "head_dim": 8}
_WINDOWED = {**_DECODER, "sliding_window": 4, "layer_types": ["full_attention", "sliding_attention"]}

FAMILIES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(["nomic_bert", "jina_embeddings_v3", "gte", "bert", "roberta", "xlm-roberta"], _ENCODER),
    **dict.fromkeys(["camembert", "ernie", "mpnet"], _ENCODER),
    "electra": {**_ENCODER, "embedding_size": 16},
    "distilbert": {"dim": 16, "n_layers": 2, "n_heads": 2, "hidden_dim": 32},
    "modernbert": {**_ENCODER, "local_attention": 4, "global_attn_every_n_layers": 2},
    **dict.fromkeys(["eurobert", "mistral", "qwen2", "qwen3", "llama"], _DECODER),
    **dict.fromkeys(["gemma2", "gemma3_text"], _WINDOWED),
}

EAGER_ONLY = {"mpnet", "gemma2"}  # in transformers itself
NOT_CHECKPOINTED = {"mpnet"}  # by transformers itself

EXPERTS = ["alpha", "beta"]

# One for each pair of layer path and shared modules in `ARCHITECTURES`; the others run in the tier `families`.
REPRESENTATIVES = {"nomic_bert", "bert", "mpnet", "distilbert", "modernbert", "qwen3", "gemma3_text"}


def family(name: str, default: bool | None = None, *, long: bool = False) -> Any:
    """One row, skipped where transformers lacks it; by default, only representatives are not in the tier `families`."""
    missing = name not in CONFIG_MAPPING
    marks = [pytest.mark.skipif(missing, reason="not in this version of transformers")]
    if not (name in REPRESENTATIVES if default is None else default):
        marks.append(pytest.mark.families)
    return pytest.param(name, marks=[*marks, *([pytest.mark.long] if long else [])])


all_families = pytest.mark.parametrize("name", [family(name) for name in FAMILIES])


def dense_model(name: str, attention: str = "sdpa", **settings: Any) -> PreTrainedModel:
    """A tiny native model with random weights, biases included."""
    torch.manual_seed(0)
    config = CONFIG_MAPPING[name](**{"vocab_size": VOCAB_SIZE, "pad_token_id": 0, **FAMILIES[name], **settings})
    attention = "eager" if name in EAGER_ONLY else attention
    model = AutoModel.from_config(config, attn_implementation=attention).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    return model


def mote_config(dense: PreTrainedModel, **settings: Any) -> MoTEConfig:
    """Two experts, no instructions, unless told otherwise."""
    return MoTEConfig(**{"backbone_config": dense.config, "experts": EXPERTS, **settings})


def fresh_mote(name: str, attention: str = "sdpa", **settings: Any) -> MoTEModel:
    """A MoTE whose experts are copies."""
    dense = dense_model(name, attention)
    return MoTEModel(mote_config(dense, **settings), dense).eval()


def trained_mote(name: str, attention: str = "sdpa", **settings: Any) -> MoTEModel:
    """A MoTE whose experts have been made different by noise."""
    return make_different(fresh_mote(name, attention, **settings))


def make_different(model: PreTrainedModel, noise: float = 0.1) -> PreTrainedModel:
    """Give each expert noise of its own, of this standard deviation."""
    generator = torch.Generator().manual_seed(1)
    changed = 0
    with torch.no_grad():
        for module in model.modules():
            if type(module).__name__ != "MoTEBlock":  # by name: remote code is another class than the installed one
                continue
            for parameter in module.experts.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator) * noise)
                changed += 1
    assert changed
    return model


def batch(rows: int = 4, length: int = 9, seed: int = 2) -> dict[str, torch.Tensor]:
    """Random tokens, each row shorter than the one before it, padded on the right."""
    generator = torch.Generator().manual_seed(seed)
    input_ids = torch.randint(5, VOCAB_SIZE, (rows, length), generator=generator)
    lengths = torch.tensor([max(1, length - 2 * row) for row in range(rows)])
    attention_mask = (torch.arange(length) < lengths[:, None]).long()
    return {"input_ids": input_ids * attention_mask, "attention_mask": attention_mask}


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    assert one.shape == other.shape
    return (one - other).abs().max().item()


def assert_near(found: Any, expected: Any, tolerance: float = 1e-6) -> None:
    assert np.shape(found) == np.shape(expected)
    assert np.abs(np.asarray(found) - np.asarray(expected)).max() <= tolerance


def real_difference(one: torch.Tensor, other: torch.Tensor, mask: torch.Tensor) -> float:
    """The largest difference where the mask is 1."""
    return difference(one[mask.bool()], other[mask.bool()])


def in_threads(count: int, serve: Callable[[int], None]) -> None:
    """Call `serve` with 0, 1, … in as many threads, all started at once."""
    barrier = threading.Barrier(count)

    def begin(thread: int) -> None:
        barrier.wait()
        serve(thread)

    with ThreadPoolExecutor(count) as pool:
        list(pool.map(begin, range(count)))


def assert_threads_agree(embed: Callable[[int, int], list[torch.Tensor]], turns: int, threads: int = 8) -> None:
    """Assert that `embed(thread, turn)` gives the same bits in threads at once as it gives alone."""
    expected = {(thread, turn): embed(thread, turn) for thread in range(threads) for turn in range(turns)}
    wrong: list[tuple[int, int]] = []

    def serve(thread: int) -> None:
        for turn in range(turns):
            with torch.no_grad():
                found = embed(thread, turn)
            if not all(torch.equal(one, other) for one, other in zip(found, expected[thread, turn], strict=True)):
                wrong.append((thread, turn))

    in_threads(threads, serve)
    assert wrong == []


def rows_of(inputs: dict[str, torch.Tensor], *rows: int) -> dict[str, torch.Tensor]:
    return {name: value[list(rows)] for name, value in inputs.items()}
