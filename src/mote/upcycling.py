"""Upcycling: a dense checkpoint becomes a MoTE whose experts are copies of its blocks."""

import logging
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args

import torch
from huggingface_hub import split_torch_state_dict_into_shards

from architectures_mote import ARCHITECTURES
from configuration_mote import PAPER_INSTRUCTIONS, UNSEEN_TASKS, MoTEConfig, alternatives
from modeling_mote import MoTEModel
from mote.checkpoints import cards, nomic_moe, nv_embed
from mote.checkpoints import sentence_transformers as st
from mote.checkpoints.bidirectional import asks_for_both_directions, with_both_directions
from mote.checkpoints.definitions import instruction_with
from mote.checkpoints.end_token import EOS, end_as_asked, ends_texts
from mote.checkpoints.instructions import (
    check_instruction_pooling,
    write_instruction_pooling,
)
from mote.checkpoints.provenance import RECORD_FILE, command_line, new_step
from mote.checkpoints.reading import (
    ATTENTION_POOLING,
    TOKEN_ROUTED,
    Checkpoint,
    dense_without_weights,
    is_mote,
    load_dense,
    load_tokenizer,
    mote_class,
    open_dense,
    quiet_transformers,
    stored_dtype,
)
from mote.checkpoints.retrieval import Retrieval, retrieval_in, wanted_retrieval
from mote.checkpoints.staging import require_shard_size
from mote.checkpoints.streaming import DenseWeights, MappedFiles, can_stream, write_weights
from mote.checkpoints.tensors import parameter_counts, token_routing
from mote.checkpoints.writing import WriteOptions, how_to_load, require_writable, write_repository
from mote.reporting import Report, markdown_table, megabytes, millions

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class UpcyclingOptions(WriteOptions):
    """Settings of an upcycling, and how its result is written.

    Attributes:
        experts: Expert names. Default: the paper's four; of a token-routed source, its own names and tasks.
        layers: Blocks that get experts: `"every"`, `"every_other"`, or indices from 0. None, here and below: as in
            `preset`, or else in `DEFAULTS`.
        tasks: Task → expert, in addition to the defaults of `MoTEConfig`.
        instructions: Task → instruction. They override the source's prompts, which override the paper's.
        definitions: Task → definition, which the template makes an instruction of. Then the paper's instructions are
            not used: without a definition or an instruction of its own, as for documents, a task has none.
        template: The instruction around a definition, `Instruct: {definition}` and `Query: ` in two lines by default.
        instruction_pooling: `included`: embeddings are made of the instruction, too. `excluded`: it is read, and left
            out of the pooling; `excluded_by_count`, by NV-Embed's own count of its tokens. Default: as in the source.
        default_task: Task of texts without one.
        pooling: `mean`, `cls`, `last_token`, or, with weights of its own, `latent_attention` or `self_attention` (see
            `AttentionPoolingConfig`). Default: the source's, or `mean`.
        pooling_latents: Number of latents, for `latent_attention`. Default: 512.
        pooling_heads: Number of heads, for these two. Default: 8.
        pooling_head_dim: Width of a head, for these two. Default: the hidden size.
        bidirectional: Let every token of a decoder attend to every other: no causal mask, no sliding window, no cache.
            Default: as the source says.
        layer_path: Path of the list of layers, for an architecture that is not in MoTE's table.
        shared_modules: Paths of the submodules of a layer that the experts share: its attention, for such an
            architecture. For one in the table, others than these, or `[]` for none.
        routing: What picks the expert: the `"task"` of a text, or a learned router for each `"token"`.
        num_experts: Experts in a block. Default: as many as there are names. Token routing only, as are the next four.
        num_experts_per_tok: Experts per token.
        norm_topk_prob: Scale their weights to sum to 1, which keeps the dense model's output.
        router_aux_loss_coef: Factor of the load-balancing loss in training.
        router_aux_loss_type: Its formula, `equation_1` or `megablocks`, see `TokenRoutedConfig`.
        preset: Key of `PRESETS`, whose settings hold where none is given.
        with_head: Keep the source's head for masked language modelling: the result is a `MoTEForMaskedLM`.
        retrieval: Vectors of the result: `dense`, `sparse`, as of a Sentence-Transformers `SparseEncoder`, or `hybrid`,
            both from one pass. Default: the source's.
        sparse_from: What sparse vectors are made of: the logits of the `head` (SPLADE), which is then kept, or the
            hidden states times the token `embeddings` (CoT-MoTE, Equation 4). Default: the source's, or `head`, or for
            hybrid vectors `embeddings`.
        max_active_dims: Number of a sparse vector's weights that are kept, the largest. Default: all.
        tokenizer: Folder or Hub id of a tokenizer. Default: the source's own.
        end_token: Token that the tokenizer puts behind each text, after truncation; `eos`: its end-of-sequence token.
            Default: as the source's settings say, also where transformers ignores their `add_eos_token`.
        dtype: Type of the weights: `float32`, `float16`, `bfloat16`, or `auto` for the source's.
        revision: Branch, tag or commit of a source on the Hub.
    """

    experts: list[str] | None = None
    layers: str | list[int] | None = None
    tasks: dict[str, str] | None = None
    instructions: dict[str, str] | None = None
    definitions: dict[str, str] | None = None
    template: str | None = None
    instruction_pooling: str | None = None
    default_task: str | None = None
    pooling: str | None = None
    pooling_latents: int | None = None
    pooling_heads: int | None = None
    pooling_head_dim: int | None = None
    bidirectional: bool = False
    layer_path: str | None = None
    shared_modules: list[str] | None = None
    routing: str | None = None
    num_experts: int | None = None
    num_experts_per_tok: int | None = None
    norm_topk_prob: bool = True
    router_aux_loss_coef: float | None = None
    router_aux_loss_type: str | None = None
    preset: str | None = None
    with_head: bool = False
    retrieval: str | None = None
    sparse_from: str | None = None
    max_active_dims: int | None = None
    tokenizer: str | None = None
    end_token: str | None = None
    dtype: str = "auto"
    revision: str | None = None

    def changed(self) -> dict[str, Any]:
        """Return the settings that differ from their defaults."""
        values = {each.name: (getattr(self, each.name), DEFAULTS.get(each.name, each.default)) for each in fields(self)}
        return {name: value for name, (value, default) in values.items() if value not in (default, None)}

    def complete(self) -> "UpcyclingOptions":
        """Return the same settings, with those of the preset, then the defaults, where none is given.

        Raises:
            ValueError: If there is no such preset.
        """
        if self.preset not in (None, *PRESETS):
            raise ValueError(f"Unknown preset {self.preset!r}." + alternatives(str(self.preset), PRESETS))
        filled: dict[str, Any] = DEFAULTS | PRESETS.get(str(self.preset), {})
        missing = {name: value for name, value in filled.items() if getattr(self, name) is None}
        return replace(self, preset=None, **missing)


DEFAULTS: dict[str, Any] = {
    "routing": "task",
    "layers": "every",
    "num_experts_per_tok": 2,
    "router_aux_loss_coef": 0.005,
    "router_aux_loss_type": "equation_1",
}
# Nomic Embed v2 as it was trained (arXiv:2502.07972, section 4.3), but for its upcycling, which drops biases and does
# not scale the experts' weights, so that it does not begin as the dense model: here it does. A step there adds the
# load-balancing losses of queries and documents, each times 1; here it has their mean, times 2.
PRESETS: dict[str, dict[str, Any]] = {
    "nomic-v2": {
        "routing": "token",
        "layers": "every_other",
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "router_aux_loss_coef": 2.0,
        "router_aux_loss_type": "megablocks",
    }
}
DTYPES = ("auto", "float32", "float16", "bfloat16")
TOKEN_ROUTING = (
    "num_experts",
    "num_experts_per_tok",
    "norm_topk_prob",
    "router_aux_loss_coef",
    "router_aux_loss_type",
)
POOLING_BY_ATTENTION = ("latent_attention", "self_attention")
POOLING_SIZES = ("pooling_latents", "pooling_heads", "pooling_head_dim")
_FIXED_IN_TOKEN_ROUTED = ("routing", "layer_path", "shared_modules", *TOKEN_ROUTING, *POOLING_SIZES)
_FIXED_AS_PUBLISHED = ("experts", "layers", "layer_path", "shared_modules", *TOKEN_ROUTING, *POOLING_SIZES)


@dataclass(repr=False)
class UpcyclingPlan(Report):
    """Plan of an upcycling.

    Attributes:
        source: The dense checkpoint.
        config: Config of the MoTE.
        out: Folder of the result.
        counts: Parameters, as from `parameter_counts`.
        file_sizes: Bytes of each file with weights.
        retrieval: The vectors that it gives.
        with_head: Whether it has a head for masked language modelling.
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
        """Lay the plan out in lines."""
        lines = [
            f"{name + ':' if index == 0 else '':<18} {text}"
            for name, texts in self._lines().items()
            for index, text in enumerate(texts)
        ]
        return "\n".join(lines + self.notes)

    def to_markdown(self) -> str:
        """Format as Markdown."""
        rows = markdown_table(["", ""], [(name, "; ".join(texts)) for name, texts in self._lines().items()], align="ll")
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


def upcycle(
    src: str | Path | Checkpoint,
    out: str | Path | None = None,
    options: UpcyclingOptions | None = None,
    **settings: Any,
) -> Path:
    """Turn a dense checkpoint into a complete MoTE model repository.

    Args:
        src: A folder or an id on the Hub, with safetensors or `.bin` files, or an opened checkpoint: a dense model, or
            a token-routed one in our form, whose task experts are then token-routed themselves. Nomic Embed v2
            (`nomic-ai/nomic-embed-text-v2-moe`), token-routed as published, is converted with every one of its weights.
        out: Folder to write. Default: the source's name with `-mote`, in the current folder.
        options: Settings.
        **settings: The same as keyword arguments: `upcycle(src, experts=["a", "b"], overwrite=True)`.

    Returns:
        The folder.

    Raises:
        FileNotFoundError: If the source does not exist or has no weights.
        FileExistsError: If `out` is in use.
        OSError: If its disk is too small.
        ValueError: If the source is not supported, or a setting is invalid.
        PermissionError: If the Hub refuses the push.
    """
    options = replace(options or UpcyclingOptions(), **settings).complete()
    target = Path(out) if out is not None else default_out(src.name if isinstance(src, Checkpoint) else str(src))
    repo_id = require_writable(target, options)
    plan = plan_upcycling(src, target, options)
    source, config, pooled = plan.source, plan.config, options.instruction_pooling
    require_writable(target, replace(options, push=False), source.folder)
    logger.info("%s", plan)
    tokenizer = load_tokenizer(source, options.tokenizer)
    end_token = options.end_token
    if source.format == "nv_embed":
        tokenizer, end_token, pooled = nv_embed.padded(tokenizer), end_token or EOS, pooled or "excluded"
    if options.tokenizer is None or end_token is not None:
        tokenizer = end_as_asked(tokenizer, source, end_token)
    if config.pooling == "last_token" and not ends_texts(tokenizer):
        logger.warning(
            "The last token of a text is pooled, and the tokenizer puts none behind it: long texts end where they are "
            "truncated. `--end-token eos` adds one"
        )
    model, dropped, write = _model_and_its_writer(plan, options.max_shard_size)
    changed = options.changed()
    if options.tokenizer is not None and Path(options.tokenizer).is_dir():
        changed["tokenizer"] = Path(options.tokenizer)  # without its parents
    listed = {"layers": ",".join(map(str, options.layers))} if isinstance(options.layers, list) else {}
    published = source.format == "nomic_moe" or (source.format == "nv_embed" and options.experts is None)
    place = {} if out is None else {"out": target.resolve()}
    command = command_line("upcycle", src=source.public_name, **{**place, **changed, **listed})

    def write_card(folder: Path, step: dict[str, Any]) -> None:
        made: dict[str, Any] = {"made": "converted from", "fresh": False} if published else {}
        normalized = st.normalizes(source)
        cards.write_mote_card(folder, repo_id, config, plan.counts, source, command, normalized=normalized, **made)

    write_repository(
        target,
        model,
        step=new_step(
            "upcycle",
            command=command,
            settings=changed,
            made="upcycled from",
            dropped=dropped,
            parameters=plan.counts,
        ),
        sources=[source],
        write_card=write_card,
        tokenizer=tokenizer,
        write_weights=write,
        retrieval=plan.retrieval,
        after=None if pooled is None else partial(write_instruction_pooling, value=pooled),
        options=options,
        repo_id=repo_id,
    )
    if dropped:
        logger.info("Dropped: %d weights of pre-training heads (listed in %s)", len(dropped), RECORD_FILE)
    logger.info("%s", how_to_load(repo_id if options.push else str(target), config, plan.retrieval))
    return target


def _model_and_its_writer(
    plan: UpcyclingPlan, max_shard_size: str
) -> tuple[MoTEModel, list[str], Callable[[Path], None] | None]:
    """Make sure that the source's weights fit, and build the MoTE.

    Returns:
        The model; the keys of heads that are dropped; and, if the weights can be streamed from the source's files so
        that the model has none, the function that writes them into a folder.
    """
    dtype = plan.config.dtype or "auto"
    if plan.source.format == "nomic_moe":
        logger.info("Reading the published model …")
        files = MappedFiles(plan.source.weights)
        with quiet_transformers():
            published = {key: files[key] for key in files.stored}
            return nomic_moe.load(plan.config, published, plan.source.public_name, dtype), [], None  # type: ignore[arg-type]
    logger.info("Reading the source …")
    with_head = plan.with_head
    new_model = mote_class(plan.config.model_type, "masked_lm" if with_head else "model")
    dense, dropped = dense_without_weights(plan.source, dtype, with_head=with_head)
    if not with_head:  # a head's weights are not named as the encoder's, and most are tied
        weights = DenseWeights(plan.source, dense)
        in_files = bool(plan.source.pooling_weights)
        with torch.device("meta") if in_files else nullcontext():  # in NV-Embed they take gigabytes
            model = new_model(plan.config, dense)
        new = _new_weights(model)
        weights.add({} if in_files else new)
        if can_stream(model, weights):
            logger.info("Copying its blocks into %d experts …", len(plan.config.experts))
            return model, dropped, partial(write_weights, model, weights, max_shard_size=max_shard_size)
        if in_files:
            raise ValueError(f"{plan.source.public_name}: the weights of its pooling can only be copied file by file")
    dense, dropped = load_dense(plan.source, dtype, with_head=with_head)
    logger.info("Copying its blocks into %d experts, in memory …", len(plan.config.experts))
    model = new_model(plan.config, dense)
    _new_weights(model)
    return model, dropped, None


def _new_weights(model: MoTEModel) -> dict[str, torch.Tensor]:
    """Give pooling by attention the type of the other weights, and return its random ones by their names."""
    pooling: Any = getattr(model, "pooling", None)
    if pooling is None:
        return {}
    return {f"pooling.{name}": weight for name, weight in pooling.to(model.config.dtype).state_dict().items()}


def plan_upcycling(
    src: str | Path | Checkpoint,
    out: str | Path | None = None,
    options: UpcyclingOptions | None = None,
    **settings: Any,
) -> UpcyclingPlan:
    """Plan an upcycling, without reading weights or writing anything.

    Takes the arguments of `upcycle`, and raises its errors about source and settings.
    """
    options = replace(options or UpcyclingOptions(), **settings).complete()
    require_shard_size(options.max_shard_size)
    source, options = _opened(src, options)
    retrieval = _retrieval(options, source)
    if options.instruction_pooling is not None:
        check_instruction_pooling(options.instruction_pooling, retrieval.kind)
    with_head = options.with_head or retrieval.needs_head
    if with_head and source.format == "nomic_moe":
        remedy = "leave out `--with-head`" if options.with_head else "add `--sparse-from embeddings`"
        raise ValueError(f"{source.name} has no head for masked language modelling: {remedy}")
    prompts = st.source_prompts(source)
    pooling = _pooling(options, source, retrieval)
    new_config = _published_config if source.format == "nomic_moe" else _config
    if source.config.model_type == TOKEN_ROUTED and source.format == "mote":
        new_config = _hierarchical_config
    config = new_config(options, source, pooling)
    of_source = instructions_from(prompts, config)
    config.instructions = instructions_of(options, config, of_source)
    try:
        config.validate()
    except ValueError as error:
        if not of_source:
            raise
        raise ValueError(
            f"{error}. Prompts of {source.name} count as instructions: write others with `--instruction TASK=TEXT`, or "
            "choose the experts with `--expert NAME`"
        ) from error
    if options.dtype not in DTYPES:
        raise ValueError(f"Unknown dtype {options.dtype!r}." + alternatives(options.dtype, DTYPES))
    config.dtype = stored_dtype(source) if options.dtype == "auto" else getattr(torch, options.dtype)
    try:
        with torch.device("meta"):
            kind: Any = "masked_lm" if with_head else "model"
            model = mote_class(config.model_type, kind)(config).to(dtype=config.dtype)
    except KeyError as error:
        raise ValueError(f"The config of {source.name} asks for {error}, which transformers does not have") from error
    weights = {name: weight for name, weight in model.state_dict().items() if name not in model.all_tied_weights_keys}
    shards = split_torch_state_dict_into_shards(weights, max_shard_size=options.max_shard_size).filename_to_tensors
    return UpcyclingPlan(
        source=source,
        config=config,
        out=Path(out) if out is not None else default_out(source.name),
        counts=parameter_counts(model),
        file_sizes=[sum(weights[key].nbytes for key in keys) for keys in shards.values()],
        retrieval=retrieval,
        with_head=with_head,
        notes=_notes(sorted(prompts.keys() - st.prompts_of(config).keys())),
    )


def _opened(src: str | Path | Checkpoint, options: UpcyclingOptions) -> tuple[Checkpoint, UpcyclingOptions]:
    """Open the source, in both directions if asked for; return it with the options, completed by what it is."""
    source = src if isinstance(src, Checkpoint) else open_dense(str(src), options.revision)
    if options.bidirectional or asks_for_both_directions(source.config):
        source = replace(source, config=with_both_directions(source.config, source.name))
    return source, _as_published(options, source) if source.format == "nv_embed" else options


def _notes(prompts: list[str]) -> list[str]:
    """Say which prompts of the source belong to no task."""
    if len(prompts) > 5:
        return [f"note: {len(prompts)} of the source's prompts, such as {prompts[0]!r}, belong to no task and are kept"]
    note = "note: the source's prompt {0!r} belongs to no task; route it with `--task {0}=EXPERT`"
    return [note.format(name) for name in prompts]


def _as_published(options: UpcyclingOptions, source: Checkpoint) -> UpcyclingOptions:
    """Complete the options by what NV-Embed is, and unless they name experts, by one: the model as published."""
    fixed = [name for name in ("pooling", *POOLING_SIZES, "routing") if name in options.changed()]
    if fixed:
        raise ValueError(
            f"{source.name} pools by latent attention, whose weights are in its files: {fixed[0]} cannot be chosen, "
            "leave it out"
        )
    one, tasks = nv_embed.EXPERT, options.tasks or {}
    changed: dict[str, Any] = {}
    if options.experts is None:
        tasks = {one: one, "query": one, "document": one, **tasks}
        changed = {"experts": [one], "default_task": options.default_task or one}
    none = {task: "" for task in (one, "document") if task in tasks and task not in (options.definitions or {})}
    instructions = {**none, **(options.instructions or {})}
    return replace(options, **source.pooling, **changed, tasks=tasks, instructions=instructions)


def _pooling(options: UpcyclingOptions, source: Checkpoint, retrieval: Retrieval) -> str:
    """Return the pooling of the result: that of the options, else of the source."""
    own: Any = source.config.pooling if is_mote(source.config) else "mean"
    pooling = options.pooling or st.source_pooling(source) or own
    if pooling not in (known := (*MoTEConfig.pooling_modes, *POOLING_BY_ATTENTION)):
        raise ValueError(f"Unknown pooling {pooling!r}." + alternatives(pooling, known))
    if pooling in POOLING_BY_ATTENTION and retrieval.kind != "dense":
        raise ValueError(f"Pooling by {pooling!r} makes dense vectors, and these are {retrieval.kind}")
    return str(pooling)


def _retrieval(options: UpcyclingOptions, source: Checkpoint) -> Retrieval:
    """Return the vectors of the result: those of the options, else of the source."""
    own = retrieval_in(source.folder)
    kind: Any = options.retrieval or own.kind
    if kind not in (kinds := get_args(Retrieval.__annotations__["kind"])):
        raise ValueError(f"Unknown retrieval {kind!r}." + alternatives(kind, kinds))
    wanted = wanted_retrieval(own, kind, options.sparse_from, options.max_active_dims)
    sparse_from, kept = wanted.sparse_from, wanted.max_active_dims
    if sparse_from not in (sources := get_args(Retrieval.__annotations__["sparse_from"])):
        raise ValueError(f"Unknown sparse_from {sparse_from!r}." + alternatives(sparse_from, sources))
    if kind == "dense":
        if options.sparse_from or kept is not None:
            raise ValueError("sparse_from and max_active_dims are settings of sparse vectors: add `--retrieval sparse`")
        if own.kind != "dense":
            raise ValueError(f"{source.name} gives {own.kind} vectors, and says no pooling for dense ones")
        return own
    if kept is not None and kept < 1:
        raise ValueError(f"max_active_dims must be at least 1, got {kept}")
    return wanted


def _config(options: UpcyclingOptions, source: Checkpoint, pooling: str) -> MoTEConfig:
    if options.routing not in ("task", "token"):
        raise ValueError(
            f"Unknown routing {options.routing!r}." + alternatives(str(options.routing), ("task", "token"))
        )
    settings = {name: getattr(options, name) for name in TOKEN_ROUTING}
    if options.routing == "task":
        given = [name for name in TOKEN_ROUTING if name in options.changed()]
        if given:
            raise ValueError(f"{given[0]} is a setting of token routing: add `--routing token`, or leave it out")
        settings = {}
    model_type = "mote" if options.routing == "task" else TOKEN_ROUTED
    if pooling in POOLING_BY_ATTENTION:
        if options.routing == "token":
            raise ValueError(f"Pooling by {pooling!r} is for task experts: leave out `--routing token`")
        model_type = ATTENTION_POOLING
    for name in POOLING_SIZES:
        if (size := getattr(options, name)) is not None:
            if pooling not in POOLING_BY_ATTENTION or (name == "pooling_latents" and pooling != "latent_attention"):
                raise ValueError(f"{name} is a setting of pooling by attention: add `--pooling latent_attention`")
            settings[name] = size
    layer_path, shared = options.layer_path, options.shared_modules
    if shared is not None and layer_path is None and source.config.model_type in ARCHITECTURES:
        layer_path = ARCHITECTURES[source.config.model_type].layer_path
    return mote_class(model_type, "config")(
        backbone_config=source.config,
        pooling=pooling,
        experts=options.experts,
        tasks=with_unseen_tasks(options.tasks),
        mote_layers=options.layers,
        default_task=options.default_task,
        layer_path=layer_path,
        shared_modules=shared,
        **settings,
    )


def _hierarchical_config(options: UpcyclingOptions, source: Checkpoint, pooling: str) -> MoTEConfig:
    """Return the config of task experts that are token-routed as their source is."""
    fixed = [name for name in _FIXED_IN_TOKEN_ROUTED if name in options.changed()]
    if fixed:
        raise ValueError(
            f"{source.name} is token-routed already, whose {fixed[0]} cannot be chosen: leave it out, and upcycle to "
            "task experts, each of which is token-routed like the source"
        )
    routed: Any = source.config
    inherited = routed.tasks if options.experts is None else {}
    config = mote_class("mote_hierarchical", "config")(
        backbone_config=routed,
        pooling=pooling,
        experts=options.experts or routed.experts,
        tasks=with_unseen_tasks({**inherited, **(options.tasks or {})}),
        mote_layers=options.layers,
        default_task=options.default_task,
    )
    if options.experts is None:
        config.instructions = {**routed.instructions}  # validated with those of the prompts
    return config


def _published_config(options: UpcyclingOptions, source: Checkpoint, pooling: str) -> MoTEConfig:
    """Return the config of a mixture of experts as published, with the tasks of the options."""
    fixed = [name for name in _FIXED_AS_PUBLISHED if name in options.changed()]
    if fixed:
        raise ValueError(
            f"{source.name} is a mixture of token-routed experts already, whose {fixed[0]} cannot be chosen: leave it "
            "out. For task experts, convert it first, and upcycle the result: `mote upcycle --src DIR --expert …`"
        )
    tasks = with_unseen_tasks(options.tasks)
    settings = {"tasks": tasks, "default_task": options.default_task, "pooling": pooling}
    return type(source.config)(**{**source.config.to_dict(), **settings})  # type: ignore[return-value]


def _router(config: Any) -> str:
    """Describe token routing."""
    routing: Any = token_routing(config)
    role = "each task expert has its own" if config.routes_by_task else "a task decides on the instruction alone"
    weights = "weights that sum to 1" if routing.norm_topk_prob else "the router's probabilities as weights"
    learns = routing.num_experts_per_tok > 1 or not routing.norm_topk_prob
    warning = "" if learns else "; with one expert per token these are all 1, and the router learns to balance alone"
    return (
        f"each token through {routing.num_experts_per_tok} of {routing.num_experts} experts, with {weights}{warning}; "
        f"load balancing {routing.router_aux_loss_coef:g} ({routing.router_aux_loss_type}); {role}"
    )


def with_unseen_tasks(tasks: dict[str, str] | None) -> dict[str, str]:
    """Add to task → expert the tasks that nothing is trained on, each to the expert of the task that it follows."""
    tasks = tasks or {}
    return {**{task: tasks[like] for task, like in UNSEEN_TASKS.items() if like in tasks}, **tasks}


def instructions_of(options: UpcyclingOptions, config: MoTEConfig, of_source: dict[str, str]) -> dict[str, str]:
    """Return the instructions of a result: those of the options, of the source, and of the config, the first that is.

    Those of the paper do not go together with definitions. A task that follows another one, as `query` follows
    `search_query`, has the instruction of that one.

    Raises:
        ValueError: If a task has both, or the template is not one.
    """
    given, definitions = options.instructions or {}, options.definitions or {}
    if both := sorted(given.keys() & definitions.keys()):
        raise ValueError(f"The task {both[0]!r} has an instruction and a definition: give one of the two")
    if options.template is not None and not definitions:
        raise ValueError("A template goes around definitions, and there are none: add `--definition TASK=TEXT`")
    made = {task: instruction_with(definition, options.template) for task, definition in definitions.items()}
    papers = PAPER_INSTRUCTIONS if made else {}
    own = {task: text for task, text in config.instructions.items() if text != papers.get(task)}
    texts = {**own, **of_source, **given, **made}
    for task, like in UNSEEN_TASKS.items():
        together = like not in config.experts and task in config.tasks and config.tasks[task] == config.tasks.get(like)
        if together and like in texts:
            texts.setdefault(task, texts[like])
    return texts


def default_out(src: str) -> Path:
    """Name the result after its source: `nomic-ai/nomic-bert-2048` → `nomic-bert-2048-mote`."""
    return Path(Path(src).resolve().name + "-mote")


def instructions_from(prompts: dict[str, str], config: MoTEConfig) -> dict[str, str]:
    """Take over the prompts of a source, which was trained with them, as instructions.

    A prompt under MTEB's name of a task counts as the task's. A prompt for the role `query` is also that of the expert
    that serves it, unless the expert has one of its own; an empty one only if no other prompt is.
    """
    under_mteb_names = {st.MTEB_PROMPTS[name]: prompts[name] for name in st.MTEB_PROMPTS if name in prompts}
    texts = {task: text for task, text in {**under_mteb_names, **prompts}.items() if task in config.tasks}
    given = {task: text for task, text in texts.items() if text}
    none = {config.tasks[task]: "" for task in texts.keys() - given.keys()}
    return {**none, **{config.tasks[task]: text for task, text in given.items()}, **given}
