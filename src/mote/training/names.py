"""Tasks, instructions and vectors of the model that a recipe trains, and whether its source suits the recipe."""

import copy
from typing import Any

from mote.checkpoints import sentence_transformers as st
from mote.checkpoints.bidirectional import asks_for_both_directions, with_both_directions
from mote.checkpoints.definitions import instruction_with
from mote.checkpoints.models import positions_of
from mote.checkpoints.reading import TOKEN_ROUTED, Checkpoint, has_head, is_mote
from mote.checkpoints.retrieval import Retrieval, retrieval_in, wanted_retrieval
from mote.checkpoints.tensors import token_routing
from mote.remote.configuration_mote import MoTEConfig, alternatives
from mote.training.model_settings import ModelSettings, RetrievalSettings
from mote.training.recipe import Recipe
from mote.upcycling.configs import with_unseen_tasks
from mote.upcycling.instructions import instructions_from, instructions_of
from mote.upcycling.options import POOLING_BY_ATTENTION, POOLING_SIZES, TOKEN_ROUTING, UpcyclingOptions
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
    if recipe.training.peft is not None:
        _check_peft(recipe, source)
    if is_mote(source.config):
        names: Any = source.config
        check_mote(settings, names, source.is_local)
        if not settings.instructions and any(map(names.instruction_of, names.tasks)):
            raise ValueError(
                f"model.instructions is false, but {settings.source} has instructions: remove them first, as in "
                f"`mote set {settings.source} --out DIR instruction.TASK=`"
            )
        set_router_loss(names, settings)
    elif settings.kind == "dense":  # the tasks and instructions of a MoTE upcycled from it
        if settings.bidirectional:
            with_both_directions(source.config, source.name)  # or an error
        if settings.pooling in POOLING_BY_ATTENTION:
            raise ValueError(
                f"model.pooling={settings.pooling} is for model.kind=mote: for a dense model with this pooling, use a "
                "MoTE with one expert, as in model.experts=[all]"
            )
        names = tasks_of(settings)
        of_source = instructions_from(st.source_prompts(source), names)
        names.instructions = instructions_of(upcycling_options(settings), names, of_source)
        names.validate()
    else:
        names = plan_upcycling(source, options=upcycling_options(settings, recipe.retrieval)).config
    check_max_length(settings, source)
    _check_matryoshka(recipe, source)
    if recipe.training.fp16:
        refuse_fp16(names)
    _check_tasks(recipe, names)
    if recipe.training.only_experts is not None:
        _check_only_experts(recipe, names, recipe.training.only_experts)
    if isinstance(recipe.training.start_weight, dict):
        _check_start_weight(recipe, names, recipe.training.start_weight)
    return names


def encodings(names: MoTEConfig, kind: str) -> dict[str, dict[str, Any]]:
    """Return the arguments of `encode` for the texts of each task.

    An empty prompt stays empty, where none at all would be the model's default prompt.

    Args:
        names: Tasks and instructions.
        kind: `model.kind` of the recipe.
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
    vectors: dict[str, Any] = {}
    if retrieval is not None and retrieval.kind != "dense":
        names = {"sparse_from", "max_active_dims"}
        vectors = {"retrieval": retrieval.kind, **{name: getattr(retrieval, name) for name in names}}
    instructions = settings.instruction_texts
    if not settings.instructions and settings.definitions:
        raise ValueError("model.definitions are instructions, but model.instructions is false")
    if not settings.instructions:
        instructions = dict.fromkeys(tasks_of(settings).tasks, "")
    routers = {name: value for name in TOKEN_ROUTING if (value := getattr(settings, name)) is not None}
    if routers and settings.kind != "token_routed":
        raise ValueError(
            f"model.{', model.'.join(routers)}: for token-routed models, but the recipe says "
            f"model.kind={settings.kind}. Set model.kind=token_routed, or leave them out (`null`)"
        )
    return UpcyclingOptions(
        experts=settings.experts,
        layers=settings.layers,
        shared_modules=settings.shared_modules,
        bidirectional=settings.bidirectional,
        **{name: getattr(settings, name) for name in ("pooling", *POOLING_SIZES)},
        tasks=settings.tasks,
        instructions=instructions,
        definitions=settings.definitions,
        template=settings.template if settings.definitions else None,  # it may only be for definitions of datasets
        instruction_pooling=settings.instruction_pooling,
        end_token=settings.end_token,
        **vectors,
        **({"routing": "token", **routers} if settings.kind == "token_routed" else {}),
    )


def retrieval_of(recipe: Recipe, source: Checkpoint) -> Retrieval:
    """Return the vectors that a recipe's model gives; settings that it leaves out are as in the source.

    Raises:
        ValueError: If the source cannot give them.
    """
    own, wanted = retrieval_in(source.folder), recipe.retrieval
    if wanted.kind == "dense":
        if own.kind != "dense":
            raise ValueError(f"{source.name} gives {own.kind} vectors: set retrieval.kind={own.kind}")
        return own
    weight = 1.0 if wanted.weight == "tuned" else wanted.weight
    retrieval = wanted_retrieval(own, wanted.kind, wanted.sparse_from, wanted.max_active_dims, weight)
    if retrieval.kind == "hybrid" and own.kind == "sparse":
        raise ValueError(f"{source.name} only gives sparse vectors, and has no pooling for dense ones")
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


def check_mote(settings: ModelSettings, config: MoTEConfig, is_local: bool) -> None:
    """Check that a source that already is a MoTE matches the recipe."""
    name = settings.source
    if settings.kind == "dense":
        raise ValueError(f"{name} is a MoTE: set model.kind=mote, or average its experts first (`mote average`)")
    found = "token_routed" if config.model_type == TOKEN_ROUTED else "mote"
    if found != settings.kind:
        remedy = f": for task experts, run `mote upcycle --src {name}` first" if found == "token_routed" else ""
        raise ValueError(f"{name} is of the kind {found!r}, but the recipe says model.kind={settings.kind}{remedy}")
    if getattr(config, "expert_bits", None) is not None:
        raise ValueError(
            f"{name} has 8-bit experts, which cannot be trained: train the model as it was before `mote compress`, and "
            "compress the result"
        )
    if not is_local and not settings.trust_remote_code:
        raise ValueError(f"{name} comes with code of its own: read it, then set model.trust_remote_code=true")
    described = copy.copy(config)
    described.mote_layers = settings.layers
    defined = {
        task: instruction_with(definition, settings.template) for task, definition in settings.definitions.items()
    }
    routing = token_routing(config)
    differing = {
        "model.layers": described.mote_layer_indices != config.mote_layer_indices,
        "model.shared_modules": settings.shared_modules not in (None, config.shared_modules),
        "model.pooling": settings.pooling not in (None, config.pooling),
        **{f"model.{name}": _differs(settings, config, name) for name in POOLING_SIZES},
        "model.bidirectional": settings.bidirectional and getattr(config.backbone_config, "is_causal", True),
        "model.experts": settings.experts is not None and {*settings.experts} != {*config.experts},
        "model.tasks": not settings.tasks.items() <= config.tasks.items(),
        "model.instruction_texts": not settings.instruction_texts.items() <= config.instructions.items(),
        "model.definitions": not defined.items() <= config.instructions.items(),
        **{f"model.{name}": _differs(settings, routing, name) for name in ROUTERS},
        "model.router_aux_loss_coef": routing is None and settings.router_aux_loss_coef is not None,
    }
    wrong = [key for key, differs in differing.items() if differs]
    if wrong:
        raise ValueError(
            f"{name} is already a MoTE, and differs from the recipe in {', '.join(wrong)}. Its experts: "
            f"{', '.join(config.experts)}, in blocks {', '.join(map(str, config.mote_layer_indices))}"
        )


def _differs(settings: ModelSettings, config: Any, name: str) -> bool:
    return getattr(settings, name) not in (None, getattr(config, name, None))


def check_max_length(settings: ModelSettings, source: Checkpoint) -> None:
    """Raise `ValueError` if texts can be longer than a source with learned positions takes."""
    if settings.max_length is None:
        return
    positions = positions_of(source)
    if positions is not None and settings.max_length > positions:
        raise ValueError(
            f"model.max_length is {settings.max_length:,}, and {source.name} has learned positions for {positions:,} "
            "tokens: set it to at most that, or give the source rotary positions first (`mote lengthen`)"
        )


def _check_matryoshka(recipe: Recipe, source: Checkpoint) -> None:
    """Check that embeddings can be truncated to the recipe's dimensions; the library would fail at the first step."""
    if not isinstance(recipe.training.matryoshka, list):
        return
    whole = st.embedding_dimension(source, recipe.model.pooling)
    if above := [str(size) for size in recipe.training.matryoshka if size > whole]:
        raise ValueError(
            f"training.matryoshka: the embeddings of {source.name} have {whole} dimensions and cannot be truncated to "
            f"{', '.join(above)}. Choose dimensions up to {whole}, or `halves`"
        )


def refuse_fp16(config: MoTEConfig) -> None:
    """Raise `ValueError` if a model has a load-balancing loss."""
    routing = token_routing(config)
    if routing is not None and routing.router_aux_loss_coef:
        raise ValueError(
            "The load-balancing loss of a token router is not scaled as gradients are in fp16, and would be lost: set "
            "training.bf16=true instead"
        )


def _check_tasks(recipe: Recipe, names: MoTEConfig) -> None:
    """Check that the model knows every task of the recipe's data."""
    for name, task in recipe.tasks.items():
        for anchor, positive in [(task.anchor, task.positive), *((d.anchor, d.positive) for d in task.datasets)]:
            for model_task in (anchor, positive):
                if model_task and model_task not in names.tasks:
                    raise ValueError(
                        f"tasks.{name}: the model has no task {model_task!r}." + alternatives(model_task, names.tasks)
                    )


def _check_only_experts(recipe: Recipe, names: MoTEConfig, only: list[str]) -> None:
    """Check that the experts to train exist, and that every dataset trains one of them."""
    if recipe.model.kind != "mote":
        raise ValueError(f"training.only_experts: a model of the kind {recipe.model.kind!r} has no task experts")
    for expert in only:
        if expert not in names.experts:
            raise ValueError(
                f"training.only_experts: the model has no expert {expert!r}.{alternatives(expert, names.experts)} "
                "`mote experts add` makes a new one"
            )
    for name, task in recipe.tasks.items():
        for dataset in task.datasets:
            anchor = dataset.anchor or task.anchor
            positive = dataset.positive or task.positive
            trained = sorted({names.tasks[anchor], names.tasks[positive]})
            if not set(trained) & set(only):
                raise ValueError(
                    f"tasks.{name}: {dataset.path} trains {' and '.join(trained)}, none of training.only_experts "
                    f"({', '.join(only)}): send it to one of them by `anchor`, or remove it (`tasks.{name}=null`)"
                )


def _check_start_weight(recipe: Recipe, names: MoTEConfig, weights: dict[str, float]) -> None:
    """Check that a model has the parts whose weight of the start is given."""
    if recipe.model.kind != "mote":
        raise ValueError(
            f"training.start_weight: a model of the kind {recipe.model.kind!r} has no task experts. Give one number"
        )
    if SHARED in names.experts:
        raise ValueError(
            f"training.start_weight: {SHARED!r} stands for the shared weights, but an expert has this name. Give it "
            "another name (`mote experts rename`), or one number for all weights"
        )
    parts = [SHARED, *names.experts]
    for part in weights:
        if part not in parts:
            raise ValueError(f"training.start_weight: the model has no part {part!r}." + alternatives(part, parts))


def _check_peft(recipe: Recipe, source: Checkpoint) -> None:
    """Check that adapters suit the source, and that they are merged if no base could be loaded under them."""
    config: Any = source.config
    if recipe.model.kind == "mote" and token_routing(config) is not None:
        raise ValueError("training.peft: token-routed experts are stacked weights, which PEFT does not adapt here")
    if recipe.training.peft is None or recipe.training.peft.merge:
        return
    if recipe.model.kind == "mote" and not is_mote(config):
        raise ValueError(
            f"training.peft.merge=false: adapters are loaded on top of a model, but {source.name} is not a MoTE yet. "
            "Upcycle it first (`mote upcycle`), and set model.source to the result"
        )
    changed = recipe.model.bidirectional or asks_for_both_directions(config)
    if recipe.model.kind == "dense" and (source.format != "transformers" or changed):
        raise ValueError(
            f"training.peft.merge=false: the libraries would load adapters on top of {source.name} as it is, but the "
            f"trained model has {'another direction of attention' if changed else 'another format'}: merge them"
        )
