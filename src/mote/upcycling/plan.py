"""What upcycling will write, determined without reading weights."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards

from mote.checkpoints import sentence_transformers as st
from mote.checkpoints.bidirectional import is_bidirectional, make_bidirectional
from mote.checkpoints.reading import Checkpoint, mote_class, open_dense, stored_dtype
from mote.checkpoints.st_settings import Retrieval, require_poolable
from mote.checkpoints.tensors import parameter_counts, token_routing
from mote.remote.configuration_mote import MoTEConfig
from mote.reporting import Report, megabytes, millions, table
from mote.upcycling.configs import as_published, config_of, pooling_of, refuse_fixed, retrieval_of
from mote.upcycling.instructions import instructions_from, instructions_of
from mote.upcycling.options import UpcyclingOptions


@dataclass(repr=False)
class UpcyclingPlan(Report):
    """Plan of upcycling.

    Attributes:
        source: The dense checkpoint.
        config: Config of the MoTE.
        out: Folder of the result.
        counts: Parameters, as from `parameter_counts`.
        file_sizes: Bytes of each weight file.
        retrieval: The vectors that the result gives.
        with_head: Whether the result has a head for masked language modelling.
        notes: Remarks for the user.
    """

    source: Checkpoint
    config: MoTEConfig
    out: Path
    counts: dict[str, Any]
    file_sizes: list[int]
    retrieval: Retrieval
    with_head: bool
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        """Lay out the plan in lines."""
        lines = [
            f"{name + ':' if index == 0 else '':<18} {text}"
            for name, texts in self._lines().items()
            for index, text in enumerate(texts)
        ]
        return "\n".join(lines + self.notes)

    def to_markdown(self) -> str:
        """Format as Markdown."""
        rows = table(["", ""], [(name, "; ".join(texts)) for name, texts in self._lines().items()], align="ll")
        return "\n\n".join([rows, *self.notes])

    def _lines(self) -> dict[str, list[str]]:
        config, counts = self.config, self.counts
        experts = [
            f"{expert} ({', '.join(task for task, to in config.tasks.items() if to == expert)})"
            for expert in config.experts
        ]
        groups = "experts (tasks)" if config.routes_by_task else "tasks"
        layers = config.mote_layer_indices
        weights = ", ".join(path.name for path in self.source.weights)
        routing: Any = token_routing(config)
        blocks = [f"{len(layers)} of {config.num_hidden_layers} have experts: {', '.join(map(str, layers))}"]
        if config.routes_by_task and routing is not None:
            blocks.append(f"token-routed: {', '.join(map(str, routing.mote_layer_indices))}")
        return {
            "source": [f"{self.source.name} ({config.backbone_config.model_type}, {weights})"],
            **({} if routing is None else {"router": [_router(config)]}),
            **({} if getattr(config.backbone_config, "is_causal", True) else {"attention": ["in both directions"]}),
            groups: experts,
            **({} if self.retrieval.kind == "dense" else {"vectors": [str(self.retrieval)]}),
            "blocks": blocks,
            "parameters": [
                f"{millions(counts['active'])} active, {millions(counts['total'])} in all: "
                f"{millions(counts['shared'])} shared, and per expert {millions(max(counts['experts'].values()))}"
            ],
            "weights": [
                f"{megabytes(sum(self.file_sizes))} ({str(config.dtype).removeprefix('torch.')}), in files of "
                f"{', '.join(map(megabytes, self.file_sizes))}"
            ],
            "out": [str(self.out)],
        }


def _router(config: Any) -> str:
    """Describe token routing."""
    routing: Any = token_routing(config)
    role = "each task expert has its own" if config.routes_by_task else "a task only determines the instruction"
    weights = "weights that sum to 1" if routing.norm_topk_prob else "the router's probabilities as weights"
    learns = routing.num_experts_per_tok > 1 or not routing.norm_topk_prob
    warning = "" if learns else "; with one expert per token these are all 1, and the router only learns to balance"
    return (
        f"each token through {routing.num_experts_per_tok} of {routing.num_experts} experts, with {weights}{warning}; "
        f"load balancing {routing.router_aux_loss_coef:g} ({routing.router_aux_loss_type}); {role}"
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
    options = (options or UpcyclingOptions()).updated(**settings).complete()
    source, options = _opened(src, options)
    retrieval = retrieval_of(options, source)
    if options.instruction_pooling is not None:
        require_poolable(options.instruction_pooling, retrieval.kind)
    with_head = options.with_head or retrieval.needs_head
    if with_head and source.format == "nomic_moe":
        remedy = "leave out `--with-head`" if options.with_head else "add `--sparse-from embeddings`"
        raise ValueError(f"{source.name} has no head for masked language modelling: {remedy}")
    prompts = st.source_prompts(source)
    pooling = pooling_of(options, source, retrieval)
    config = config_of(options, source, pooling)
    of_source = instructions_from(prompts, config)
    config.instructions = instructions_of(options, config, of_source)
    try:
        config.validate()
    except ValueError as error:
        if not of_source:
            raise
        raise ValueError(
            f"{error}. Prompts of {source.name} count as instructions: set others with `--instruction TASK=TEXT`, or "
            "choose the experts with `--expert NAME`"
        ) from error
    config.dtype = stored_dtype(source) if options.dtype == "auto" else getattr(torch, options.dtype)
    with torch.device("meta"):
        kind: Any = "masked_lm" if with_head else "model"
        model = mote_class(config.model_type, kind)(config).to(dtype=config.dtype)
    weights = {name: weight for name, weight in model.state_dict().items() if name not in model.all_tied_weights_keys}
    shards = split_torch_state_dict_into_shards(weights, max_shard_size=options.max_shard_size).filename_to_tensors
    return UpcyclingPlan(
        source=source,
        config=config,
        # nomic-ai/nomic-bert-2048 → nomic-bert-2048-mote
        out=Path(out or f"{Path(source.name).resolve().name}-mote"),
        counts=parameter_counts(model),
        file_sizes=[sum(weights[key].nbytes for key in keys) for keys in shards.values()],
        retrieval=retrieval,
        with_head=with_head,
        notes=_notes(sorted(prompts.keys() - st.prompts_of(config).keys())),
    )


def _opened(src: str | Path | Checkpoint, options: UpcyclingOptions) -> tuple[Checkpoint, UpcyclingOptions]:
    """Open the source, bidirectional if requested; return it with the options, completed for this source."""
    source = src if isinstance(src, Checkpoint) else open_dense(str(src), options.revision)
    refuse_fixed(options, source)
    if options.bidirectional or is_bidirectional(source.config):
        source = replace(source, config=make_bidirectional(source.config, source.name))
    return source, as_published(options, source) if source.format == "nv_embed" else options


def _notes(prompts: list[str]) -> list[str]:
    """Return a note on prompts of the source that belong to no task."""
    if len(prompts) > 5:
        return [f"note: {len(prompts)} of the source's prompts, such as {prompts[0]!r}, belong to no task and are kept"]
    note = "note: the source's prompt {0!r} belongs to no task; route it with `--task {0}=EXPERT`"
    return [note.format(name) for name in prompts]
