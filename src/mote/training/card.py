"""The model card of a trained model, filled from its recipe and its record."""

from pathlib import Path
from typing import Any

from configuration_mote import MoTEConfig
from mote.checkpoints import cards
from mote.checkpoints.reading import open_any
from mote.training.recipe import Recipe

RECIPE_FILE = "recipe.yaml"
RECORD_FILE = "training.json"
CURVES_FILE = "curves.png"


def write(recipe: Recipe, names: MoTEConfig, record: dict[str, Any], folder: Path) -> None:
    """Render README.md.

    Args:
        recipe: What the model was trained by.
        names: Its tasks and their instructions.
        record: What `training.json` says.
        folder: Of the model.
    """
    training = recipe.training
    fields = ("batch_size", "learning_rate", "weight_decay", "seed")
    cards.write_trained_card(
        folder,
        Path(recipe.output).name,
        names,
        open_any(recipe.model.source, recipe.model.revision),
        kind={"token": "token_routed"}.get(recipe.model.kind, recipe.model.kind),
        recipe={"name": recipe.name, "description": recipe.description}
        | {key: getattr(training, key) for key in fields},
        run={**record, "resumed_from_step": record["went_on_from_step"]},
        data=[
            (name, task.batches, task.loss, task.temperature if task.loss == "InfoNCE" else "", _datasets(name, record))
            for name, task in recipe.tasks.items()
        ],
        seen=record["experts"] or record["tasks"],
        scores=_scores(record["validation"]),
        instructions=recipe.model.instructions,
        recipe_file=RECIPE_FILE,
        curves_file=CURVES_FILE,
    )


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
