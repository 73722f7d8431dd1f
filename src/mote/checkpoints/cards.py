"""Model cards: README.md of a MoTE, a dense model made of one, an expert artefact, and a trained model.

The templates are in `hub_card/`. Cards take plain values, so that any part of the package can write one.
"""

import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from huggingface_hub import ModelCard, ModelCardData, metadata_load

from configuration_mote import MoTEConfig
from mote.checkpoints.reading import Checkpoint
from mote.reporting import millions

TRAINED_KINDS = {
    "mote": "A **MoTE** (Mixture of Task Experts): one attention and one feed-forward expert per task,",
    "token_routed": "A mixture of experts routed token by token,",
    "dense": "A dense text-embedding model,",
}


def write_mote_card(
    folder: Path,
    repo_id: str,
    config: MoTEConfig,
    counts: Mapping[str, Any],
    source: Checkpoint,
    command: str,
    *,
    made: str = "upcycled from",
    fresh: bool = True,
    normalized: bool = False,
) -> None:
    """Write the card of a MoTE, routed by task or by token.

    Args:
        folder: Folder of the model.
        repo_id: Name under which readers load it.
        config: Its config.
        counts: Its `parameter_counts`.
        source: Checkpoint it was made of.
        command: Command line that made it.
        made: What was done to the source, as in "upcycled from".
        fresh: Whether the experts are still copies of one another.
        normalized: Whether Sentence-Transformers normalises the embeddings.
    """
    example = "search_query" if "search_query" in config.tasks else config.experts[0]
    _write(
        folder,
        "model_card.md",
        card_data(source, "finetune" if fresh else "merge", ("mote", "mixture-of-experts", "custom_code")),
        repo_id,
        source=source.public_name,
        source_link=source_link(source),
        made=made,
        fresh=fresh,
        experts=config.experts,
        num_experts_per_tok=None if config.routes_by_task else config.num_experts_per_tok,
        norm_topk_prob=getattr(config, "norm_topk_prob", None),
        compression=config.compression,
        active_parameters=millions(counts["active"]),
        total_parameters=millions(counts["total"]),
        tasks=[(task, expert, _cell(config.instruction_of(task))) for task, expert in config.tasks.items()],
        default_task=config.default_task,
        example_task=example,
        example_instruction=escaped(config.instruction_of(example)),
        has_roles={"query", "document"} <= set(config.tasks),
        pooling=config.pooling,
        normalized=normalized,
        command=command,
    )


def write_dense_card(
    folder: Path,
    repo_id: str,
    config: MoTEConfig,
    parameters: int,
    source: Checkpoint,
    command: str,
    *,
    made: str,
    expert: str | None = None,
    converted: Mapping[str, Any] | None = None,
) -> None:
    """Write the card of a dense model made of a MoTE.

    Args:
        folder: Folder of the model.
        repo_id: Name under which readers load it.
        config: Config of the MoTE.
        parameters: Number of the dense model's parameters.
        source: The MoTE.
        command: Command line that made the model.
        made: What the model is, as in "the mean of the experts of".
        expert: Name of the expert, if the model is a single one.
        converted: Result of `runtimes.convert`, if the model is also there in a runtime's format.
    """
    tasks = [task for task in config.tasks if expert in (None, config.tasks[task])]
    _write(
        folder,
        "dense_card.md",
        card_data(source, "merge"),
        repo_id,
        source=source.public_name,
        source_link=source_link(source),
        made=made,
        experts=config.experts,
        parameters=millions(parameters),
        prompts=[(task, _cell(config.instruction_of(task))) for task in tasks],
        expert=expert,
        instruction=escaped(config.instruction_of(expert)) if expert else "",
        converted=converted,
        example_task=None if expert else next((task for task in tasks if config.instruction_of(task)), None),
        pooling=config.pooling,
        command=command,
    )


def write_expert_card(
    folder: Path,
    repo_id: str,
    name: str,
    instructions: Mapping[str, str],
    base: Mapping[str, Any],
    parameters: int,
    source: Checkpoint,
    command: str,
) -> None:
    """Write the card of an expert artefact.

    Args:
        folder: Folder of the artefact.
        repo_id: Name under which readers find it.
        name: Expert name.
        instructions: Task → instruction, of the tasks that it serves.
        base: Base of the expert, as in its expert.json.
        parameters: Number of its parameters.
        source: The MoTE that it was taken from.
        command: Command line that made it.
    """
    data = card_data(source, "adapter")
    data.library_name, data.pipeline_tag, data.tags = "mote", None, ["mote", "mixture-of-experts", "task-expert"]
    _write(
        folder,
        "expert_card.md",
        data,
        repo_id,
        name=name,
        source=source.public_name,
        tasks=[(task, _cell(text)) for task, text in instructions.items()],
        base=base,
        parameters=millions(parameters),
        command=command,
    )


def write_trained_card(
    folder: Path,
    repo_id: str,
    config: MoTEConfig,
    source: Checkpoint,
    *,
    kind: str,
    recipe: Mapping[str, Any],
    run: Mapping[str, Any],
    data: Sequence[Sequence[Any]],
    seen: Mapping[str, Mapping[str, int]],
    scores: Sequence[Sequence[str]],
    instructions: bool = True,
    recipe_file: str = "recipe.yaml",
    curves_file: str = "curves.png",
) -> None:
    """Write the card of a trained model.

    Args:
        folder: Folder of the model.
        repo_id: Name under which readers load it.
        config: Its tasks and instructions; those of a MoTE are its own config.
        source: Checkpoint that the training started from.
        kind: A key of `TRAINED_KINDS`.
        recipe: `name`, `description`, `batch_size`, `learning_rate`, `weight_decay`, `seed`.
        run: `steps`, `device`, `processes`, `seconds`, `resumed_from_step`.
        data: Rows of name, batches, loss, temperature, datasets.
        seen: Expert, or task, → `texts` and `tokens`.
        scores: Rows of name, score before, score after; none if there was no validation.
        instructions: Whether the model was trained with instructions.
        recipe_file: File in `folder` with all settings.
        curves_file: File in `folder` with a chart of the loss.
    """
    routed = kind == "mote"
    example = "search_query" if "search_query" in config.tasks else config.experts[0]
    argument = "prompt_name" if instructions and config.instruction_of(example) else "task"
    _write(
        folder,
        "trained_model.md",
        card_data(source, "finetune", ("mote", "mixture-of-experts", "custom_code") if kind != "dense" else ()),
        repo_id,
        what=TRAINED_KINDS[kind],
        source=source.public_name,
        source_link="#training" if source.is_local else source_link(source),
        recipe=recipe,
        run=run,
        trust=kind != "dense",
        argument=f', {argument}="{example}"' if argument == "prompt_name" or routed else "",
        experts=routed,
        tasks=[(task, expert, _cell(config.instruction_of(task))) for task, expert in config.tasks.items()],
        data=data,
        seen=seen,
        scores=scores,
        recipe_file=recipe_file,
        curves_file=curves_file,
    )


def _write(folder: Path, template: str, metadata: ModelCardData, repo_id: str, **values: Any) -> None:
    path = str(files("mote.hub_card") / template)
    name = repo_id.rsplit("/", 1)[-1]
    card = ModelCard.from_template(metadata, template_path=path, model_name=name, repo_id=repo_id, **values)
    card.save(folder / "README.md")


def card_data(source: Checkpoint, relation: str, tags: tuple[str, ...] = ()) -> ModelCardData:
    """Build a card's metadata: base model, and the source's language and licence."""
    readme = source.folder / "README.md"
    try:
        of_source = (metadata_load(readme) if readme.is_file() else None) or {}
    except (yaml.YAMLError, ValueError):  # an unreadable card says nothing
        of_source = {}
    return ModelCardData(
        base_model=source.public_name,
        base_model_relation=relation,
        language=of_source.get("language"),
        license=of_source.get("license"),
        library_name="sentence-transformers",
        pipeline_tag="sentence-similarity",
        tags=["sentence-transformers", "feature-extraction", *tags],
    )


def source_link(source: Checkpoint) -> str:
    """Return the source's page on the Hub, or the card's own section if it is a folder."""
    return "#how-it-was-made" if source.is_local else f"https://huggingface.co/{source.name}"


def escaped(text: str) -> str:
    """Escape a text for use between the quotes of a Python string, on one line."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _cell(text: str) -> str:
    return escaped(text).replace("|", r"\|")
