"""Sentence-Transformers' files of a model repository: modules, pooling, prompts, and MTEB's names of the prompts."""

import logging
import shutil
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from mote.checkpoints import nv_embed
from mote.checkpoints.plain import longest_sequence, pooling_modes
from mote.checkpoints.reading import ATTENTION_POOLING, Checkpoint, has_head, is_mote
from mote.checkpoints.st_settings import (
    ATTENTION_POOLING_MODULE,
    INSTRUCTED,
    MODEL_SETTINGS,
    MODULES,
    NORMALIZE,
    OUR_POOLINGS,
    OUR_TRANSFORMER,
    POOLING,
    TRANSFORMER,
    TRANSFORMER_SETTINGS,
    copy_code,
    copy_instruction_code,
    first_module,
    name_of,
    names_of,
    read_modules,
    retrieval_in,
)
from mote.files import write_json
from mote.remote.configuration_mote import MTEB_PROMPTS, ROLE_HINTS, MoTEConfig

logger = logging.getLogger(__name__)

# Sentence-Transformers' names of the poolings that MoTEConfig knows.
POOLING_NAMES = {"mean": "mean", "cls": "cls", "lasttoken": "last_token"}

# As in the names of the files that Sentence-Transformers looks for, in this order.
_KINDS = ("bert", "roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")


def source_modules(source: Checkpoint) -> list[dict[str, Any]]:
    """Read the module list of a Sentence-Transformers source; empty for a plain Transformers one."""
    modules = read_modules(source.folder)
    for index, module in enumerate(modules):
        path = Path(module["path"])
        if path.is_absolute() or ".." in path.parts or (index > 0 and not path.parts):
            raise ValueError(f"{source.name} has a module that is not in a folder of its own: {str(path)!r}")
        if not module["type"].startswith("sentence_transformers.") and not _is_ours(module, index):
            raise ValueError(f"{source.name} has a module with code of its own, {module['type']}, which is not copied")
    return modules


def transformer_settings(source: Checkpoint) -> dict[str, Any]:
    """Read the settings of a Sentence-Transformers source's first module; old models have them under other names."""
    found = (source.read_json(f"sentence_{kind}_config.json") for kind in _KINDS)
    return next(filter(None, found), {})


def _is_ours(module: dict[str, Any], index: int = 0) -> bool:
    return name_of(module) in names_of(OUR_POOLINGS if index else (OUR_TRANSFORMER, *INSTRUCTED))


def _pools(module: dict[str, Any]) -> bool:
    return name_of(module) in ("Pooling", "TextPooling")


def source_pooling(source: Checkpoint) -> str:
    """Name the pooling of a source as MoTEConfig does; of a plain one, what Sentence-Transformers chooses."""
    for module in source_modules(source):
        if _pools(module):
            mode = _pooling_in(source, module)
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


def _pooling_in(source: Checkpoint, module: dict[str, Any]) -> str:
    """Name the pooling of a module as MoTEConfig does, or, if it does not know it, as Sentence-Transformers does."""
    settings = source.read_json(f"{module['path']}/config.json")
    modes = pooling_modes(settings)
    if len(modes) == 1 and modes[0] in POOLING_NAMES:
        return POOLING_NAMES[modes[0]]
    from sentence_transformers.sentence_transformer.modules import Pooling  # of several, or none, by its own rule

    mode = str(Pooling.load(str(source.folder), subfolder=module["path"]).pooling_mode)
    return POOLING_NAMES.get(mode, mode)


def embedding_dimension(source: Checkpoint, pooling: str | None = None) -> int:
    """Return the dimension of a source's embeddings, with its own pooling or the one that takes its place."""
    dimension = int(source.config.hidden_size)
    for module in source_modules(source)[1:]:
        settings = source.read_json(f"{module['path']}/config.json")
        if _pools(module):
            tokens = settings.get("embedding_dimension", settings.get("word_embedding_dimension", dimension))
            dimension = tokens * (1 if pooling else max(len(pooling_modes(settings)), 1))  # several are concatenated
        dimension = settings.get("out_features", dimension)
    return dimension


def normalizes(source: Checkpoint) -> bool:
    """Whether a Sentence-Transformers source normalises its embeddings."""
    modules = source_modules(source)
    return any(name_of(module) == "Normalize" for module in modules) or (not modules and source.format == "nv_embed")


def source_prompts(source: Checkpoint) -> dict[str, str]:
    """Read the prompts of a Sentence-Transformers source, if it has any.

    An empty prompt among others means that its texts get no prompt; if all are empty, they are the library's defaults.
    """
    prompts = source.read_json(MODEL_SETTINGS).get("prompts") or {}
    if source.format == "nv_embed":
        prompts = {**nv_embed.prompts(source.read_json("instructions.json")), **prompts}
    return {name: text or "" for name, text in prompts.items()} if any(prompts.values()) else {}


def prompts_of(
    config: MoTEConfig, carried_over: dict[str, str] | None = None, reworded: dict[str, str] | None = None
) -> dict[str, str]:
    """Build Sentence-Transformers' `prompts`: the instruction of every task, also under MTEB's names.

    Prompts of the source are kept if they are under other names (`carried_over`), or have other texts (`reworded`).
    """
    prompts = {task: config.instruction_of(task) for task in config.tasks}
    mteb = {name: prompts[task] for name, task in MTEB_PROMPTS.items() if task in prompts}
    return {**(carried_over or {}), **mteb, **prompts, **(reworded or {})}


def prompts_of_expert(
    config: MoTEConfig,
    expert: str,
    carried_over: dict[str, str] | None = None,
    reworded: dict[str, str] | None = None,
) -> dict[str, str]:
    """Build the prompts of a dense model that is one expert: the instructions of the tasks that it serves.

    A role (`query`, `document`) that it does not serve gets the expert's own prompt: without one, `encode_query` would
    put nothing in front of a text.
    """
    served = [task for task, name in config.tasks.items() if name == expert]
    texts = {config.instruction_of(task) for task in served} - {""}  # of no other expert
    prompts = prompts_of(config, carried_over, reworded)
    kept = {name: text for name, text in prompts.items() if text in texts or MTEB_PROMPTS.get(name, name) in served}
    return {**dict.fromkeys(ROLE_HINTS, prompts[expert]), **kept}


def _carried_over(source: Checkpoint) -> dict[str, str]:
    """Read the prompts of a source that do not belong to its tasks."""
    prompts = source_prompts(source)
    own = prompts_of(source.config) if isinstance(source.config, MoTEConfig) else {}
    return {name: text for name, text in prompts.items() if name not in own}


def _reworded(source: Checkpoint, config: MoTEConfig) -> dict[str, str]:
    """Read the prompts of a MoTE that differ from its instructions, for a model made from it; warn of those it loses.

    A prompt is lost if the model has a new instruction for its task, no such task, or another one with this text.
    """
    if not isinstance(source.config, MoTEConfig):
        return {}
    own, new = prompts_of(source.config), prompts_of(config)
    reworded = {name: text for name, text in source_prompts(source).items() if text != own.get(name, text)}
    kept = {
        name: text
        for name, text in reworded.items()
        if own[name] == new.get(name) and config.task_of_prompt(name, text) is not None
    }
    for name in sorted(reworded.keys() - kept.keys()):
        task = name if name in config.tasks else MTEB_PROMPTS.get(name)
        remedy = f'to set it: `mote set DIR "instruction.{task}={reworded[name]}"`'
        logger.warning(
            "The result does not keep %r, the prompt %r of %s: %s",
            reworded[name],
            name,
            source.name,
            f"its prompt is {new[name]!r}; {remedy}" if name in new else "it has no such task",
        )
    return kept


def max_seq_length(model: PreTrainedModel, source: Checkpoint) -> int | None:
    """Return the number of tokens at which texts are truncated: the source's setting, else the model's limit."""
    if not source_modules(source):
        return nv_embed.MAX_SEQ_LENGTH if source.format == "nv_embed" else longest_sequence(model)
    length: int | None = transformer_settings(source).get("max_seq_length")
    return length


def write_sentence_transformer(
    model: PreTrainedModel,
    source: Checkpoint,
    folder: Path,
    of_mote: MoTEConfig | None = None,
    expert: str | None = None,
) -> None:
    """Write the files of Sentence-Transformers next to a model, with the source's modules and settings if it has any.

    Args:
        model: The new model.
        source: Checkpoint that it was made from.
        folder: Folder of the model.
        of_mote: If the model is dense, and made from a MoTE: config of the MoTE, whose pooling and prompts it keeps.
        expert: If it is a single expert of that MoTE: name of the expert, whose instruction becomes the default prompt.
    """
    _refuse_to_lose_vectors(model, source)
    config: Any = of_mote or (model.config if is_mote(model.config) else None)  # None: dense, as its source
    transformer = OUR_TRANSFORMER if is_mote(model.config) else TRANSFORMER
    modules, settings = _write_modules(model, source, folder, None if config is None else config.pooling)
    modules[0]["type"] = first_module(transformer, name_of(modules[0]) not in names_of(INSTRUCTED))
    copy_instruction_code(modules, folder)
    if is_mote(model.config):
        poolings = [module["type"] for index, module in enumerate(modules) if index and _is_ours(module, index)]
        for name in dict.fromkeys([OUR_TRANSFORMER, *poolings]):
            copy_code(name, folder)
    carried_over = _carried_over(source)
    if source.format == "nv_embed" and config.default_task is None:
        carried_over = {}  # mteb would use prompts for datasets, which pick no expert
    reworded = {} if config is None else _reworded(source, config)
    if config is None:
        prompts: dict[str, Any] = {"prompts": source_prompts(source)}
    elif expert is None:
        kept = prompts_of(config, carried_over, reworded)
        prompts = {"prompts": kept, "default_prompt_name": _default_prompt(source, config, kept)}
    else:
        of_expert = prompts_of_expert(config, expert, carried_over, reworded)
        prompts = {"prompts": of_expert, "default_prompt_name": expert if of_expert[expert] else None}
    write_json(folder / MODULES, modules)
    write_json(folder / TRANSFORMER_SETTINGS, settings)
    write_json(
        folder / MODEL_SETTINGS,
        {
            "similarity_fn_name": "cosine",
            **source.read_json(MODEL_SETTINGS),
            "__version__": {
                "sentence_transformers": version("sentence-transformers"),  # the library compares it by its own name
                "transformers": version("transformers"),
                "pytorch": version("torch"),
            },
            **prompts,
        },
    )


def _default_prompt(source: Checkpoint, config: MoTEConfig, prompts: dict[str, str]) -> str | None:
    """Return the name of the source's default prompt in a model with other prompts; None, with a note, if it is lost.

    A renamed task takes its prompt along. A prompt that belongs to no task would make `encode(texts)` an error.
    """
    name = source.read_json(MODEL_SETTINGS).get("default_prompt_name")
    if name is None:
        return None
    if is_mote(source.config) and len(source.config.tasks) == len(config.tasks):
        changed = [pair for pair in zip(source.config.tasks, config.tasks, strict=True) if pair[0] != pair[1]]
        if len(changed) == 1 and MTEB_PROMPTS.get(name, name) == changed[0][0]:
            return changed[0][1]
    if name in prompts:
        if config.task_of_prompt(name, prompts[name]):  # also an empty one
            return name
        with suppress(ValueError):  # which says that there is no task, and no default either
            config.task_of([""], prompt=prompts[name])
            return name
    logger.warning(
        "The default prompt %r of %s does not belong to any task of the result, and is no longer the default: pass "
        "`prompt_name=` or `task=` to encode()",
        name,
        source.name,
    )
    return None


def _write_modules(
    model: PreTrainedModel, source: Checkpoint, folder: Path, pooling: str | None
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Write the folders of the modules after the first; return all of them, and the settings of the first."""
    modules = source_modules(source)
    if modules:
        for module in modules[1:]:
            _copy_files(source, module["path"], folder)
            if pooling is not None and _pools(module) and pooling != _pooling_in(source, module):
                included = source.read_json(f"{module['path']}/config.json").get("include_prompt", True)
                _write_pooling(model, pooling, folder / module["path"], include_prompt=included)
        settings = transformer_settings(source)
        if modules[0]["type"].endswith(".MLMTransformer"):
            settings.setdefault("transformer_task", "fill-mask")
    else:
        module = {"idx": 1, "name": "1", "path": "1_Pooling", "type": POOLING}
        modules = [{"idx": 0, "name": "0", "path": "", "type": TRANSFORMER}, module]
        _write_pooling(model, pooling or source_pooling(source), folder / "1_Pooling")
        if source.format == "nv_embed":
            modules.append({"idx": 2, "name": "2", "path": "2_Normalize", "type": NORMALIZE})
        settings = {"max_seq_length": max_seq_length(model, source), "do_lower_case": False}
    if model.config.model_type == ATTENTION_POOLING:
        for module in modules:
            if _pools(module):
                module["type"] = ATTENTION_POOLING_MODULE
    return modules, settings


def _refuse_to_lose_vectors(model: PreTrainedModel, source: Checkpoint) -> None:
    """Raise `ValueError` if the source gives sparse vectors, and the model made from it cannot."""
    retrieval = retrieval_in(source.folder)
    if retrieval.kind == "dense":
        return
    made_dense = is_mote(source.config) and not is_mote(model.config)
    if made_dense or (retrieval.needs_head and not has_head(model.config)):
        lacks = "the result would be an ordinary dense model" if made_dense else "a model of this kind has no head"
        raise ValueError(f"{source.name} gives {retrieval.kind} vectors, which this would lose: {lacks}")


def _write_pooling(model: PreTrainedModel, pooling: str, folder: Path, *, include_prompt: bool = True) -> None:
    names = {ours: theirs for theirs, ours in POOLING_NAMES.items()}
    folder.mkdir(exist_ok=True)
    size, mode = model.config.hidden_size, names.get(pooling, "mean")  # of what attention pooling gives
    settings = {"embedding_dimension": size, "pooling_mode": mode, "include_prompt": include_prompt}
    write_json(folder / "config.json", settings)


def _copy_files(source: Checkpoint, name: str, target: Path) -> None:
    """Copy a module's folder, writable even if the source is not; links must not lead out of the source."""
    root = source.folder.resolve()
    inside = [root, *([root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [])]  # the Hub's cache
    for path in (source.folder / name).rglob("*"):
        if path.is_file():
            resolved = path.resolve()
            if not any(resolved.is_relative_to(folder) for folder in inside):
                raise ValueError(
                    f"{path} is a link to a file outside of {source.name} ({resolved}), which is not copied: put the "
                    "file itself there, or remove the link"
                )
            copy = target / name / path.relative_to(source.folder / name)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
