"""The model that a recipe trains: its tasks and instructions, whether its source suits the recipe, its weights."""

import logging
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import SentenceTransformer, SparseEncoder
from sentence_transformers.sentence_transformer.modules import Pooling
from torch import nn

from mote import remote
from mote.checkpoints import sentence_transformers as st
from mote.checkpoints.bidirectional import is_bidirectional, make_bidirectional
from mote.checkpoints.definitions import instruction_with
from mote.checkpoints.models import load_dense, load_tokenizer, positions_of
from mote.checkpoints.reading import TOKEN_ROUTED, Checkpoint, has_head, is_mote, open_checkpoint
from mote.checkpoints.st_settings import (
    Retrieval,
    code_of_others,
    instruction_pooling_in,
    retrieval_in,
    wanted_retrieval,
    write_instruction_pooling,
    write_retrieval,
)
from mote.checkpoints.staging import ModelStaging
from mote.checkpoints.tensors import experts_are_copies, token_routing
from mote.checkpoints.tokens import apply_end_token, with_padding_token
from mote.experts.editing import add, with_expert
from mote.inference.loading import require_all_weights
from mote.remote.configuration_mote import PAPER_INSTRUCTIONS, MoTEConfig, require_known
from mote.reporting import quieted
from mote.training.adapters import adapt, network_of, share_weights
from mote.training.processes import processes
from mote.training.recipe import ModelSettings, Recipe, RetrievalSettings, RunSettings
from mote.training.run_folder import START_FOLDER
from mote.upcycling.configs import instructions_of, source_instructions, with_unseen_tasks
from mote.upcycling.options import POOLING_SIZES, TOKEN_ROUTING, MoTESettings, UpcyclingOptions
from mote.upcycling.plan import plan_upcycling
from mote.upcycling.upcycle import upcycle

SHARED = "shared"
"""Part of a MoTE in `training.start_weight`: all weights but those of its experts."""

logger = logging.getLogger(__name__)


def names_of(recipe: Recipe, source: Checkpoint) -> MoTEConfig:
    """Return the tasks and instructions of the model that a recipe trains; an error if its source does not suit it."""
    settings = recipe.model
    retrieval_of(recipe, source)
    if is_mote(source.config):
        names = matching_config(
            settings, source, [name for name in recipe.training.only_experts or () if name in recipe.tasks]
        )
    elif settings.kind == "dense":
        if settings.bidirectional:
            make_bidirectional(source.config, source.name)  # or an error
        # The tasks and instructions of a MoTE upcycled from it.
        names = tasks_of(settings)
        names.instructions = instructions_of(settings, names, source_instructions(settings, names, source))
        names.validate()
    else:
        names = plan_upcycling(source, options=upcycling_options(settings, recipe.retrieval)).config
    check_fit(recipe, source, names, [name for one in recipe.tasks.values() for name in (one.anchor, one.positive)])
    if conflicts := [*_conflicts(recipe, source, names)]:
        raise ValueError("; ".join(conflicts))
    return names


def _conflicts(recipe: Recipe, source: Checkpoint, names: MoTEConfig) -> Iterator[str]:
    """Name settings of the recipe that do not go with its source."""
    settings, training, peft = recipe.model, recipe.training, recipe.training.peft
    upcycled = not is_mote(source.config)
    runs_code = not upcycled or (settings.kind == "dense" and instruction_pooling_in(source.folder) != "included")
    if runs_code and not settings.trust_remote_code and (others := code_of_others(source.folder)):
        yield f"{source.name} has code of its own ({', '.join(others)}): read it, then set model.trust_remote_code=true"
    if not upcycled and not settings.instructions and any(map(names.instruction_of, names.tasks)):
        yield f"model.instructions is false, but {source.name} has instructions: remove them first (`mote set`)"
    if not upcycled and retrieval_of(recipe, source).needs_head and not has_head(source.config):
        yield (
            f"{source.name} has no head for masked language modelling, which sparse vectors are made from: set "
            "retrieval.sparse_from=embeddings, or start from a model with a head (`mote pretrain`, "
            "`mote upcycle --with-head`)"
        )
    for name in training.start_weight if isinstance(training.start_weight, dict) else ():
        require_known(name, [SHARED, *names.experts], "part of the model:")
    if training.only_experts is not None:
        yield from _untrained(recipe, names, training.only_experts)
    if peft is not None and token_routing(names) is not None:
        yield "training.peft: token-routed experts are stacked weights, which PEFT does not adapt here"
    changed = settings.bidirectional or is_bidirectional(source.config) or source.format != "transformers"
    if peft is not None and not peft.merge and upcycled and (settings.kind == "mote" or changed):
        yield (
            f"training.peft.merge=false: adapters are loaded on top of a model, but {source.name} is not yet the model "
            "that they are trained on: merge them, or upcycle it first (`mote upcycle`)"
        )


def _untrained(recipe: Recipe, names: MoTEConfig, trained: list[str]) -> Iterator[str]:
    """Name tasks that train none of the only experts to train."""
    for name in trained:
        require_known(name, names.experts, "expert to train:")
    for name, task in recipe.tasks.items():
        experts = sorted({names.tasks[task.anchor], names.tasks[task.positive]})
        if not set(experts) & set(trained):
            yield (
                f"tasks.{name} trains {' and '.join(experts)}, none of training.only_experts ({', '.join(trained)}): "
                f"send it to one of them by `anchor`, or remove it (`tasks.{name}=null`)"
            )


def encodings(names: MoTEConfig, kind: str) -> dict[str, dict[str, Any]]:
    """Return the arguments of `encode` for the texts of each task, given the model's kind."""
    # An empty prompt stays empty, where none at all would be the model's default prompt.
    prompts = {task: {"prompt": names.instruction_of(task)} for task in names.tasks}
    return {task: {**prompt, "task": task} for task, prompt in prompts.items()} if kind == "mote" else prompts


def tasks_of(settings: ModelSettings) -> MoTEConfig:
    """Return a config with the experts and tasks that a recipe names."""
    return MoTEConfig(experts=settings.experts, tasks=with_unseen_tasks(settings.tasks))  # type: ignore[arg-type]  # None: default


def upcycling_options(settings: ModelSettings, retrieval: RetrievalSettings | None = None) -> UpcyclingOptions:
    """Return the recipe's settings of upcycling."""
    shared = {name: getattr(settings, name) for name in MoTESettings.model_fields}
    shared["routing"] = "token" if settings.kind == "token_routed" else "task"
    if retrieval is not None and retrieval.kind != "dense":
        shared |= {name: getattr(retrieval, name) for name in ("sparse_from", "max_active_dims")}
        shared["retrieval"] = retrieval.kind
    return UpcyclingOptions(**shared)


def retrieval_of(recipe: Recipe, source: Checkpoint) -> Retrieval:
    """Return the vectors that a recipe's model gives; settings that it leaves out are as in the source."""
    own, wanted = retrieval_in(source.folder), recipe.retrieval
    if wanted.kind != "dense":
        return wanted_retrieval(own, wanted.kind, wanted.sparse_from, wanted.max_active_dims, wanted.weight)
    if own.kind != "dense":
        raise ValueError(f"{source.name} gives {own.kind} vectors: set retrieval.kind={own.kind}")
    return own


def set_router_loss(config: MoTEConfig, settings: ModelSettings) -> None:
    """Let the recipe decide on the weight of a token-routed model's load-balancing loss, if it names one."""
    routing = token_routing(config)
    if routing is not None and settings.router_aux_loss_coef is not None:
        routing.router_aux_loss_coef = settings.router_aux_loss_coef


def set_instructions(config: MoTEConfig, settings: ModelSettings) -> bool:
    """Give a MoTE that was made without instructions the paper's, if the recipe wants them; return whether it did."""
    wanted = settings.paper_instructions and not config.instructions and not settings.definitions
    if wanted:
        config.instructions = {task: text for task, text in PAPER_INSTRUCTIONS.items() if task in config.experts}
    return wanted


def matching_config(settings: ModelSettings, source: Checkpoint, experts: Sequence[str] = ()) -> MoTEConfig:
    """Return the config of a source that already is a MoTE, with the recipe's weight of the load-balancing loss.

    It gets those of some experts that it lacks. It must have all other settings that the recipe names.
    """
    config: Any = source.config
    for name in experts if config.routes_by_task else ():
        if name not in config.experts:
            config = with_expert(config, name, {}, [task for task, own in settings.tasks.items() if own == name])
    set_router_loss(config, settings)
    set_instructions(config, settings)
    layout = MoTEConfig(backbone_config=config.backbone_config, mote_layers=settings.layers or config.mote_layers)
    defined = {task: instruction_with(text, settings.template) for task, text in settings.definitions.items()}
    own = {
        "kind": "token_routed" if config.model_type == TOKEN_ROUTED else "mote",
        "layers": config.mote_layer_indices,
        "experts": {*config.experts},
        "tasks": config.tasks,
        "instructions": config.instructions,
        "bidirectional": not getattr(config.backbone_config, "is_causal", True),
        "default_task": config.default_task or "none",
        **{name: getattr(config, name, None) for name in ("shared_modules", "pooling", *POOLING_SIZES)},
        **{name: getattr(token_routing(config), name, None) for name in TOKEN_ROUTING},
    }
    wanted = {
        **{name: getattr(settings, name) for name in own},
        "layers": layout.mote_layer_indices,
        "experts": None if settings.experts is None else {*settings.experts},
        "tasks": {**config.tasks, **settings.tasks},
        "instructions": {**config.instructions, **settings.instruction_texts, **defined},
        "bidirectional": settings.bidirectional or None,
    }
    if wrong := [f"model.{name}" for name, value in wanted.items() if value not in (None, own[name])]:
        raise ValueError(
            f"{source.name} is already a MoTE, and differs from the recipe in {', '.join(wrong)}. It is of the kind "
            f"{own['kind']!r}, with the experts {', '.join(config.experts)} in blocks {own['layers']}"
        )
    return config


def check_fit(recipe: RunSettings, source: Checkpoint, config: MoTEConfig, tasks: Sequence[str]) -> None:
    """Check that a model takes texts of the recipe's length, can be trained in its precision, and knows its tasks."""
    length, routing = recipe.model.max_length, token_routing(config)
    positions = None if length is None else positions_of(source)
    if length is not None and positions is not None and length > positions:
        raise ValueError(
            f"model.max_length is {length:,}, and {source.name} has learned positions for {positions:,} "
            "tokens: set it to at most that, or give the source rotary positions first (`mote lengthen`)"
        )
    if recipe.training.fp16 and routing is not None and routing.router_aux_loss_coef:
        raise ValueError(
            "The load-balancing loss of a token router is not scaled as gradients are in fp16, and would be lost: set "
            "training.bf16=true instead"
        )
    for task in tasks:
        config.expert_of(task)  # an error if the task is unknown


def build_model(
    recipe: Recipe, source: Checkpoint, scratch: Path
) -> tuple[SentenceTransformer | SparseEncoder, MoTEConfig]:
    """Build the model that a recipe trains, and a config with its tasks and instructions.

    A model that is made from the source (upcycled, for example) is written into `.mote-start` in the folder `scratch`.
    """
    settings, adapters, only_experts = recipe.model, recipe.training.peft, recipe.training.only_experts
    names = names_of(recipe, source)
    model: SentenceTransformer | SparseEncoder
    torch.manual_seed(recipe.training.seed)  # for the new weights of a token router
    if settings.kind == "dense":
        model = _dense_model(recipe, source, scratch / START_FOLDER, names)
    else:
        model = _mote(recipe, source, scratch / START_FOLDER, names)
        names = network_of(model).config
    with_padding_token(model.tokenizer)
    apply_end_token(model.tokenizer, source, settings.end_token)
    if settings.max_length is not None:
        model.max_seq_length = settings.max_length
    if settings.dropout is not None:
        set_dropout(model, settings.dropout)
    if only_experts is not None:  # everything else gets no gradients and no weight decay
        model.requires_grad_(False)
        for block in network_of(model).blocks:
            for name in only_experts:
                block.experts[name].requires_grad_(True)
    if adapters is not None:
        adapt(network_of(model), adapters, only_experts)
        base = network_of(model).peft_config["default"]
        base.base_model_name_or_path = str(source.folder.resolve()) if source.is_local else source.name
        base.revision = source.revision
    return model, names


def _loading(settings: ModelSettings) -> dict[str, Any]:
    attention = {} if settings.attention is None else {"attn_implementation": settings.attention}
    return {"model_kwargs": {"dtype": torch.float32, **attention}}  # also under mixed precision


def _dense_model(recipe: Recipe, source: Checkpoint, folder: Path, names: MoTEConfig) -> SentenceTransformer:
    """Load a dense model as the recipe describes it, from the source's own folder or via `folder`."""
    settings = recipe.model
    with processes().main_process_first():
        native = native_folder(source, folder / "native", settings.bidirectional)
    own, trusted = instruction_pooling_in(native), settings.trust_remote_code
    if own != "included" and not trusted:  # which our own code does
        with processes().main_process_first():
            if not (folder / "ours").exists():
                _link(native, folder / "ours", trusted)
        native, trusted = folder / "ours", True
    model = SentenceTransformer(str(native), trust_remote_code=trusted, **_loading(settings))
    require_all_weights(model, str(native))
    model.prompts = {**st.prompts_of(names)}
    if model.default_prompt_name not in (None, *model.prompts):  # Sentence-Transformers would refuse to load the result
        logger.warning("The default prompt %r belongs to no task, and is dropped as default", model.default_prompt_name)
        model.default_prompt_name = None
    if settings.pooling is not None:
        modes = {ours: theirs for theirs, ours in st.POOLING_NAMES.items()}
        pooling = [module for module in model if isinstance(module, Pooling)]
        if not pooling:
            raise ValueError(f"model.pooling: {source.name} has no module `Pooling`")
        for module in pooling:
            module.pooling_mode = modes[settings.pooling]
    if settings.instruction_pooling in (None, own):
        return model
    with processes().main_process_first():
        if not (folder / "pooled").exists():
            model.save_pretrained(str(folder / "pooled"), create_model_card=False)
            write_instruction_pooling(folder / "pooled", settings.instruction_pooling)
    return SentenceTransformer(str(folder / "pooled"), trust_remote_code=True, **_loading(settings))


def _mote(recipe: Recipe, source: Checkpoint, scratch: Path, names: MoTEConfig) -> Any:
    """Load a MoTE as the recipe describes it, via the folder `scratch`."""
    settings, folder = recipe.model, _mote_folder(recipe, source, scratch)
    encoder: Any = SentenceTransformer if retrieval_of(recipe, source).kind == "dense" else SparseEncoder
    start = open_checkpoint(str(folder))
    shared = recipe.training.peft is not None and experts_are_copies(start.weights, start.config)
    only_one = {"config_kwargs": {"experts": names.experts[:1]}} if shared else {}
    model = encoder(str(folder), trust_remote_code=True, **_loading(settings), **only_one)
    if shared:
        share_weights(network_of(model))
    config = network_of(model).config
    for name in [name for name in names.experts if name not in config.experts]:  # to train, on a source that is a MoTE
        tasks = [task for task, own in names.tasks.items() if own == name and task != name]
        add(network_of(model), name, config.expert_of(config.default_task or config.experts[0]), tasks=tasks)
    set_router_loss(config, settings)
    if set_instructions(config, settings):
        model.prompts |= st.prompts_of(config)
        model[0].on_model_ready(model)
    return model


def _mote_folder(recipe: Recipe, source: Checkpoint, folder: Path) -> Path:
    """Write the folder of a MoTE as the recipe describes it, with links to the source's files if it is one."""
    retrieval, pooled = retrieval_of(recipe, source), recipe.model.instruction_pooling
    with processes().main_process_first(), quieted("mote", level=logging.WARNING):  # without upcycling's progress
        if folder.exists():
            return folder
        if is_mote(source.config):
            _link(source.folder, folder, recipe.model.trust_remote_code)
        else:
            upcycle(source, folder, upcycling_options(recipe.model, recipe.retrieval))
        if retrieval != retrieval_in(folder):  # upcycling does not take the weight of a hybrid score
            write_retrieval(folder, retrieval)
        if pooled not in (None, instruction_pooling_in(folder)):
            write_instruction_pooling(folder, pooled)
    return folder


def native_folder(source: Checkpoint, folder: Path, bidirectional: bool = False) -> Path:
    """Return a folder from which Sentence-Transformers loads a dense source with all its weights.

    It is `folder`, which is written unless it exists, for Nomic's first format and decoders that are to attend in both
    directions; else the source's own.
    """
    if bidirectional or is_bidirectional(source.config):
        config = make_bidirectional(source.config, source.name)
        if not folder.exists():
            _link(source.folder, folder, trusted=True)
            (folder / "config.json").unlink()
            config.save_pretrained(folder)
        return folder
    if source.format != "nomic":
        return source.folder
    if not folder.exists():
        config = MoTEConfig(pooling=st.source_pooling(source))
        config.instructions = dict.fromkeys(config.tasks, "")
        dense, _ = load_dense(source)
        with ModelStaging(folder) as staged:
            dense.save_pretrained(staged, save_original_format=False)  # native names, not the source's
            load_tokenizer(source).save_pretrained(staged)
            st.write_sentence_transformer(dense, source, staged, config)
    return folder


def _link(source: Path, folder: Path, trusted: bool) -> None:
    """Copy a model's folder with links in place of files, which takes no space; unless trusted, with our code."""
    for path in source.rglob("*"):  # `copytree` would also copy that a folder cannot be written
        if path.is_file() and (trusted or path.suffix != ".py"):
            link = folder / path.relative_to(source)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(path.resolve())
    for file in () if trusted else Path(remote.__file__).parent.glob("*_mote.py"):
        shutil.copy(file, folder)


def set_dropout(model: nn.Module, probability: float) -> None:
    """Set the dropout of all hidden states and attention probabilities of a model."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = probability
        if isinstance(getattr(module, "attention_dropout", None), int | float):
            module.attention_dropout = probability  # type: ignore[assignment]
