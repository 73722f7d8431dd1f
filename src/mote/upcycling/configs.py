"""Config, pooling and vectors of the result of upcycling: from the options, else from the source."""

from typing import Any

from mote.checkpoints import nv_embed
from mote.checkpoints import sentence_transformers as st
from mote.checkpoints.reading import ATTENTION_POOLING, TOKEN_ROUTED, Checkpoint, mote_class
from mote.checkpoints.st_settings import Retrieval, retrieval_in, wanted_retrieval
from mote.remote.architectures_mote import ARCHITECTURES
from mote.remote.configuration_mote import UNSEEN_TASKS, MoTEConfig
from mote.upcycling.options import POOLING_BY_ATTENTION, POOLING_SIZES, TOKEN_ROUTING, UpcyclingOptions

# Kind of source → what its files determine, why, and what to do instead.
_FIXED = {
    "nv_embed": (
        ("pooling", *POOLING_SIZES, "routing"),
        "pools by latent attention, whose weights are in its files",
        "",
    ),
    TOKEN_ROUTED: (
        ("routing", "layer_path", "shared_modules", *TOKEN_ROUTING, *POOLING_SIZES),
        "is already token-routed",
        ", and upcycle to task experts, each of which is token-routed like the source",
    ),
    "nomic_moe": (
        ("experts", "layers", "layer_path", "shared_modules", *TOKEN_ROUTING, *POOLING_SIZES),
        "is already a mixture of token-routed experts",
        ". For task experts, convert it first, and upcycle the result: `mote upcycle --src DIR --expert …`",
    ),
}


def refuse_fixed(options: UpcyclingOptions, source: Checkpoint) -> None:
    """Raise `ValueError` if the options choose something that the source's files determine."""
    fixed, why, instead = _FIXED.get(_kind_of(source), ((), "", ""))
    for name in fixed:
        if name in options.changed():
            raise ValueError(f"{source.name} {why}, so {name} cannot be chosen: leave it out{instead}")


def _kind_of(source: Checkpoint) -> str:
    return TOKEN_ROUTED if source.format == "mote" and source.config.model_type == TOKEN_ROUTED else source.format


def as_published(options: UpcyclingOptions, source: Checkpoint) -> UpcyclingOptions:
    """Complete the options for NV-Embed; unless they name experts, with a single expert: the model as published."""
    one, tasks = nv_embed.EXPERT, options.tasks
    changes: dict[str, Any] = {**source.pooling}
    if options.experts is None:
        tasks = {one: one, "query": one, "document": one, **tasks}
        changes |= {"experts": [one], "default_task": options.default_task or one}
    if options.instructions:
        without = {task: "" for task in (one, "document") if task in tasks and task not in options.definitions}
        changes["instructions"] = {**without, **options.instruction_texts}
    return options.updated(**changes, tasks=tasks)


def pooling_of(options: UpcyclingOptions, source: Checkpoint, retrieval: Retrieval) -> str:
    """Return the pooling of the result: from the options, else from the source.

    Raises:
        ValueError: If the pooling makes another kind of vectors.
    """
    pooling = options.pooling or st.source_pooling(source)
    if pooling in POOLING_BY_ATTENTION and retrieval.kind != "dense":
        raise ValueError(f"Pooling by {pooling!r} makes dense vectors, but the retrieval is {retrieval.kind}")
    return str(pooling)


def retrieval_of(options: UpcyclingOptions, source: Checkpoint) -> Retrieval:
    """Return the vectors of the result: from the options, else from the source.

    Raises:
        ValueError: If the source cannot give the kind of vectors.
    """
    own = retrieval_in(source.folder)
    wanted = wanted_retrieval(own, options.retrieval, options.sparse_from, options.max_active_dims)
    if wanted.kind != "dense":
        return wanted
    if options.sparse_from or options.max_active_dims is not None:
        raise ValueError("sparse_from and max_active_dims are settings of sparse vectors: add `--retrieval sparse`")
    if own.kind != "dense":
        raise ValueError(f"{source.name} gives {own.kind} vectors, and has no pooling for dense ones")
    return own


def config_of(options: UpcyclingOptions, source: Checkpoint, pooling: str) -> MoTEConfig:
    """Return the config of the result, not validated, and without instructions.

    Raises:
        ValueError: If options contradict each other or the source.
    """
    tasks = with_unseen_tasks(options.tasks)
    if _kind_of(source) == "nomic_moe":
        settings = {"tasks": tasks, "default_task": options.default_task, "pooling": pooling}
        return type(source.config)(**{**source.config.to_dict(), **settings})  # type: ignore[return-value]
    if _kind_of(source) == TOKEN_ROUTED:
        return _hierarchical_config(options, source, pooling)
    return _config(options, source, pooling)


def _config(options: UpcyclingOptions, source: Checkpoint, pooling: str) -> MoTEConfig:
    by_attention, by_token = pooling in POOLING_BY_ATTENTION, options.routing == "token"
    if by_attention and by_token:
        raise ValueError(f"Pooling by {pooling!r} needs task experts: leave out `--routing token`")
    for name in TOKEN_ROUTING if not by_token else ():
        if name in options.changed():
            raise ValueError(
                f"{name} is a setting of token routing: add `--routing token` (in a recipe, model.kind=token_routed), "
                "or leave it out"
            )
    sizes = {name: size for name in POOLING_SIZES if (size := getattr(options, name)) is not None}
    for name in sizes:
        if not by_attention or (name == "pooling_latents" and pooling != "latent_attention"):
            raise ValueError(f"{name} is a setting of pooling by attention: add `--pooling latent_attention`")
    layer_path, shared = options.layer_path, options.shared_modules
    if shared is not None and layer_path is None and source.config.model_type in ARCHITECTURES:
        layer_path = ARCHITECTURES[source.config.model_type].layer_path
    model_type = ATTENTION_POOLING if by_attention else TOKEN_ROUTED if by_token else "mote"
    return mote_class(model_type, "config")(
        backbone_config=source.config,
        pooling=pooling,
        experts=options.experts,
        tasks=with_unseen_tasks(options.tasks),
        mote_layers=options.layers,
        default_task=options.default_task,
        layer_path=layer_path,
        shared_modules=shared,
        **sizes,
        **({name: getattr(options, name) for name in TOKEN_ROUTING} if by_token else {}),
    )


def _hierarchical_config(options: UpcyclingOptions, source: Checkpoint, pooling: str) -> MoTEConfig:
    """Return the config of task experts that are token-routed like their source."""
    routed: Any = source.config
    inherited = routed.tasks if options.experts is None else {}
    config = mote_class("mote_hierarchical", "config")(
        backbone_config=routed,
        pooling=pooling,
        experts=options.experts or routed.experts,
        tasks=with_unseen_tasks({**inherited, **options.tasks}),
        mote_layers=options.layers,
        default_task=options.default_task,
    )
    if options.experts is None:
        config.instructions = {**routed.instructions}  # validated with those of the prompts
    return config


def with_unseen_tasks(tasks: dict[str, str]) -> dict[str, str]:
    """Add the tasks that no expert is trained on to a mapping task → expert, each with the expert that serves it."""
    return {**{task: tasks[like] for task, like in UNSEEN_TASKS.items() if like in tasks}, **tasks}
