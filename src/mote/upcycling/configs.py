"""Config, instructions and vectors of the result of upcycling: from the options, else from the source."""

import re
from typing import Any, cast

from mote.checkpoints import nv_embed
from mote.checkpoints.definitions import instruction_with
from mote.checkpoints.reading import ATTENTION_POOLING, TOKEN_ROUTED, Checkpoint, is_mote, mote_class
from mote.checkpoints.sentence_transformers import prompts_of, source_prompts
from mote.checkpoints.st_settings import Pipeline, Retrieval, retrieval_in, wanted_retrieval
from mote.remote.configuration_mote import (
    ARCHITECTURES,
    MTEB_PROMPTS,
    PAPER_INSTRUCTIONS,
    ROLE_HINTS,
    UNSEEN_TASKS,
    MoTEConfig,
)
from mote.upcycling.options import (
    POOLING_BY_ATTENTION,
    POOLING_SIZES,
    TOKEN_ROUTING,
    MoTESettings,
    UpcyclingOptions,
)

# Prompts that the cards of models prescribe, but their files do not hold: pattern of the name → prompts.
_PRESCRIBED: dict[str, dict[str, str]] = {
    r"nomic-embed-text-v1(\.5)?": PAPER_INSTRUCTIONS,  # huggingface.co/nomic-ai/nomic-embed-text-v1.5
    # huggingface.co/intfloat/e5-base-v2; "query: " is also for tasks that are not search
    r"(multilingual-)?e5-(small|base|large)(-v2)?": {"query": "query: ", "document": "passage: "},
}

# Kind of source → settings that its files determine, and why.
_FIXED = {
    "nv_embed": (
        ("pooling", *POOLING_SIZES, "routing", "retrieval"),
        "pools by latent attention, whose weights are in its files",
    ),
    TOKEN_ROUTED: (
        ("routing", "layer_path", "shared_modules", *TOKEN_ROUTING, *POOLING_SIZES),
        "is already token-routed: upcycle to task experts, each of which is token-routed like the source",
    ),
    "nomic_moe": (
        ("experts", "layers", "layer_path", "shared_modules", *TOKEN_ROUTING, *POOLING_SIZES),
        "is already a mixture of token-routed experts. For task experts, convert it first, and upcycle the result: "
        "`mote upcycle --src DIR --expert …`",
    ),
}


def refuse_unused(options: UpcyclingOptions, source: Checkpoint, pooling: str, retrieval: Retrieval) -> None:
    """Raise `ValueError` if the options choose what the source's files determine, or what has no effect."""
    unused: dict[str, str] = {}
    if options.routing != "token":
        of_routing = "it is for token routing: add `--routing token` (in a recipe, model.kind=token_routed)"
        unused |= dict.fromkeys(TOKEN_ROUTING, of_routing)
    if retrieval.kind == "dense":
        unused |= dict.fromkeys(
            ("sparse_from", "max_active_dims"), "it is for sparse vectors: add `--retrieval sparse`"
        )
    sizes = {"latent_attention": (), "self_attention": ("pooling_latents",)}.get(pooling, POOLING_SIZES)
    unused |= dict.fromkeys(sizes, "it is for pooling by attention: add `--pooling latent_attention`")
    if pooling in POOLING_BY_ATTENTION and (options.routing == "token" or retrieval.kind != "dense"):
        unused["pooling"] = f"pooling by {pooling!r} needs task experts and dense vectors"
    fixed, why = _FIXED.get(_kind_of(source), ((), ""))
    unused |= dict.fromkeys(fixed, f"{source.name} {why}")
    if source.format == "nomic_moe":
        no_head = f"{source.name} has no head for masked language modelling; `--sparse-from embeddings` needs none"
        unused |= dict.fromkeys(["with_head", *["retrieval"] * retrieval.needs_head], no_head)
    for name in options.changed():
        if name in unused:
            raise ValueError(f"{name} cannot be chosen, {unused[name]}")


def _kind_of(source: Checkpoint) -> str:
    return TOKEN_ROUTED if source.format == "mote" and source.config.model_type == TOKEN_ROUTED else source.format


def as_published(options: UpcyclingOptions, source: Checkpoint) -> UpcyclingOptions:
    """Complete the options for NV-Embed; unless they name experts, with a single expert: the model as published."""
    one, tasks = nv_embed.EXPERT, options.tasks
    changes: dict[str, Any] = {**source.pooling}
    if options.experts is None:
        tasks = {one: one, "query": one, "document": one, **tasks}
        changes["experts"] = [one]
    if options.instructions:
        without = {task: "" for task in (one, "document") if task in tasks and task not in options.definitions}
        changes["instructions"] = {**without, **options.instruction_texts}
    return options.updated(**changes, tasks=tasks)


def retrieval_of(options: UpcyclingOptions, source: Checkpoint) -> Retrieval:
    """Return the vectors of the result: from the options, else from the source."""
    own = retrieval_in(source.folder)
    wanted = wanted_retrieval(own, options.retrieval, options.sparse_from, options.max_active_dims)
    if wanted.kind == "dense" and own.kind != "dense":
        raise ValueError(f"{source.name} gives {own.kind} vectors, and has no pooling for dense ones")
    return own if wanted.kind == "dense" else wanted


def config_of(options: UpcyclingOptions, source: Checkpoint, pooling: str) -> MoTEConfig:
    """Return the config of the result, not validated, and without instructions of its own."""
    kind, backbone = _kind_of(source), cast(Any, source.config)
    experts, tasks = options.experts, options.tasks
    if kind == "nomic_moe":
        settings = {
            "tasks": with_unseen_tasks(tasks),
            "default_task": options.default_task or "auto",
            "pooling": pooling,
        }
        return cast(MoTEConfig, type(backbone)(**{**backbone.to_dict(), **settings}))
    layer_path = options.layer_path
    if options.shared_modules is not None and layer_path is None and backbone.model_type in ARCHITECTURES:
        layer_path = ARCHITECTURES[backbone.model_type].layer_path
    more: dict[str, Any] = {name: getattr(options, name) for name in (*TOKEN_ROUTING, *POOLING_SIZES)}
    if pooling in POOLING_BY_ATTENTION:
        model_type = ATTENTION_POOLING
    elif options.routing == "token":
        model_type = TOKEN_ROUTED
    elif kind == TOKEN_ROUTED:
        model_type = "mote_hierarchical"
    else:
        model_type = "mote"
    if kind == TOKEN_ROUTED and experts is None:
        experts, tasks = backbone.experts, {**backbone.tasks, **tasks}
    return mote_class(model_type, "config")(
        backbone_config=backbone,
        pooling=pooling,
        experts=experts,
        tasks=with_unseen_tasks(tasks),
        mote_layers=options.layers or "every",
        default_task=options.default_task or "auto",
        layer_path=layer_path,
        shared_modules=options.shared_modules,
        **{name: value for name, value in more.items() if value is not None},
    )


def with_unseen_tasks(tasks: dict[str, str]) -> dict[str, str]:
    """Add the tasks that no expert is trained on to a mapping task → expert, each with the expert that serves it."""
    return {**{task: tasks[like] for task, like in UNSEEN_TASKS.items() if like in tasks}, **tasks}


def instructions_of(options: MoTESettings, config: MoTEConfig, of_source: dict[str, str]) -> dict[str, str]:
    """Return the instructions of a result: for each task from the options, else from the source.

    `query` follows `search_query`, and so on. A model that was trained without instructions gets none: they would
    change its embeddings for the worse.
    """
    given = options.instruction_texts if options.instructions else dict.fromkeys(config.tasks, "")
    made = {task: instruction_with(definition, options.template) for task, definition in options.definitions.items()}
    texts = {**of_source, **given, **made}
    for task, like in UNSEEN_TASKS.items():
        together = like not in config.experts and task in config.tasks and config.tasks[task] == config.tasks.get(like)
        if together and like in texts:
            texts.setdefault(task, texts[like])
    return texts


def source_instructions(options: MoTESettings, config: MoTEConfig, source: Checkpoint) -> dict[str, str]:
    """Return the instructions that a source was trained with; if it has none, those that the result starts with."""
    own, prompts = {}, source_prompts(source)
    if is_mote(source.config):
        own = {task: text for task, text in source.config.instructions.items() if task in config.tasks}
        prompts = {**(prompts_of(source.config) if any(own.values()) else {}), **prompts}
    if prompts:
        return {**own, **instructions_from(prompts, config)}
    for name, prompts in _PRESCRIBED.items():
        if re.fullmatch(name, source.public_name.rpartition("/")[2]):
            return instructions_from(prompts, config)
    is_embedder = bool(Pipeline.read(source.folder).modules)
    papers = not options.definitions and (options.paper_instructions or not is_embedder)
    return {task: PAPER_INSTRUCTIONS[task] for task in config.experts if papers and task in PAPER_INSTRUCTIONS} | own


def instructions_from(prompts: dict[str, str], config: MoTEConfig) -> dict[str, str]:
    """Take over the prompts of a source, which was trained with them, as instructions.

    1. A prompt under MTEB's name of a task counts as the task's.
    2. The prompt of a task also becomes that of its expert, unless the expert has its own. A prompt with text takes
       precedence over an empty one.
    3. The prompt of an unseen task, such as `sts`, is for this task only: its expert is trained for something else.
    4. Queries and documents get what Sentence-Transformers puts in front of them, possibly nothing.
    """
    roles = {role: prompts.get(role, "") for role in ROLE_HINTS}
    for name in {"passage", "corpus"} & config.tasks.keys() & prompts.keys():  # which somebody has made a task
        roles["document"] = prompts[name]
    if any(roles.values()):  # Sentence-Transformers adds empty ones to every model
        prompts = {**prompts, **roles}
    under_mteb_names = {MTEB_PROMPTS[name]: prompts[name] for name in MTEB_PROMPTS if name in prompts}
    texts = {task: text for task, text in {**under_mteb_names, **prompts}.items() if task in config.tasks}
    of_unseen = UNSEEN_TASKS.keys() - {*ROLE_HINTS}
    served = [(config.tasks[task], text) for task, text in texts.items() if task not in of_unseen]
    of_experts = dict(sorted(served, key=lambda of_task: bool(of_task[1])))
    kept = {task: text for task, text in texts.items() if task not in ROLE_HINTS or any(roles.values())}
    return {**of_experts, **kept}
