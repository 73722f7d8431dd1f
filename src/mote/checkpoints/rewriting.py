"""Rewrite a model's card: facts about the model come from the model's files, what others wrote is kept.

Sentence-Transformers' trainer, `save_pretrained` after a training loop and `push_to_hub` each write or keep a card that
knows less than the files next to it.
"""

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
import yaml  # type: ignore[import-untyped]
from huggingface_hub import ModelCardData, metadata_load
from safetensors import safe_open

from mote import hub
from mote.checkpoints.cards import MOTE_TAGS, cell, escaped, front_matter, hub_ids, mote_values, render
from mote.checkpoints.instructions import instruction_pooling_in
from mote.checkpoints.models import dense_without_weights
from mote.checkpoints.provenance import read_steps
from mote.checkpoints.reading import Checkpoint, is_mote, mote_class, open_checkpoint
from mote.checkpoints.retrieval import retrieval_in
from mote.checkpoints.sentence_transformers import normalizes, source_pooling, source_prompts
from mote.checkpoints.tensors import parameter_counts, read_shapes, weight_name
from mote.remote.configuration_mote import MTEB_PROMPTS
from mote.reporting import millions

logger = logging.getLogger(__name__)

# Sections that are rewritten: ours, and Sentence-Transformers' own snippet, which may lack what a MoTE needs.
_OURS = ("Tasks", "Prompts", "Use", "Usage", "On a CPU", "How it was made", "Method")

# Openings of paragraphs that programs write above the first section; others there were written by a person.
_GENERATED = (
    "This is a [sentence-transformers]",
    "This is the model card of a",
    "A dense text-embedding model",
    "A **MoTE** (Mixture of Task Experts): one attention",
    "A **MoTE** (Mixture of Task Experts): an expert per task in",
    "A mixture of experts routed token by token,",
    "Each block has one attention for all tasks",
    "Each task has an expert in",
    "Each routed block has one attention",
    "> **Not trained yet.**",
    "It is a **sparse encoder**:",
    "It is a **hybrid retriever**:",
    "It embeds as that MoTE does for the tasks below",
)
_EXPERTS_IN_ONE = re.compile(r"\d+ (task )?experts? in one text-embedding model")

# Steps of `mote.json` after which experts, even if equal, are no longer copies of the dense model's blocks.
_CHANGING = ("train", "merge", "average", "interpolate")


def write_card(
    src: str | Path,
    *,
    base_model: str | None = None,
    push: bool = False,
    repo_id: str | None = None,
    revision: str | None = None,
) -> str:
    """Rewrite the card (README.md) of a model.

    Facts about the model come from the model's own files: tasks, instructions, parameters, whether the experts differ,
    how it was made. The metadata that others added (language, licence, data sets, scores, the widget), sections with
    headings other than ours, such as those of Sentence-Transformers' trainer, and paragraphs above the first heading
    are kept. Writing the card twice changes nothing.

    Args:
        src: A MoTE, or a dense model that this package made from one: a folder, or, with `push`, an id on the Hub.
        base_model: Id on the Hub of the model that it was made from. Default: as in the card, else as in `mote.json`.
        push: Push the card, and nothing else, to the model's repository on the Hub.
        repo_id: The repository. Default: `src`, or the name of the folder under the user of the token.
        revision: Branch, tag or commit of a source on the Hub.

    Returns:
        The card.

    Raises:
        FileNotFoundError: If the source does not exist or has no weights.
        ValueError: If the source is neither a MoTE nor made from one, or is an id without `push`; if `base_model` is
            not an id; if the metadata of the existing card are damaged.
        PermissionError: If the Hub refuses the push.
        ConnectionError: If the Hub cannot be reached.
    """
    if base_model is not None and hub_ids(base_model) is None:
        raise ValueError(f"The base model {base_model!r} must be an id on the Hub (user/name)")
    source = open_checkpoint(str(src), revision)
    if not source.is_local and not push:
        raise ValueError(f"{src} is on the Hub: push its card with `--push`, or name a folder")
    name = source.short_name if source.is_local else source.name
    name = hub.check_before_push(repo_id or name) if push else repo_id or name
    card = rewritten_card(source, name, base_model)
    if source.is_local:
        path = source.folder / "README.md"
        unfinished = path.with_name(f".{path.name}.{uuid4().hex}")
        try:
            unfinished.write_text(card, encoding="utf-8")
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)
        logger.info("Wrote %s", path)
    if push:
        logger.info("Pushed: %s", hub.push_card(card, name))
    return card


def rewritten_card(source: Checkpoint, repo_id: str, base_model: str | None = None) -> str:
    """Return the card that `write_card` writes.

    Args:
        source: The model.
        repo_id: Name under which readers load it.
        base_model: As in `write_card`.

    Raises:
        ValueError: If the source is neither a MoTE nor made from one, or the metadata of its card are damaged.
    """
    steps = read_steps(source.folder)
    readme = source.folder / "README.md"
    lead, sections = _kept(_read(readme))
    if is_mote(source.config):
        template, values = "model_card.md", _values_of_mote(source, steps)
    elif any(step["step"] != "extract" for step in steps):
        template, values = "dense_card.md", _values_of_dense(source, steps)
    else:
        raise ValueError(f"{source.name} is not a MoTE, and has no mote.json that says it was made from one")
    data = _metadata(source, steps, base_model)
    values |= {
        "source": None,
        **_origin(steps),
        "command": "\n".join(step["command"] for step in steps if step.get("command")),
        "lead": lead,
        "instructions_left_out": instruction_pooling_in(source.folder) != "included",
        "sections": sections,
    }
    return render(template, data, repo_id, **values)


def _values_of_mote(source: Checkpoint, steps: list[dict[str, Any]]) -> dict[str, Any]:
    config: Any = source.config
    with torch.device("meta"):
        model = mote_class(config.model_type, "model")(config)
    upcycled = max((place for place, step in enumerate(steps) if step["step"] == "upcycle"), default=0)
    fresh = not any(step["step"] in _CHANGING for step in steps[upcycled:]) and experts_are_copies(source)
    values = mote_values(config, parameter_counts(model), fresh, normalizes(source))
    return {**values, "retrieval": retrieval_in(source.folder).kind}


def _values_of_dense(source: Checkpoint, steps: list[dict[str, Any]]) -> dict[str, Any]:
    model, _ = dense_without_weights(source)
    made: dict[str, Any] = next((step for step in reversed(steps) if "of_mote" in step), {})
    experts, expert = made.get("of_mote", {}), made.get("expert")
    prompts = source_prompts(source)
    served = {task for name, tasks in experts.items() if expert in (None, name) for task in tasks}
    tasks = [*(name for name in experts if name in served), *sorted(served - set(experts))]
    tasks = tasks or [name for name in prompts if name not in MTEB_PROMPTS]
    default = source.read_json("config_sentence_transformers.json").get("default_prompt_name")
    return {
        "experts": list(experts),
        "expert": expert,
        "parameters": millions(model.num_parameters()),
        "prompts": [(cell(task), cell(prompts.get(task, ""))) for task in tasks],
        "instruction": escaped(prompts.get(default) or ""),
        "example_task": None if default else next((task for task in tasks if prompts.get(task)), None),
        "converted": steps[-1].get("converted"),
        "pooling": source_pooling(source),
        "has_pooler": any(key.endswith("pooler.dense.weight") for key in read_shapes(source.weights)),
    }


def _origin(steps: list[dict[str, Any]]) -> dict[str, Any]:
    """Return what the model was made from, according to the last step that records it."""
    for step in reversed(steps):
        if "made" in step and step["sources"]:
            source = step["sources"][0]
            page = f"https://huggingface.co/{source['name']}" if source.get("revision") else "#how-it-was-made"
            made = f"trained by the recipe `{step['recipe']}` from" if step.get("recipe") else step["made"]
            return {"made": made, "source": source["name"], "source_link": page}
    return {}


def _metadata(source: Checkpoint, steps: list[dict[str, Any]], base_model: str | None) -> ModelCardData:
    """Merge the card's metadata with what is known about the model, which takes precedence."""
    known = front_matter(source.folder)
    origins = [one["name"] for step in reversed(steps) for one in step["sources"][:1] if one.get("revision")]
    base = base_model or hub_ids(known.get("base_model")) or next(iter(origins), None)
    routed = is_mote(source.config)
    tags = [
        "sentence-transformers",
        "feature-extraction",
        *(MOTE_TAGS if routed else ()),
        *(known.get("tags") or []),
    ]
    data = ModelCardData(
        base_model=base,
        base_model_relation=(known.get("base_model_relation") or "finetune") if base else None,
        library_name="sentence-transformers",
        pipeline_tag="sentence-similarity",
        tags=list(dict.fromkeys(tags)),
    )
    for key, value in known.items():
        if data.get(key) is None and key != "base_model_relation":
            data[key] = value
    return data


def _read(readme: Path) -> str:
    """Read a card; unreadable metadata are an error, since they would be lost."""
    try:
        if not readme.is_file():
            return ""
        metadata_load(readme)
        return readme.read_text(encoding="utf-8")
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(
            f"The metadata of the card {readme} cannot be read ({' '.join(str(error).split())}): fix what is between "
            "its lines `---`, or remove the card"
        ) from error


def _kept(card: str) -> tuple[str, str]:
    """Return the parts of a card to keep: paragraphs above the first section, and sections."""
    body = re.sub(r"\A---\n.*?\n---\n", "", card.replace("\r\n", "\n"), flags=re.DOTALL)
    if "This model card has been automatically generated" in body:  # Transformers' template, not filled in
        return "", ""
    (_, intro), *sections = _sections(body)
    paragraphs = [one.strip() for one in re.split(r"\n{2,}", re.sub(r"(?m)^# .*$", "", intro))]
    lead = [one for one in paragraphs if one and not one.startswith(_GENERATED) and not _EXPERTS_IN_ONE.match(one)]
    kept = [f"## {heading}\n{text}".rstrip() for heading, text in sections if heading not in _OURS]
    return "\n\n".join(lead), "\n\n".join(kept)


def _sections(text: str) -> Iterator[tuple[str, str]]:
    """Split at second-level headings, outside of code and comments; the text above the first has the heading ""."""
    heading, code, comment = "", False, False
    lines: list[str] = []
    for line in text.splitlines():
        if line.startswith("## ") and not code and not comment:
            yield heading, "\n".join(lines)
            heading, lines = line.removeprefix("## ").strip(), []
            continue
        lines.append(line)
        if line.lstrip().startswith("```") and not comment:
            code = not code
        elif not code:
            comment = line.rfind("<!--") > line.rfind("-->") or (comment and "-->" not in line)
    yield heading, "\n".join(lines)


def experts_are_copies(source: Checkpoint) -> bool:
    """Whether the experts of a MoTE are equal, as upcycling leaves them; reads one weight at a time.

    Compressed experts, and those in a file of another format than safetensors, count as different.
    """
    config: Any = source.config
    if config.compression is not None or any(path.suffix != ".safetensors" for path in source.weights):
        return False
    first: dict[tuple[Any, str], tuple[Path, str]] = {}
    for path in source.weights:
        with safe_open(path, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118  # not a dict
                if ".feed_forward.experts." in key and not config.routes_by_task:
                    stack = file.get_tensor(key)  # [E, …]
                    if not torch.equal(stack, stack[:1].expand_as(stack)):
                        return False
                name = weight_name(key, config)
                if name.expert is None:
                    continue
                where = first.setdefault((name.layer, name.dense), (path, key))
                if where[1] != key:
                    with safe_open(where[0], framework="pt") as other:
                        if not torch.equal(other.get_tensor(where[1]), file.get_tensor(key)):
                            return False
    return len(config.experts) > 1
