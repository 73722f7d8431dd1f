"""Sentence-Transformers' files of a model made from another one: modules, pooling, prompts, also as MTEB names them."""

import logging
import shutil
from importlib.metadata import version
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from mote.checkpoints import nv_embed
from mote.checkpoints.plain import longest_sequence, pooling_modes
from mote.checkpoints.reading import ATTENTION_POOLING, Checkpoint, has_head, is_mote
from mote.checkpoints.st_settings import (
    ATTENTION_POOLING_MODULE,
    NORMALIZE,
    OUR_TRANSFORMER,
    POOLING,
    TRANSFORMER,
    Module,
    Pipeline,
    Retrieval,
    first_module,
)
from mote.remote.configuration_mote import MTEB_PROMPTS, ROLE_HINTS, MoTEConfig

logger = logging.getLogger(__name__)

# Sentence-Transformers' names of the poolings that MoTEConfig knows.
POOLING_NAMES = {"mean": "mean", "cls": "cls", "lasttoken": "last_token"}


def pipeline_of(source: Checkpoint) -> Pipeline:
    """Read the Sentence-Transformers files of a source, whose modules must not have code of their own."""
    pipeline = Pipeline.read(source.folder)
    for module in pipeline.modules:
        if not (module.type.startswith("sentence_transformers.") or module.code):
            raise ValueError(f"{source.name} has a module with code of its own, {module.type}, which is not copied")
    return pipeline


def source_pooling(source: Checkpoint) -> str:
    """Name the pooling of a source as MoTEConfig does; of a plain one, what Sentence-Transformers chooses."""
    for module in pipeline_of(source).modules:
        if module.pools:
            mode = _pooling_of(module)
            if mode not in POOLING_NAMES.values():
                raise ValueError(
                    f"{source.name} pools by {mode!r}; MoTE knows {', '.join(POOLING_NAMES)}. Another pooling can be "
                    "chosen with `--pooling`, but the embeddings would no longer be the source's."
                )
            return mode
    if is_mote(source.config):
        return str(source.config.pooling)
    architectures = source.config.architectures or [""]
    causal = architectures[0].endswith("ForCausalLM") and getattr(source.config, "is_causal", True)
    return "last_token" if causal else "mean"


def _pooling_of(module: Module) -> str:
    """Name the pooling of a module as MoTEConfig does; one that it does not know, as Sentence-Transformers does."""
    modes = pooling_modes(module.settings)
    return POOLING_NAMES.get(modes[0], modes[0]) if len(modes) == 1 else str(tuple(modes))


def embedding_dimension(source: Checkpoint) -> int:
    """Return the dimension of a source's embeddings."""
    dimension = int(source.config.hidden_size)
    for module in pipeline_of(source).modules[1:]:
        settings = module.settings
        if module.pools:
            tokens = settings.get("embedding_dimension", settings.get("word_embedding_dimension", dimension))
            dimension = tokens * len(pooling_modes(settings))  # several are concatenated
        dimension = settings.get("out_features", dimension)
    return dimension


def max_seq_length(model: PreTrainedModel, source: Checkpoint) -> int | None:
    """Return the number of tokens at which texts are truncated: the source's setting, else the model's limit."""
    pipeline = pipeline_of(source)
    if not pipeline.modules:
        return nv_embed.MAX_SEQ_LENGTH if source.format == "nv_embed" else longest_sequence(model)
    length: int | None = pipeline.transformer.get("max_seq_length")
    return length


def source_prompts(source: Checkpoint) -> dict[str, str]:
    """Read the prompts of a Sentence-Transformers source, if it has any.

    An empty prompt among others means that its texts get no prompt; if all are empty, they are the library's defaults.
    """
    prompts = Pipeline.read(source.folder).model.get("prompts") or {}
    if source.format == "nv_embed":
        prompts = {**nv_embed.prompts(source.read_json("instructions.json")), **prompts}
    return {name: text or "" for name, text in prompts.items()} if any(prompts.values()) else {}


def prompts_of(config: MoTEConfig, kept: dict[str, str] | None = None) -> dict[str, str]:
    """Build Sentence-Transformers' `prompts`: the instruction of every task, also under MTEB's names.

    Args:
        config: Config with the tasks and instructions.
        kept: Other prompts, which take precedence.
    """
    prompts = {task: config.instruction_of(task) for task in config.tasks}
    mteb = {name: prompts[task] for name, task in MTEB_PROMPTS.items() if task in prompts}
    return {**mteb, **prompts, **(kept or {})}


def _prompts_of_expert(config: MoTEConfig, expert: str, prompts: dict[str, str]) -> dict[str, str]:
    """Pick the prompts of a dense model that is one expert of a MoTE: those of the tasks that it serves.

    A role (`query`, `document`) that it does not serve gets the expert's own prompt: without one, `encode_query` would
    put nothing in front of a text.
    """
    served = [task for task, name in config.tasks.items() if name == expert]
    texts = {config.instruction_of(task) for task in served} - {""}  # of no other expert
    kept = {name: text for name, text in prompts.items() if text in texts or MTEB_PROMPTS.get(name, name) in served}
    return {**dict.fromkeys(ROLE_HINTS, prompts[expert]), **kept}


def _kept_prompts(source: Checkpoint, config: MoTEConfig) -> dict[str, str]:
    """Return the prompts of a source that a model made from it keeps: those that no new instruction replaces.

    That is prompts of no task, and those that somebody has reworded in the files of a MoTE.
    """
    new = prompts_of(config)
    own = prompts_of(source.config) if isinstance(source.config, MoTEConfig) else {}
    prompts = source_prompts(source)
    # One with the instruction of another task would pick that task's expert.
    kept = {
        name: text
        for name, text in prompts.items()
        if own.get(name) == new.get(name) and (name not in own or config.task_of_prompt(name, text))
    }
    for name in sorted(own.keys() & prompts.keys() - kept.keys()):
        if prompts[name] != own[name]:
            logger.warning("The result does not keep %r, the prompt %r of %s", prompts[name], name, source.name)
    return kept


def _default_prompt(source: Checkpoint, name: str | None, config: MoTEConfig, prompts: dict[str, str]) -> str | None:
    """Return the name of the source's default prompt in a model with other prompts; None, with a note, if it is lost.

    A renamed task takes its prompt along. A prompt that belongs to no task would make `encode(texts)` an error.
    """
    if name is None:
        return None
    if is_mote(source.config) and len(source.config.tasks) == len(config.tasks):
        changed = [pair for pair in zip(source.config.tasks, config.tasks, strict=True) if pair[0] != pair[1]]
        if len(changed) == 1 and MTEB_PROMPTS.get(name, name) == changed[0][0]:
            return changed[0][1]
    if name in prompts:
        known = {config.instruction_of(task) for task in config.tasks} - {""}
        if config.default_task or config.task_of_prompt(name, prompts[name]) or prompts[name].startswith((*known,)):
            return name
    logger.warning(
        "The default prompt %r of %s does not belong to any task of the result, and is no longer the default: pass "
        "`prompt_name=` or `task=` to encode()",
        name,
        source.name,
    )
    return None


def write_sentence_transformer(
    model: PreTrainedModel,
    source: Checkpoint,
    folder: Path,
    of_mote: MoTEConfig | None = None,
    expert: str | None = None,
    retrieval: Retrieval | None = None,
) -> None:
    """Write the files of Sentence-Transformers next to a model, with the source's modules and settings if it has any.

    A dense model keeps the pooling and prompts of the MoTE that it was made from; a single expert's instruction becomes
    the default prompt. Vectors are the source's, unless others are asked for.
    """
    pipeline = pipeline_of(source)
    _refuse_to_lose_vectors(model, source, pipeline.retrieval)
    config: Any = of_mote or (model.config if is_mote(model.config) else None)  # None: dense, as its source
    _set_modules(pipeline, model, source, None if config is None else config.pooling)
    if retrieval is not None and retrieval != pipeline.retrieval:
        pipeline.set_retrieval(retrieval)
    default = pipeline.model.get("default_prompt_name")
    prompts = source_prompts(source)
    if config is not None:
        # mteb would use NV-Embed's prompts for datasets, which pick no expert.
        without = source.format == "nv_embed" and len(config.experts) > 1
        prompts = prompts_of(config, None if without else _kept_prompts(source, config))
        default = _default_prompt(source, default, config, prompts) if expert is None else None
    if expert is not None:
        prompts = _prompts_of_expert(config, expert, prompts)
        default = expert if prompts[expert] else None
    named = {"prompts": prompts, "default_prompt_name": default}
    # The library compares the versions by its own names.
    libraries = {"sentence_transformers": "sentence-transformers", "transformers": "transformers", "pytorch": "torch"}
    versions = {name: version(library) for name, library in libraries.items()}
    pipeline.model = {"similarity_fn_name": "cosine", **pipeline.model, "__version__": versions, **named}
    for module in pipeline.modules[1:]:
        _copy_files(source, module.path, folder)
    pipeline.write(folder)


def _set_modules(pipeline: Pipeline, model: PreTrainedModel, source: Checkpoint, pooling: str | None) -> None:
    """Adapt the modules of a source to a model that pools by `pooling`; None: as the source."""
    if not pipeline.modules:
        kinds = (POOLING, NORMALIZE) if source.format == "nv_embed" else (POOLING,)
        others = [Module(kind, f"{index}_{kind.rpartition('.')[2]}") for index, kind in enumerate(kinds, start=1)]
        others[0].settings = _pooling_settings(model, pooling or source_pooling(source))
        pipeline.modules = [Module(TRANSFORMER, ""), *others]
        pipeline.transformer = {"max_seq_length": max_seq_length(model, source), "do_lower_case": False}
    first, *others = pipeline.modules
    first.path = ""
    if first.name == "MLMTransformer":
        pipeline.transformer.setdefault("transformer_task", "fill-mask")
    for arguments in ("model_args", "model_kwargs") if is_mote(model.config) else ():
        pipeline.transformer.get(arguments, {}).pop("add_pooling_layer", None)  # a MoTE has none
    transformer = OUR_TRANSFORMER if is_mote(model.config) else TRANSFORMER
    first.type = first_module(transformer, included=pipeline.instruction_pooling == "included")
    for module in others:
        if not module.pools:
            continue
        if pooling not in (None, _pooling_of(module)):
            included = module.settings.get("include_prompt", True)
            module.settings = {**_pooling_settings(model, pooling), "include_prompt": included}
        if model.config.model_type == ATTENTION_POOLING:
            module.type = ATTENTION_POOLING_MODULE


def _pooling_settings(model: PreTrainedModel, pooling: str) -> dict[str, Any]:
    """Return the settings of the library's module; by attention, the model pools itself."""
    names = {ours: theirs for theirs, ours in POOLING_NAMES.items()}
    mode = names.get(pooling, "mean")
    return {"embedding_dimension": model.config.hidden_size, "pooling_mode": mode, "include_prompt": True}


def _refuse_to_lose_vectors(model: PreTrainedModel, source: Checkpoint, retrieval: Retrieval) -> None:
    """Raise `ValueError` if the source gives sparse vectors, and the model made from it cannot."""
    if retrieval.kind == "dense":
        return
    made_dense = is_mote(source.config) and not is_mote(model.config)
    if made_dense or (retrieval.needs_head and not has_head(model.config)):
        lacks = "the result would be an ordinary dense model" if made_dense else "a model of this kind has no head"
        raise ValueError(f"{source.name} gives {retrieval.kind} vectors, which this would lose: {lacks}")


def _copy_files(source: Checkpoint, name: str, target: Path) -> None:
    """Copy a module's folder, writable even if the source is not; nothing outside of the source's own folder."""
    root, module = source.folder.resolve(), source.folder / name
    inside = [root, *([root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [])]  # the Hub's cache
    for path in (module, *module.rglob("*")):
        if not any(folder in path.resolve().parents for folder in inside):
            raise ValueError(f"{path} is outside the modules of {source.name}: put the file itself there")
        if path.is_file():
            copy = target / path.relative_to(source.folder)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
