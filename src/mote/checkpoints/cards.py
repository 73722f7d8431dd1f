"""Model cards: README.md of a MoTE, a dense model made from one, an expert artefact, and a trained model.

The templates are in `hub_card/`. Cards take plain values, so that any part of the package can write one. A card that
other programs have written later is rewritten by `mote.checkpoints.rewriting`.
"""

import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from huggingface_hub import ModelCard, ModelCardData, metadata_load

from mote.checkpoints import nv_embed
from mote.checkpoints.instructions import instruction_pooling_in
from mote.checkpoints.reading import Checkpoint, has_head, is_mote
from mote.checkpoints.retrieval import retrieval_in
from mote.checkpoints.tensors import token_routing
from mote.remote.architectures_mote import ARCHITECTURES
from mote.remote.configuration_mote import MoTEConfig
from mote.reporting import millions

MOTE_TAGS = ("mote", "mixture-of-experts", "custom_code")

RETRIEVAL_TAGS = {
    "sparse": ("sparse-encoder", "sparse", "splade"),
    "hybrid": ("sparse-encoder", "sparse", "hybrid"),
}  # Sentence-Transformers' own

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
        source: Checkpoint that it was made from.
        command: Command line that made it.
        made: What was done to the source, as in "upcycled from".
        fresh: Whether the experts are still copies of one another.
        normalized: Whether Sentence-Transformers normalises the embeddings.
    """
    kind = retrieval_in(folder).kind
    _write(
        folder,
        "model_card.md",
        card_data(source, "finetune" if fresh else "merge", (*MOTE_TAGS, *RETRIEVAL_TAGS.get(kind, ()))),
        repo_id,
        retrieval=kind,
        source=source.public_name,
        source_link=source_link(source),
        made=made,
        command=command,
        **mote_values(config, counts, fresh, normalized),
    )


def mote_values(config: MoTEConfig, counts: Mapping[str, Any], fresh: bool, normalized: bool) -> dict[str, Any]:
    """Return the values about the model itself for the template of its card; arguments as in `write_mote_card`."""
    tasks = config.available_tasks
    example = "search_query" if "search_query" in tasks else config.available_experts[0]
    return {
        "fresh": fresh,
        "experts": config.available_experts,
        "num_experts_per_tok": None if config.routes_by_task else config.num_experts_per_tok,
        "num_experts": getattr(config, "num_experts", None),
        "norm_topk_prob": getattr(config, "norm_topk_prob", None),
        "routing_within": token_routing(config) if config.routes_by_task else None,
        "mote_blocks": len(config.mote_layer_indices),
        "blocks": config.num_hidden_layers,
        "shared": _unusually_shared(config),
        "compression": config.compression,
        "active_parameters": millions(counts["active"]),
        "total_parameters": millions(counts["total"]),
        "tasks": [(cell(task), expert, cell(config.instruction_of(task))) for task, expert in tasks.items()],
        "default_task": config.default_task if config.default_task in tasks else None,
        "route_by_text": config.route_by_text,
        "example_task": example,
        "example_expert": tasks[example],
        "example_instruction": escaped(config.instruction_of(example)),
        "has_roles": {"query", "document"} <= set(tasks),
        "pooling": config.pooling,
        "normalized": normalized,
        "has_head": has_head(config),
    }


def _unusually_shared(config: MoTEConfig) -> list[str] | None:
    """Return the modules of a block that all experts share; None: its attention, as is usual."""
    usual = ARCHITECTURES.get(config.backbone_config.model_type)
    shared = config.shared_modules
    if shared is None or token_routing(config) is not None or (usual and tuple(shared) == usual.shared_modules):
        return None
    return [*shared]


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
    """Write the card of a dense model made from a MoTE, or pre-trained as a MoTE with a single expert.

    Args:
        folder: Folder of the model.
        repo_id: Name under which readers load it.
        config: Config of the MoTE.
        parameters: Number of the dense model's parameters.
        source: Checkpoint that it was made from.
        command: Command line that made the model.
        made: What the model is, as in "the mean of the experts of".
        expert: Name of the expert, if the model is a single one.
        converted: Result of `runtimes.convert`, if the model was also converted to a runtime's format.
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
        experts=config.experts if is_mote(source.config) else [],
        parameters=millions(parameters),
        prompts=[(cell(task), cell(config.instruction_of(task))) for task in tasks],
        expert=expert,
        instruction=escaped(config.instruction_of(expert)) if expert else "",
        converted=converted,
        example_task=None if expert else next((task for task in tasks if config.instruction_of(task)), None),
        pooling=config.pooling,
        command=command,
    )


def write_lengthened_card(
    folder: Path,
    repo_id: str,
    source: Checkpoint,
    command: str,
    *,
    made: str,
    length: int,
    head: bool,
    parameters: int,
    prompts: Mapping[str, str],
    pooling: str,
    pooler: bool,
) -> None:
    """Write the card of a dense model whose positions have been replaced.

    Args:
        folder: Folder of the model.
        repo_id: Name under which readers load it.
        source: The model as it was.
        command: Command line that made the model.
        made: What the model is, as in "rotary positions in place of those of".
        length: Maximum length of a text, in tokens.
        head: Whether it has a head for masked language modelling.
        parameters: Number of its parameters.
        prompts: Its prompts.
        pooling: Its pooling.
        pooler: Whether it has a pooler.
    """
    new_head = "" if head else " model.new_head=true"
    lead = (
        "> **Not trained with these positions yet.** All other weights are the source's, which knows nothing of them: "
        f"pre-train the model on texts of up to {length:,} tokens before use, `mote pretrain mlm "
        f"model.source={repo_id}{new_head} data.folder=DATA`."
    )
    _write(
        folder,
        "dense_card.md",
        card_data(source, "finetune"),
        repo_id,
        source=source.public_name,
        source_link=source_link(source),
        made=made,
        lead=lead,
        parameters=millions(parameters),
        prompts=[(cell(name), cell(text)) for name, text in prompts.items()],
        example_task=next((name for name, text in prompts.items() if text), None),
        pooling=pooling,
        has_pooler=pooler,
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
        tasks=[(cell(task), cell(text)) for task, text in instructions.items()],
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
    relation: str = "finetune",
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
        recipe: `name`, `description`, `batch_size`, `learning_rate`, `weight_decay`, `seed`, `start_weight`.
        run: `steps`, `device`, `processes`, `seconds`, `resumed_from_step`.
        data: Rows of name, batches, loss, temperature, datasets.
        seen: Expert, or task, → `texts` and `tokens`.
        scores: Rows of name, score before, score after; empty if there was no validation.
        instructions: Whether the model was trained with instructions.
        relation: To its base model, as the Hub names it: `finetune`, or `adapter`.
        recipe_file: File in `folder` with all settings.
        curves_file: File in `folder` with a chart of the loss.
    """
    routed = kind == "mote"
    retrieval = retrieval_in(folder).kind
    tags = (*(MOTE_TAGS if kind != "dense" else ()), *RETRIEVAL_TAGS.get(retrieval, ()))
    example = "search_query" if "search_query" in config.tasks else config.experts[0]
    argument = "prompt_name" if instructions and config.instruction_of(example) else "task"
    _write(
        folder,
        "trained_model.md",
        card_data(source, relation, (*tags, "peft") if relation == "adapter" else tags),
        repo_id,
        what=_kind(kind, config),
        retrieval=retrieval,
        source=source.public_name,
        source_link="#training" if source.is_local else source_link(source),
        recipe=recipe,
        run=run,
        trust=kind != "dense" or instruction_pooling_in(folder) != "included",
        argument=f', {argument}="{example}"' if argument == "prompt_name" or routed else "",
        experts=routed,
        tasks=[(cell(task), expert, cell(config.instruction_of(task))) for task, expert in config.tasks.items()],
        data=data,
        seen=seen,
        scores=scores,
        recipe_file=recipe_file,
        curves_file=curves_file,
    )


def _kind(kind: str, config: MoTEConfig) -> str:
    """Return the words of a trained model's card for its kind, a key of `TRAINED_KINDS`."""
    if kind != "mote":
        return TRAINED_KINDS[kind]
    have, count = len(config.mote_layer_indices), config.num_hidden_layers
    if have == count and _unusually_shared(config) is None:
        return TRAINED_KINDS[kind]
    where = "each block" if have == count else f"{have} of the {count} blocks"
    return f"A **MoTE** (Mixture of Task Experts): an expert per task in {where},"


def _write(folder: Path, template: str, metadata: ModelCardData, repo_id: str, **values: Any) -> None:
    values["instructions_left_out"] = instruction_pooling_in(folder) != "included"
    (folder / "README.md").write_text(render(template, metadata, repo_id, **values), encoding="utf-8")


def render(template: str, metadata: ModelCardData, repo_id: str, **values: Any) -> str:
    """Fill in a template of `hub_card/`."""
    path = str(files("mote.hub_card") / template)
    name = repo_id.rsplit("/", 1)[-1]
    card = ModelCard.from_template(metadata, template_path=path, model_name=name, repo_id=repo_id, **values)
    return str(card).rstrip() + "\n"


def card_data(source: Checkpoint, relation: str, tags: tuple[str, ...] = ()) -> ModelCardData:
    """Build a card's metadata: base model, and the source's language and licence.

    The base model is an id on the Hub: for a folder, the one that its own card names, if any.
    """
    of_source = front_matter(source.folder)
    base_model = hub_ids(of_source.get("base_model")) if source.is_local else source.name
    return ModelCardData(
        base_model=base_model,
        base_model_relation=relation if base_model else None,
        language=languages(of_source.get("language")),
        license=of_source.get("license", nv_embed.LICENSE if source.format == "nv_embed" else None),
        library_name="sentence-transformers",
        pipeline_tag="sentence-similarity",
        tags=["sentence-transformers", "feature-extraction", *tags],
        **{name: of_source[name] for name in ("license_name", "license_link") if name in of_source},
    )


def languages(of_source: Any) -> Any:
    """Return the languages of a card; YAML reads an unquoted `no`, Norwegian, as false."""
    if isinstance(of_source, list):
        return [languages(one) for one in of_source]
    return "no" if of_source is False else of_source


def front_matter(folder: Path) -> dict[str, Any]:
    """Read the metadata of the card in a folder; empty if the card cannot be read."""
    readme = folder / "README.md"
    try:
        return (metadata_load(readme) if readme.is_file() else None) or {}
    except (yaml.YAMLError, ValueError):
        return {}


def hub_ids(names: Any) -> Any:
    """Return the name or list of names, without those that are folders rather than ids on the Hub (user/name)."""
    if isinstance(names, list):
        return [name for name in names if hub_ids(name)] or None
    return names if isinstance(names, str) and "/" in names else None


def source_link(source: Checkpoint) -> str:
    """Return the source's page on the Hub, or the card's own section if it is a folder."""
    return "#how-it-was-made" if source.is_local else f"https://huggingface.co/{source.name}"


def escaped(text: str) -> str:
    """Escape a text for use between the quotes of a Python string, on one line."""
    return json.dumps(text, ensure_ascii=False)[1:-1]


def cell(text: str) -> str:
    """Escape a text for use in a table."""
    return escaped(text).replace("|", r"\|")
