"""Tasks, instructions and vectors of the model that a recipe trains, and whether its source suits the recipe."""

from collections.abc import Sequence
from typing import Any

from mote.checkpoints import sentence_transformers as st
from mote.checkpoints.bidirectional import is_bidirectional, make_bidirectional
from mote.checkpoints.definitions import instruction_with
from mote.checkpoints.models import positions_of
from mote.checkpoints.reading import TOKEN_ROUTED, Checkpoint, has_head, is_mote
from mote.checkpoints.st_settings import Retrieval, retrieval_in, wanted_retrieval
from mote.checkpoints.tensors import token_routing
from mote.remote.configuration_mote import MoTEConfig, alternatives
from mote.training.model_settings import ModelSettings, RetrievalSettings
from mote.training.recipe import Recipe, RunSettings
from mote.training.task_settings import DatasetSettings, TaskSettings
from mote.upcycling.configs import with_unseen_tasks
from mote.upcycling.instructions import instructions_from, instructions_of
from mote.upcycling.options import POOLING_SIZES, MoTESettings, UpcyclingOptions
from mote.upcycling.plan import plan_upcycling

ROUTERS = ("num_experts", "num_experts_per_tok", "norm_topk_prob", "router_aux_loss_type")
"""Settings that a token-routed model keeps."""
SHARED = "shared"
"""Part of a MoTE in `training.start_weight`: all weights but those of its experts."""


def names_of(recipe: Recipe, source: Checkpoint) -> MoTEConfig:
    """Return the tasks and instructions of the model that a recipe trains, without its weights.

    Raises:
        ValueError: If the source does not suit the recipe, or the recipe names a task that the model does not know.
    """
    settings = recipe.model
    retrieval_of(recipe, source)
    if is_mote(source.config):
        names: Any = matching_config(settings, source)
        if not settings.instructions and any(map(names.instruction_of, names.tasks)):
            raise ValueError(
                f"model.instructions is false, but {settings.source} has instructions: remove them first, as in "
                f"`mote set {settings.source} --out DIR --instruction TASK=`"
            )
    elif settings.kind == "dense":
        if settings.bidirectional:
            make_bidirectional(source.config, source.name)  # or an error
        # The tasks and instructions of a MoTE upcycled from it.
        names = tasks_of(settings)
        of_source = instructions_from(st.source_prompts(source), names)
        names.instructions = instructions_of(upcycling_options(settings), names, of_source)
        names.validate()
    else:
        names = plan_upcycling(source, options=upcycling_options(settings, recipe.retrieval)).config
    given: list[TaskSettings | DatasetSettings] = [*recipe.tasks.values()]
    given += [dataset for task in recipe.tasks.values() for dataset in task.datasets]
    check_fit(recipe, source, names, [name for one in given for name in (one.anchor, one.positive) if name])
    _check_parts(recipe, names)
    _check_peft(recipe, source, names)
    return names


def encodings(names: MoTEConfig, kind: str) -> dict[str, dict[str, Any]]:
    """Return the arguments of `encode` for the texts of each task, given the model's kind.

    An empty prompt stays empty, where none at all would be the model's default prompt.
    """
    return {
        task: {"prompt": names.instruction_of(task), **({"task": task} if kind == "mote" else {})}
        for task in names.tasks
    }


def tasks_of(settings: ModelSettings) -> MoTEConfig:
    """Return a config with the experts and tasks that a recipe names."""
    return MoTEConfig(experts=settings.experts, tasks=with_unseen_tasks(settings.tasks))  # type: ignore[arg-type]  # None: default


def upcycling_options(settings: ModelSettings, retrieval: RetrievalSettings | None = None) -> UpcyclingOptions:
    """Return the recipe's settings of upcycling."""
    shared = {name: getattr(settings, name) for name in MoTESettings.model_fields}
    if not settings.definitions:
        shared["template"] = None  # it may only be for definitions of datasets
    if settings.kind == "token_routed":
        shared["routing"] = "token"
    if retrieval is not None and retrieval.kind != "dense":
        shared |= {name: getattr(retrieval, name) for name in ("sparse_from", "max_active_dims")}
        shared["retrieval"] = retrieval.kind
    return UpcyclingOptions(**shared)


def retrieval_of(recipe: Recipe, source: Checkpoint) -> Retrieval:
    """Return the vectors that a recipe's model gives; settings that it leaves out are as in the source."""
    own, wanted = retrieval_in(source.folder), recipe.retrieval
    if wanted.kind == "dense":
        if own.kind != "dense":
            raise ValueError(f"{source.name} gives {own.kind} vectors: set retrieval.kind={own.kind}")
        return own
    retrieval = wanted_retrieval(own, wanted.kind, wanted.sparse_from, wanted.max_active_dims, wanted.weight)
    if is_mote(source.config) and retrieval.needs_head and not has_head(source.config):
        raise ValueError(
            f"{source.name} has no head for masked language modelling, which sparse vectors are made from: set "
            "retrieval.sparse_from=embeddings, or start from a model with a head (`mote pretrain`, "
            "`mote upcycle --with-head`)"
        )
    return retrieval


def set_router_loss(config: MoTEConfig, settings: ModelSettings) -> None:
    """Let the recipe decide on the weight of a token-routed model's load-balancing loss, if it names one."""
    routing = token_routing(config)
    if routing is not None and settings.router_aux_loss_coef is not None:
        routing.router_aux_loss_coef = settings.router_aux_loss_coef


def matching_config(settings: ModelSettings, source: Checkpoint) -> MoTEConfig:
    """Return the config of a source that already is a MoTE, with the recipe's weight of the load-balancing loss."""
    config: Any = source.config
    name, found = settings.source, "token_routed" if config.model_type == TOKEN_ROUTED else "mote"
    if found != settings.kind:
        raise ValueError(
            f"{name} is a MoTE of the kind {found!r}, but the recipe says model.kind={settings.kind}: set it to "
            f"{found}, or make another model first (`mote upcycle` adds task experts, `mote average` removes them)"
        )
    if not source.is_local and not settings.trust_remote_code:
        raise ValueError(f"{name} comes with code of its own: read it, then set model.trust_remote_code=true")
    if wrong := _differing(settings, config):
        raise ValueError(
            f"{name} is already a MoTE, and differs from the recipe in {', '.join(wrong)}. Its experts: "
            f"{', '.join(config.experts)}, in blocks {', '.join(map(str, config.mote_layer_indices))}"
        )
    set_router_loss(config, settings)
    return config


def _differing(settings: ModelSettings, config: MoTEConfig) -> list[str]:
    """Name the settings of a recipe that a MoTE does not have."""
    routing = token_routing(config)
    layout = MoTEConfig(backbone_config=config.backbone_config, mote_layers=settings.layers or config.mote_layers)
    defined = {task: instruction_with(text, settings.template) for task, text in settings.definitions.items()}
    instructions = {**settings.instruction_texts, **defined}
    differing = {
        "layers": layout.mote_layer_indices != config.mote_layer_indices,
        "experts": settings.experts is not None and {*settings.experts} != {*config.experts},
        "tasks": not settings.tasks.items() <= config.tasks.items(),
        "instructions": not instructions.items() <= config.instructions.items(),
        "bidirectional": settings.bidirectional and getattr(config.backbone_config, "is_causal", True),
        "router_aux_loss_coef": routing is None and settings.router_aux_loss_coef is not None,
    }
    for owner, kept in ((config, ("shared_modules", "pooling", *POOLING_SIZES)), (routing, ROUTERS)):
        for name in kept:
            differing[name] = getattr(settings, name) not in (None, getattr(owner, name, None))
    return [f"model.{name}" for name, differs in differing.items() if differs]


def check_fit(recipe: RunSettings, source: Checkpoint, config: MoTEConfig, tasks: Sequence[str]) -> None:
    """Check that a model takes texts of the recipe's length, can be trained in its precision, and knows its tasks."""
    length = recipe.model.max_length
    positions = None if length is None else positions_of(source)
    if length is not None and positions is not None and length > positions:
        raise ValueError(
            f"model.max_length is {length:,}, and {source.name} has learned positions for {positions:,} "
            "tokens: set it to at most that, or give the source rotary positions first (`mote lengthen`)"
        )
    routing = token_routing(config)
    if recipe.training.fp16 and routing is not None and routing.router_aux_loss_coef:
        raise ValueError(
            "The load-balancing loss of a token router is not scaled as gradients are in fp16, and would be lost: set "
            "training.bf16=true instead"
        )
    for task in tasks:
        config.expert_of(task)  # an error if the task is unknown


def _check_parts(recipe: Recipe, names: MoTEConfig) -> None:
    """Check that the model has the experts that are trained by themselves, and that every dataset trains one of them.

    The same for parts with a weight of the start.
    """
    only, weights = recipe.training.only_experts or [], recipe.training.start_weight
    parts = weights if isinstance(weights, dict) else {}
    for setting, given, known in (
        ("only_experts", only, names.experts),
        ("start_weight", parts, [SHARED, *names.experts]),
    ):
        for name in given:
            if known.count(name) != 1:  # an expert may be called "shared"
                raise ValueError(
                    f"training.{setting}: no single part of the model is called {name!r}." + alternatives(name, known)
                )
    for name, task in recipe.tasks.items() if only else ():
        for dataset in task.datasets:
            tasks = (dataset.anchor or task.anchor, dataset.positive or task.positive)
            trained = sorted({names.tasks[one] for one in tasks})
            if not set(trained) & set(only):
                raise ValueError(
                    f"tasks.{name}: {dataset.path} trains {' and '.join(trained)}, none of training.only_experts "
                    f"({', '.join(only)}): send it to one of them by `anchor`, or remove it (`tasks.{name}=null`)"
                )


def _check_peft(recipe: Recipe, source: Checkpoint, names: MoTEConfig) -> None:
    """Check that adapters suit the source, and that they are merged if no base could be loaded under them."""
    settings, kind = recipe.training.peft, recipe.model.kind
    if settings is None:
        return
    if token_routing(names) is not None:
        raise ValueError("training.peft: token-routed experts are stacked weights, which PEFT does not adapt here")
    changed = recipe.model.bidirectional or is_bidirectional(source.config) or source.format != "transformers"
    if not settings.merge and not is_mote(source.config) and (kind == "mote" or changed):
        raise ValueError(
            f"training.peft.merge=false: adapters are loaded on top of a model, but {source.name} is not yet the model "
            "that they are trained on. Merge them, or upcycle it first (`mote upcycle`), and set model.source to the "
            "result"
        )
