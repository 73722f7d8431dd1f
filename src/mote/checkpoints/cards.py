"""Model cards: README.md of a MoTE, of a dense model made from one, and of a trained model.

The templates are in `hub_card/`. What they write stands between HTML comments, as in `<!-- mote:usage … -->` and
`<!-- /mote:usage -->`; when a card is written again, these regions are replaced and all other text stays where it is.
"""

import json
import logging
import math
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
import yaml  # type: ignore[import-untyped]
from huggingface_hub import ModelCardData, metadata_load
from jinja2 import Template
from transformers.utils import ADAPTER_CONFIG_NAME

from mote.checkpoints import nv_embed
from mote.checkpoints.provenance import read_steps
from mote.checkpoints.reading import Checkpoint, has_head, is_mote, mote_class, open_checkpoint
from mote.checkpoints.sentence_transformers import source_pooling, source_prompts
from mote.checkpoints.st_settings import Pipeline
from mote.checkpoints.tensors import experts_are_copies, parameter_counts, read_shapes, token_routing
from mote.files import replaced
from mote.remote.configuration_mote import ARCHITECTURES, MTEB_PROMPTS, MoTEConfig
from mote.reporting import millions

logger = logging.getLogger(__name__)

MOTE_TAGS = ("mote", "mixture-of-experts", "custom_code")

RETRIEVAL_TAGS = {
    "sparse": ("sparse-encoder", "sparse", "splade"),
    "hybrid": ("sparse-encoder", "sparse", "hybrid"),
}  # Sentence-Transformers' own

UPCYCLED = "upcycled from"  # how a step of `mote.json` says that all experts are copies of the source's blocks

# Steps of `mote.json` after which experts, even if equal, are no longer copies of the dense model's blocks.
_CHANGING = ("pretrain", "train", "merge", "average", "interpolate")
# Steps whose result is a version of the source, not a combination of models or a part of one.
_FINETUNING = ("pretrain", "train", "lengthen")

_REGION = re.compile(r"<!-- mote:(\w+)\b[^>]*-->\n.*?<!-- /mote:\1 -->\n*", re.DOTALL)

# What other programs write about a model, and what is said here from the model's files: the title, the opening and the
# snippet of Sentence-Transformers' trainer, which may lack what a MoTE needs.
_OF_OTHER_PROGRAMS = (
    re.compile(r"^# (SentenceTransformer|SparseEncoder|CrossEncoder|Model Card for)\b.*\n+", re.MULTILINE),
    re.compile(r"^This is a \[sentence-transformers\].*?(\n\n+|\Z)", re.MULTILINE | re.DOTALL),
    re.compile(r"^## Usage\n(?:<!--.*?-->|```.*?```|.)*?(?=^## |\Z)", re.MULTILINE | re.DOTALL),
)


def write_card(src: str | Path, *, base_model: str | None = None, repo_id: str | None = None) -> str:
    """Rewrite the card (README.md) of a model, from what its own files say about it.

    The regions between HTML comments, `<!-- mote:… -->`, are replaced. All other text and metadata of the card are
    kept, but for the title, opening and snippet of Sentence-Transformers' trainer.

    Args:
        src: Folder of a MoTE, or of a dense model that this package made from one.
        base_model: Id on the Hub of the model that it was made from. Default: as in the card, else as in `mote.json`.
        repo_id: Name under which readers load it. Default: the name of the folder.

    Returns:
        The card.

    Raises:
        FileNotFoundError: If the folder does not exist or has no weights.
        ValueError: If it holds another model, or the metadata of the existing card are invalid.
    """
    folder = Path(src)
    if not folder.is_dir():
        raise FileNotFoundError(f"{src} is not a folder: download a model from the Hub first, with `hf download`")
    model = open_checkpoint(str(src))
    card = rewritten_card(model, read_steps(folder), repo_id or model.short_name, folder, base_model)
    with replaced(folder / "README.md") as temporary:
        temporary.write_text(card, encoding="utf-8")
    logger.info("Wrote %s", folder / "README.md")
    return card


def new_card(
    model: Checkpoint,
    steps: list[dict[str, Any]],
    repo_id: str,
    source: Checkpoint,
    training: dict[str, Any] | None = None,
) -> str:
    """Return the card of a model that has just been made; of adapters, `model` is the one that they were trained on."""
    values = _values(model, steps, fresh=steps[-1].get("made") == UPCYCLED or None)
    adapters = (model.folder / ADAPTER_CONFIG_NAME).is_file()
    finetuned = values.get("fresh") or steps[-1]["step"] in _FINETUNING
    relation = "adapter" if adapters else "finetune" if finetuned else "merge"
    tags = (*(MOTE_TAGS if is_mote(model.config) else ()), *RETRIEVAL_TAGS.get(values["retrieval"], ()))
    data = card_data(source, relation, (*tags, *(["peft"] if adapters else [])))
    if training is not None:
        values["training"] = _rendered("training.md", **training)
    return _card(model, data, repo_id, values)


def rewritten_card(
    model: Checkpoint, steps: list[dict[str, Any]], repo_id: str, folder: Path, base_model: str | None = None
) -> str:
    """Return the card of a model, with the text and metadata of an earlier card in `folder`."""
    if not is_mote(model.config) and not any(step["step"] != "extract" for step in steps):
        raise ValueError(f"{model.name} is not a MoTE, and has no mote.json that says it was made from one")
    known, earlier = _read(folder / "README.md")  # unreadable metadata are an error: they would be lost
    data = _merged_metadata(known, steps, is_mote(model.config), base_model)
    head, end, body = _card(model, data, repo_id, _values(model, steps)).partition("\n---\n\n")
    return head + end + _merged(body, earlier)


def _card(model: Checkpoint, metadata: ModelCardData, repo_id: str, values: dict[str, Any]) -> str:
    template = "model_card.md" if is_mote(model.config) else "dense_card.md"
    name = repo_id.rsplit("/", 1)[-1]
    card = _rendered(template, card_data=metadata.to_yaml(), model_name=name, repo_id=repo_id, **values)
    return card.rstrip() + "\n"


def _rendered(template: str, **values: Any) -> str:
    """Fill in a template of `hub_card/`."""
    return Template((files("mote.hub_card") / template).read_text(encoding="utf-8")).render(values)


def _merged(body: str, earlier: str) -> str:
    """Put the regions of a new card into the text of an earlier one, in place of its regions.

    Those that the earlier text does not have are added: how the model was made at the end, the others at the beginning,
    around what a foreign card says above its first section.
    """
    regions = {found[1]: found[0].strip() + "\n\n" for found in _REGION.finditer(body)}
    kept = _REGION.sub(lambda found: regions.pop(found[1], ""), earlier)
    if not _REGION.search(earlier):
        for pattern in _OF_OTHER_PROGRAMS:
            kept = pattern.sub("", kept)
    lead, heading, sections = f"\n{kept}".partition("\n## ") if "about" in regions else ("", "", kept)
    parts = (regions.get("about", ""), lead, regions.get("usage", ""), heading + sections, regions.get("made", ""))
    return "\n\n".join(part.strip() for part in parts if part.strip()) + "\n"


def _values(model: Checkpoint, steps: list[dict[str, Any]], fresh: bool | None = None) -> dict[str, Any]:
    """Return the values for the template; unless `fresh` says so, files tell whether the experts are still copies."""
    of_kind = _values_of_mote(model, steps, fresh) if is_mote(model.config) else _values_of_dense(model, steps)
    pipeline = Pipeline.read(model.folder)
    return {
        **of_kind,
        **_origin(steps),
        "command": "\n".join(step["command"] for step in steps if step.get("command")),
        "converted": steps[-1].get("converted") if steps else None,
        "normalized": any(module.name == "Normalize" for module in pipeline.modules),
        "instructions_left_out": pipeline.instruction_pooling != "included",
        "retrieval": pipeline.retrieval.kind,
        "encoder": pipeline.encoder,
    }


def _values_of_mote(model: Checkpoint, steps: list[dict[str, Any]], fresh: bool | None) -> dict[str, Any]:
    config: Any = model.config
    with torch.device("meta"):
        counts = parameter_counts(mote_class(config.model_type, "model")(config))
    if fresh is None:
        upcycled = max((place for place, step in enumerate(steps) if step["step"] == "upcycle"), default=0)
        changed = any(step["step"] in _CHANGING for step in steps[upcycled:])
        fresh = not changed and bool(model.weights) and experts_are_copies(model.weights, config)
    tasks = config.available_tasks
    example = "search_query" if "search_query" in tasks else config.available_experts[0]
    return {
        "fresh": fresh,
        "config": config,
        "by_token": not config.routes_by_task,
        "routing": token_routing(config),
        "shared": _custom_shared_modules(config),
        "active_parameters": millions(counts["active"]),
        "total_parameters": millions(counts["total"]),
        "tasks": [(cell(task), expert, cell(config.instruction_of(task))) for task, expert in tasks.items()],
        "example_task": example,
        "example_instruction": escaped(config.instruction_of(example)),
        "has_head": has_head(config),
    }


def _values_of_dense(model: Checkpoint, steps: list[dict[str, Any]]) -> dict[str, Any]:
    shapes = read_shapes(model.weights)
    step: dict[str, Any] = next((step for step in reversed(steps) if "of_mote" in step), {})
    experts, expert = step.get("of_mote", {}), step.get("expert")
    prompts = source_prompts(model)
    served = {task for name, tasks in experts.items() if expert in (None, name) for task in tasks}
    tasks = [*(name for name in experts if name in served), *sorted(served - set(experts))]
    tasks = tasks or [name for name in prompts if name not in MTEB_PROMPTS]
    default = model.read_json("config_sentence_transformers.json").get("default_prompt_name")
    return {
        "experts": list(experts),
        "expert": expert,
        "parameters": millions(sum(map(math.prod, shapes.values()))),
        "prompts": [(cell(task), cell(prompts.get(task, ""))) for task in tasks],
        "instruction": escaped(prompts.get(default) or ""),
        "example_task": None if default else next((task for task in tasks if prompts.get(task)), None),
        "pooling": source_pooling(model),
        "has_pooler": any(key.endswith("pooler.dense.weight") for key in shapes),
        "lengthened": steps[-1]["settings"]["length"] if steps[-1]["step"] == "lengthen" else None,
        "lm_head": any(key.startswith("lm_head.") for key in shapes),
    }


def _origin(steps: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what the model was made from, according to the last step that records it."""
    for step in reversed(steps):
        if "made" in step and step["sources"]:
            source = step["sources"][0]
            page = f"https://huggingface.co/{source['name']}" if source.get("revision") else "#how-it-was-made"
            trained = step["step"] == "train" and "recipe" in step
            made = f"trained by the recipe `{step['recipe']}` from" if trained else step["made"]
            return {"made": made, "source": source["name"], "source_link": page}
    return {"source": None}


def _custom_shared_modules(config: MoTEConfig) -> list[str] | None:
    """Return the modules of a block that all experts share; None: its attention, the default."""
    usual = ARCHITECTURES.get(config.backbone_config.model_type)
    shared = config.shared_modules
    if shared is None or token_routing(config) is not None or (usual and tuple(shared) == usual.shared_modules):
        return None
    return [*shared]


def card_data(source: Checkpoint, relation: str, tags: Iterable[str] = ()) -> ModelCardData:
    """Build the metadata of a new card: base model, and the source's language and licence.

    The base model is an id on the Hub: for a folder, the one that its own card names, if any.
    """
    known: dict[str, Any] = {}
    with suppress(ValueError):
        known, _ = _read(source.folder / "README.md")
    kept: dict[str, Any] = {
        name: known[name] for name in ("language", "license", "license_name", "license_link") if name in known
    }
    if source.format == "nv_embed":
        kept.setdefault("license", nv_embed.LICENSE)
    return _metadata(hub_ids(known.get("base_model")) if source.is_local else source.name, relation, tags, kept)


def _merged_metadata(
    known: Mapping[str, Any], steps: list[dict[str, Any]], routed: bool, base_model: str | None
) -> ModelCardData:
    """Merge the metadata of an earlier card with what is known about the model, which takes precedence."""
    origins = [one["name"] for step in reversed(steps) for one in step["sources"][:1] if one.get("revision")]
    base = base_model or hub_ids(known.get("base_model")) or next(iter(origins), None)
    tags = (*(MOTE_TAGS if routed else ()), *(known.get("tags") or []))
    return _metadata(base, known.get("base_model_relation") or "finetune", tags, known)


def _metadata(base_model: Any, relation: str, tags: Iterable[str], others: Mapping[str, Any]) -> ModelCardData:
    data = ModelCardData(
        base_model=base_model,
        base_model_relation=relation if base_model else None,
        library_name="sentence-transformers",
        pipeline_tag="sentence-similarity",
        tags=list(dict.fromkeys(["sentence-transformers", "feature-extraction", *tags])),
    )
    for key, value in others.items():
        if data.get(key) is None and key != "base_model_relation":
            data[key] = languages(value) if key == "language" else value
    return data


def _read(readme: Path) -> tuple[dict[str, Any], str]:
    """Read the metadata of a card, and the text below them; both are empty if there is no card."""
    if not readme.is_file():
        return {}, ""
    try:
        metadata, text = metadata_load(readme) or {}, readme.read_text(encoding="utf-8").replace("\r\n", "\n")
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(
            f"The metadata of the card {readme} cannot be read ({' '.join(str(error).split())}): fix what is between "
            "its lines `---`, or remove the card"
        ) from error
    return metadata, re.sub(r"\A---\n.*?\n---\n", "", text, flags=re.DOTALL)


def languages(of_source: Any) -> Any:
    """Return the languages of a card; YAML reads an unquoted `no`, Norwegian, as false."""
    if isinstance(of_source, list):
        return [languages(one) for one in of_source]
    return "no" if of_source is False else of_source


def hub_ids(names: Any) -> Any:
    """Return the name or list of names, without those that are folders rather than ids on the Hub (user/name)."""
    if isinstance(names, list):
        return [name for name in names if hub_ids(name)] or None
    return names if isinstance(names, str) and "/" in names else None


def escaped(text: str) -> str:
    """Escape a text for use between the quotes of a Python string, on one line."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def cell(text: str) -> str:
    """Escape a text for use in a table."""
    return escaped(text).replace("|", r"\|")
