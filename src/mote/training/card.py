"""The model card of a trained model, filled from its recipe and its record."""

from importlib.resources import files
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard

from configuration_mote import MoTEConfig
from mote.checkpoints import writing as repository
from mote.checkpoints.reading import open_any
from mote.training.recipe import Recipe

RECIPE_FILE = "recipe.yaml"
RECORD_FILE = "training.json"
CURVES_FILE = "curves.png"

WHAT = {
    "mote": "A **MoTE** (Mixture of Task Experts): one attention and one feed-forward expert per task,",
    "token": "A mixture of experts routed token by token,",
    "dense": "A dense text-embedding model,",
}


def write(recipe: Recipe, names: MoTEConfig, record: dict[str, Any], folder: Path) -> None:
    """Render README.md.

    Args:
        recipe: What the model was trained by.
        names: Its tasks and their instructions.
        record: What `training.json` says.
        folder: Of the model.
    """
    source = open_any(recipe.model.source, recipe.model.revision)
    routed = recipe.model.kind == "mote"
    example = "search_query" if "search_query" in names.tasks else names.experts[0]
    argument = "prompt_name" if recipe.model.instructions and names.instruction_of(example) else "task"
    shown = argument == "prompt_name" or routed
    card = ModelCard.from_template(
        repository.card_data(
            source, "finetune", ("mote", "mixture-of-experts", "custom_code") if recipe.model.kind != "dense" else ()
        ),
        template_path=str(files("mote.hub_card") / "trained_model.md"),
        model_name=Path(recipe.output).name,
        what=WHAT[recipe.model.kind],
        source=source.public_name,
        source_link="#training" if source.is_local else f"https://huggingface.co/{source.name}",
        recipe=recipe,
        record=record,
        trust=recipe.model.kind != "dense",
        argument=f', {argument}="{example}"' if shown else "",
        experts=routed,
        tasks=[(task, expert, names.instruction_of(task)) for task, expert in names.tasks.items()],
        data=[(name, task, _datasets(name, record)) for name, task in recipe.tasks.items()],
        seen=record["experts"] or record["tasks"],
        scores=_scores(record["validation"]),
        recipe_file=RECIPE_FILE,
        record_file=RECORD_FILE,
        curves_file=CURVES_FILE,
    )
    card.save(folder / "README.md")


def _datasets(task: str, record: dict[str, Any]) -> str:
    return ", ".join(f"{data['name']} ({data['used']:,})" for data in record["data"] if data["task"] == task)


def _scores(validation: dict[str, dict[str, float] | None]) -> list[tuple[str, str, str]]:
    """List the mean and the tasks; the datasets are in the record."""
    before, after = validation["before"] or {}, validation["after"] or {}
    return [
        (name.removeprefix("validation_"), f"{before[name]:.2f}" if name in before else "", f"{value:.2f}")
        for name, value in after.items()
        if "/" not in name
    ]
