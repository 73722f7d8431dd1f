"""The kinds of models as rows of a table: task experts, compressed or routing tokens themselves, and token routing."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from helpers import token_routing
from helpers.families import FAMILIES, batch, family, fresh_mote, trained_mote
from transformers import PreTrainedModel

from mote.experts import compress
from mote.inference.cuda_graphs import CudaGraphs
from mote.inference.one_pass import OnePass

# One family for each kind of feed-forward network in `FEED_FORWARDS`.
FEED_FORWARD_FAMILIES = ["nomic_bert", "jina_embeddings_v3", "gte", "bert", "distilbert", "modernbert"]


@dataclass(frozen=True)
class Kind:
    name: str
    fresh: Callable[..., Any]  # makes a model of a family, whose experts are copies
    trained: Callable[..., Any]  # makes one whose experts differ
    tasks: list[str]  # of the four rows of a mixed batch
    families: list[Any]  # in which its properties are tested
    tolerance: float = 0.0  # difference to the dense model where all experts are copies
    settings: dict[str, Any] = field(default_factory=dict)  # other than the defaults, which a saved model keeps
    flags: dict[str, bool] = field(default_factory=dict)  # arguments that ask for what the kind alone returns
    is_trained: bool = True  # whether its weights get gradients

    def outputs(self, model: PreTrainedModel, inputs: dict[str, torch.Tensor] | None = None) -> list[torch.Tensor]:
        """Embeddings under two tasks, and in a batch of both."""
        given = inputs or batch()
        tasks: list[Any] = [*self.tasks[:2], self.tasks]
        return [model(**given, task=task).pooler_output for task in tasks]


MOTE = Kind("mote", fresh_mote, trained_mote, ["alpha", "beta", "beta", "alpha"], [family(name) for name in FAMILIES])
TOKEN_ROUTED = Kind(
    "mote_token_routed",
    token_routing.fresh,
    token_routing.trained,
    ["a", "b", "c", "d"],
    [family(name, default=True) for name in FEED_FORWARD_FAMILIES],
    tolerance=2e-6,
    settings={"num_experts_per_tok": 3, "norm_topk_prob": False, "router_aux_loss_coef": 0.5},
    flags={"output_router_logits": True},
)
HIERARCHICAL = Kind(
    "mote_hierarchical",
    lambda name: token_routing.fresh_hierarchical(token_routing.fresh(name)),
    token_routing.trained_hierarchical,
    ["x", "y", "y", "x"],
    [family("bert")],
    tolerance=2e-6,
    settings={"router_aux_loss_coef": 0.5},
    flags={"output_router_logits": True},
)
LOW_RANK, EIGHT_BITS = (
    Kind(
        name,
        lambda *args, way=way, **settings: compress(fresh_mote(*args, **settings), **way),
        lambda *args, way=way, **settings: compress(trained_mote(*args, **settings), **way),
        MOTE.tasks,
        [family(one, default=one in ("bert", "nomic_bert")) for one in FAMILIES],
        tolerance=2e-6,
        is_trained=name == "low rank",
    )
    for name, way in (("low rank", {"rank": 3}), ("8 bits", {"bits": 8}))
)


class OnTheCpu(CudaGraphs):
    """CUDA graphs without a GPU: all but the capture itself, for which the pass is run again."""

    class recorder_class:  # noqa: N801
        running = nullcontext

        def __init__(self, device: torch.device) -> None:
            self.device = device

        def capture(self, run: Callable[[], torch.Tensor]) -> tuple[Callable[[], Any], torch.Tensor]:
            return lambda: out.copy_(run()), (out := run().clone())


def _sped_up(model: Any, way: str) -> Any:
    setattr(model, way, {"one_pass": OnePass, "graphs": OnTheCpu}[way](model))
    return model


ONE_PASS, GRAPHS = (
    Kind(
        name,
        lambda *args, name=name, **settings: _sped_up(fresh_mote(*args, **settings), name),
        lambda *args, name=name, **settings: _sped_up(trained_mote(*args, **settings), name),
        MOTE.tasks,
        [family(one, default=one == default, long=True) for one in FAMILIES],
    )
    for name, default in (("one_pass", "nomic_bert"), ("graphs", "bert"))
)
KINDS = [MOTE, TOKEN_ROUTED, HIERARCHICAL, LOW_RANK, EIGHT_BITS, ONE_PASS, GRAPHS]


def in_families(kinds: Sequence[Kind]) -> Any:
    """Parametrize a test by `kind` and `name`, a family of the kind."""
    rows = [(kind, row) for kind in kinds for row in kind.families]
    return pytest.mark.parametrize(
        ("kind", "name"),
        [pytest.param(kind, *row.values, marks=row.marks, id=f"{kind.name}-{row.values[0]}") for kind, row in rows],
    )


every_kind_and_family = in_families(KINDS)
every_kind = pytest.mark.parametrize("kind", [pytest.param(kind, id=kind.name) for kind in KINDS])
