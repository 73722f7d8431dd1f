"""Config, pooling and vectors of the result of upcycling: from the options, else from the source."""

from dataclasses import replace
from typing import Any, get_args

from mote.checkpoints import nv_embed
from mote.checkpoints import sentence_transformers as st
from mote.checkpoints.reading import ATTENTION_POOLING, TOKEN_ROUTED, Checkpoint, mote_class
from mote.checkpoints.retrieval import Retrieval, retrieval_in, wanted_retrieval
from mote.remote.architectures_mote import ARCHITECTURES
from mote.remote.configuration_mote import UNSEEN_TASKS, MoTEConfig, alternatives
from mote.upcycling.options import POOLING_BY_ATTENTION, POOLING_SIZES, TOKEN_ROUTING, UpcyclingOptions

_FIXED_IN_TOKEN_ROUTED = ("routing", "layer_path", "shared_modules", *TOKEN_ROUTING, *POOLING_SIZES)
_FIXED_AS_PUBLISHED = ("experts", "layers", "layer_path", "shared_modules", *TOKEN_ROUTING, *POOLING_SIZES)


def as_published(options: UpcyclingOptions, source: Checkpoint) -> UpcyclingOptions:
    """Complete the options for NV-Embed; unless they name experts, with a single expert: the model as published.

    Raises:
        ValueError: If the options choose something that the files determine.
    """
    fixed = [name for name in ("pooling", *POOLING_SIZES, "routing") if name in options.changed()]
    if fixed:
        raise ValueError(
            f"{source.name} pools by latent attention, whose weights are in its files, so {fixed[0]} cannot be chosen: "
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


def pooling_of(options: UpcyclingOptions, source: Checkpoint, retrieval: Retrieval) -> str:
    """Return the pooling of the result: from the options, else from the source.

    Raises:
        ValueError: If the pooling is unknown, or makes another kind of vectors.
    """
    pooling = options.pooling or st.source_pooling(source)
    if pooling not in (known := (*MoTEConfig.pooling_modes, *POOLING_BY_ATTENTION)):
        raise ValueError(f"Unknown pooling {pooling!r}." + alternatives(pooling, known))
    if pooling in POOLING_BY_ATTENTION and retrieval.kind != "dense":
        raise ValueError(f"Pooling by {pooling!r} makes dense vectors, but the retrieval is {retrieval.kind}")
    return str(pooling)


def retrieval_of(options: UpcyclingOptions, source: Checkpoint) -> Retrieval:
    """Return the vectors of the result: from the options, else from the source.

    Raises:
        ValueError: If the kind of vectors is unknown, or the source cannot give them.
    """
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
            raise ValueError(f"{source.name} gives {own.kind} vectors, and has no pooling for dense ones")
        return own
    if kept is not None and kept < 1:
        raise ValueError(f"max_active_dims must be at least 1, got {kept}")
    return wanted


def config_of(options: UpcyclingOptions, source: Checkpoint, pooling: str) -> MoTEConfig:
    """Return the config of the result, not validated, and without instructions.

    Raises:
        ValueError: If options contradict each other or the source.
    """
    if source.format == "nomic_moe":
        return _published_config(options, source, pooling)
    if source.config.model_type == TOKEN_ROUTED and source.format == "mote":
        return _hierarchical_config(options, source, pooling)
    return _config(options, source, pooling)


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
            raise ValueError(f"Pooling by {pooling!r} needs task experts: leave out `--routing token`")
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
    """Return the config of task experts that are token-routed like their source."""
    fixed = [name for name in _FIXED_IN_TOKEN_ROUTED if name in options.changed()]
    if fixed:
        raise ValueError(
            f"{source.name} is already token-routed, so {fixed[0]} cannot be chosen: leave it out, and upcycle to task "
            "experts, each of which is token-routed like the source"
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
    """Return the config of a published mixture of experts, with the tasks of the options."""
    fixed = [name for name in _FIXED_AS_PUBLISHED if name in options.changed()]
    if fixed:
        raise ValueError(
            f"{source.name} is already a mixture of token-routed experts, so {fixed[0]} cannot be chosen: leave it "
            "out. For task experts, convert it first, and upcycle the result: `mote upcycle --src DIR --expert …`"
        )
    tasks = with_unseen_tasks(options.tasks)
    settings = {"tasks": tasks, "default_task": options.default_task, "pooling": pooling}
    return type(source.config)(**{**source.config.to_dict(), **settings})  # type: ignore[return-value]


def with_unseen_tasks(tasks: dict[str, str] | None) -> dict[str, str]:
    """Add the tasks that no expert is trained on to a mapping task → expert, each with the expert that serves it."""
    tasks = tasks or {}
    return {**{task: tasks[like] for task, like in UNSEEN_TASKS.items() if like in tasks}, **tasks}
