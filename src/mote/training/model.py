"""The model that a recipe trains: a MoTE, its token-routed counterpart, or a dense model."""

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import SentenceTransformer, SparseEncoder
from sentence_transformers.sentence_transformer.modules import Pooling
from torch import nn

from mote.checkpoints import sentence_transformers as st
from mote.checkpoints.bidirectional import is_bidirectional, make_bidirectional
from mote.checkpoints.models import load_dense, load_tokenizer
from mote.checkpoints.reading import Checkpoint, is_mote, open_checkpoint
from mote.checkpoints.st_settings import (
    instruction_pooling_in,
    retrieval_in,
    write_instruction_pooling,
    write_retrieval,
)
from mote.checkpoints.staging import ModelStaging
from mote.checkpoints.tensors import experts_are_copies
from mote.checkpoints.tokens import apply_end_token, with_padding_token
from mote.inference.loading import require_all_weights
from mote.remote.configuration_mote import MoTEConfig
from mote.training.adapters import adapt, network_of, share_weights
from mote.training.model_settings import ModelSettings
from mote.training.names import names_of, retrieval_of, set_router_loss, upcycling_options
from mote.training.processes import processes
from mote.training.recipe import Recipe
from mote.training.run_folder import START_FOLDER
from mote.upcycling.upcycle import upcycle

logger = logging.getLogger(__name__)


def build_model(
    recipe: Recipe, source: Checkpoint, scratch: Path
) -> tuple[SentenceTransformer | SparseEncoder, MoTEConfig]:
    """Build the model that a recipe trains, and a config with its tasks and instructions; errors as in `names_of`.

    A model that is made from the source (upcycled, for example) is written into `.mote-start` in the folder `scratch`.
    """
    settings, adapters = recipe.model, recipe.training.peft
    names = names_of(recipe, source)
    model: SentenceTransformer | SparseEncoder
    torch.manual_seed(recipe.training.seed)  # for the new weights of a token router
    if settings.kind == "dense":
        model = _dense_model(recipe, source, scratch / START_FOLDER, names)
    else:
        folder, retrieval = _mote_folder(recipe, source, scratch / START_FOLDER), retrieval_of(recipe, source)
        encoder: Any = SentenceTransformer if retrieval.kind == "dense" else SparseEncoder
        start = open_checkpoint(str(folder))
        shared = adapters is not None and experts_are_copies(start.weights, start.config)
        only_one = {"config_kwargs": {"experts": names.experts[:1]}} if shared else {}
        model = encoder(str(folder), trust_remote_code=True, **_loading(settings), **only_one)
        if shared:
            share_weights(network_of(model))
        names = network_of(model).config
        set_router_loss(names, settings)
    with_padding_token(model.tokenizer)
    apply_end_token(model.tokenizer, source, settings.end_token)
    if settings.max_length is not None:
        model.max_seq_length = settings.max_length
    if settings.dropout is not None:
        set_dropout(model, settings.dropout)
    only_experts = recipe.training.only_experts
    if only_experts is not None:
        _freeze_all_but(model, only_experts)
    if adapters is not None:
        adapt(network_of(model), adapters, only_experts)
        base = network_of(model).peft_config["default"]
        base.base_model_name_or_path = str(source.folder.resolve()) if source.is_local else source.name
        base.revision = source.revision
    return model, names


def _dense_model(recipe: Recipe, source: Checkpoint, folder: Path, names: MoTEConfig) -> SentenceTransformer:
    """Load a dense model as the recipe describes it, from the source's own folder or via `folder`."""
    settings = recipe.model
    with processes().main_process_first():
        native = native_folder(source, folder / "native", settings.bidirectional)
    own = instruction_pooling_in(native)
    trusted = settings.trust_remote_code or (source.is_local and own != "included")  # which our own code does
    model = SentenceTransformer(str(native), trust_remote_code=trusted, **_loading(settings))
    require_all_weights(model, str(native))
    model.prompts = {**st.prompts_of(names)}
    if model.default_prompt_name not in (None, *model.prompts):  # Sentence-Transformers would refuse to load the result
        logger.warning("The default prompt %r is not of a task, and no longer the default", model.default_prompt_name)
        model.default_prompt_name = None
    if settings.pooling is not None:
        _set_pooling(model, settings.pooling)
    if settings.instruction_pooling in (None, own):
        return model
    with processes().main_process_first():
        if not (folder / "pooled").exists():
            model.save_pretrained(str(folder / "pooled"), create_model_card=False)
            write_instruction_pooling(folder / "pooled", settings.instruction_pooling)
    return SentenceTransformer(str(folder / "pooled"), trust_remote_code=True, **_loading(settings))


def _mote_folder(recipe: Recipe, source: Checkpoint, folder: Path) -> Path:
    """Return the folder of a MoTE as the recipe describes it: the source's own, or `folder`, which is then written."""
    retrieval, pooled = retrieval_of(recipe, source), recipe.model.instruction_pooling
    as_source = retrieval == retrieval_in(source.folder) and pooled in (None, instruction_pooling_in(source.folder))
    if is_mote(source.config) and as_source:
        return source.folder
    with processes().main_process_first(), _no_progress():
        if folder.exists():
            return folder
        if is_mote(source.config):
            _link(source.folder, folder)
        else:
            upcycle(source, folder, upcycling_options(recipe.model, recipe.retrieval))
        if retrieval != retrieval_in(folder):  # upcycling does not take the weight of a hybrid score
            write_retrieval(folder, retrieval)
        if pooled not in (None, instruction_pooling_in(folder)):
            write_instruction_pooling(folder, pooled)
    return folder


def _link(source: Path, folder: Path) -> None:
    """Copy a model's folder with links in place of files, which takes no space."""
    for path in source.rglob("*"):
        if path.is_file():
            link = folder / path.relative_to(source)
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(path.resolve())


def native_folder(source: Checkpoint, folder: Path, bidirectional: bool = False) -> Path:
    """Return a folder from which Sentence-Transformers loads a dense source with all its weights.

    It is the source's own, or `folder`, which is written unless it exists: if the source has a format that only this
    package reads (Nomic's first one), or is a decoder that is to attend in both directions.
    """
    if bidirectional or is_bidirectional(source.config):
        config = make_bidirectional(source.config, source.name)
        if not folder.exists():
            _link(source.folder, folder)
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


def _set_pooling(model: SentenceTransformer, pooling: str) -> None:
    """Set how a dense model pools; raise `ValueError` if it cannot pool so."""
    names: Any = {ours: theirs for theirs, ours in st.POOLING_NAMES.items()}
    modules = [module for module in model if isinstance(module, Pooling)]
    if pooling not in names or not modules:
        raise ValueError(f"model.pooling={pooling}: a dense model pools by `Pooling` ({', '.join(names)})")
    for module in modules:
        module.pooling_mode = names[pooling]


def _loading(settings: ModelSettings) -> dict[str, Any]:
    attention = {} if settings.attention is None else {"attn_implementation": settings.attention}
    return {"model_kwargs": {"dtype": torch.float32, **attention}}  # also under mixed precision


def set_dropout(model: nn.Module, probability: float) -> None:
    """Set the dropout of all hidden states and attention probabilities of a model."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = probability
        if isinstance(getattr(module, "attention_dropout", None), int | float):
            module.attention_dropout = probability  # type: ignore[assignment]


@contextlib.contextmanager
def _no_progress() -> Iterator[None]:
    """Silence the progress messages of upcycling."""
    package = logging.getLogger("mote")
    level = package.level
    package.setLevel(logging.WARNING)
    try:
        yield
    finally:
        package.setLevel(level)


def _freeze_all_but(model: SentenceTransformer | SparseEncoder, experts: list[str]) -> None:
    """Freeze everything but some experts: frozen weights get no gradients and no weight decay."""
    model.requires_grad_(False)
    for block in network_of(model).blocks:
        for name in experts:
            block.experts[name].requires_grad_(True)
