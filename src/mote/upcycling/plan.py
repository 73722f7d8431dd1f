"""What upcycling will write, determined without reading weights."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch

from mote.checkpoints import sentence_transformers as st
from mote.checkpoints.bidirectional import is_bidirectional, make_bidirectional
from mote.checkpoints.reading import Checkpoint, mote_class, open_dense, stored_dtype
from mote.checkpoints.st_settings import Retrieval, require_poolable
from mote.checkpoints.tensors import parameter_counts, token_routing
from mote.remote.configuration_mote import MoTEConfig
from mote.reporting import megabytes, millions
from mote.upcycling.configs import (
    as_published,
    config_of,
    instructions_of,
    refuse_unused,
    retrieval_of,
    source_instructions,
)
from mote.upcycling.options import UpcyclingOptions


@dataclass(repr=False)
class UpcyclingPlan:
    """Plan of upcycling.

    Attributes:
        source: The dense checkpoint.
        config: Config of the MoTE.
        out: Folder of the result.
        counts: Parameters, as from `parameter_counts`.
        size: Bytes of the weights.
        retrieval: The vectors that the result gives.
        with_head: Whether the result has a head for masked language modelling.
        unrouted: Names of the source's prompts that belong to no task.
    """

    source: Checkpoint
    config: MoTEConfig
    out: Path
    counts: dict[str, Any]
    size: int
    retrieval: Retrieval
    with_head: bool
    unrouted: list[str]

    def __repr__(self) -> str:
        """Lay out the plan in lines, as `print` does, too."""
        config, counts, routing = self.config, self.counts, cast(Any, token_routing(self.config))
        weights = ", ".join(path.name for path in self.source.weights)
        rows = [("source", f"{self.source.name} ({config.backbone_config.model_type}, {weights})")]
        if routing is not None:
            rows.append(("router", _router(routing)))
        if not getattr(config.backbone_config, "is_causal", True):
            rows.append(("attention", "in both directions"))
        for expert in config.experts:
            tasks = [task for task, to in config.tasks.items() if to == expert]
            rows.append(("expert (tasks)" if config.routes_by_task else "tasks", f"{expert} ({', '.join(tasks)})"))
        if self.retrieval.kind != "dense":
            rows.append(("vectors", str(self.retrieval)))
        layers = config.mote_layer_indices
        blocks = f"{len(layers)} of {config.num_hidden_layers} have experts: {', '.join(map(str, layers))}"
        if config.routes_by_task and routing is not None:
            blocks += f"; token-routed: {', '.join(map(str, routing.mote_layer_indices))}"
        active, total, shared = (millions(counts[name]) for name in ("active", "total", "shared"))
        each = millions(max(counts["experts"].values()))
        rows += [
            ("blocks", blocks),
            ("parameters", f"{active} active, {total} in all: {shared} shared, and per expert {each}"),
            ("weights", f"{megabytes(self.size)} ({str(config.dtype).removeprefix('torch.')})"),
            ("out", str(self.out)),
        ]
        if self.unrouted:
            names = ", ".join(map(repr, self.unrouted))
            rows.append(("note", f"prompts of the source that belong to no task (`--task NAME=EXPERT`): {names}"))
        return "\n".join(f"{name + ':':<18} {text}" for name, text in rows)


def _router(routing: Any) -> str:
    always_one = routing.num_experts_per_tok == 1 and routing.norm_topk_prob
    warning = ", whose weight is always 1: the router only learns to balance" if always_one else ""
    return (
        f"each token through {routing.num_experts_per_tok} of {routing.num_experts} experts{warning}; "
        f"load balancing {routing.router_aux_loss_coef:g} ({routing.router_aux_loss_type})"
    )


def plan_upcycling(
    src: str | Path | Checkpoint,
    out: str | Path | None = None,
    options: UpcyclingOptions | None = None,
    **settings: Any,
) -> UpcyclingPlan:
    """Plan upcycling, without reading weights or writing anything.

    Takes the arguments of `upcycle`, and raises its errors about the source and settings.
    """
    options = (options or UpcyclingOptions()).updated(**settings)
    source = src if isinstance(src, Checkpoint) else open_dense(str(src), options.revision)
    if options.bidirectional or is_bidirectional(source.config):
        source = replace(source, config=make_bidirectional(source.config, source.name))
    else:
        source.warn_of_code()
    retrieval = retrieval_of(options, source)
    refuse_unused(options, source, str(options.pooling or st.source_pooling(source)), retrieval)
    if source.format == "nv_embed":
        options = as_published(options, source)
    if options.instruction_pooling is not None:
        require_poolable(options.instruction_pooling, retrieval.kind)
    with_head = options.with_head or retrieval.needs_head
    config = config_of(options, source, str(options.pooling or st.source_pooling(source)))
    config.instructions = instructions_of(options, config, source_instructions(options, config, source))
    config.validate()
    config.dtype = stored_dtype(source) if options.dtype == "auto" else getattr(torch, options.dtype)
    with torch.device("meta"):
        kind: Any = "masked_lm" if with_head else "model"
        model = mote_class(config.model_type, kind)(config).to(dtype=config.dtype)
    prompts, known = st.source_prompts(source), st.prompts_of(config)
    weights = [weight for name, weight in model.state_dict().items() if name not in model.all_tied_weights_keys]
    return UpcyclingPlan(
        source=source,
        config=config,
        # nomic-ai/nomic-bert-2048 → nomic-bert-2048-mote
        out=Path(out or f"{Path(source.name).resolve().name}-mote"),
        counts=parameter_counts(model),
        size=sum(weight.nbytes for weight in weights),
        retrieval=retrieval,
        with_head=with_head,
        unrouted=sorted(name for name in prompts if not {name, prompts[name]} & {*known.keys(), *known.values()}),
    )
