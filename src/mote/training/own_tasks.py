"""Tasks of one's own: their roles, loss and training follow from their data."""

import logging
import math
from typing import Any

from mote.checkpoints.reading import Checkpoint, is_mote
from mote.data.columns import ROW_TYPES, Examples, read_examples
from mote.data.rows import find_datasets
from mote.remote.configuration_mote import GENERAL, PAPER_INSTRUCTIONS, UNSEEN_TASKS
from mote.training.recipe import Recipe

# What data teach → roles of search, or MTEB's types of tasks, that their expert can serve.
ROLES = {
    "search": ("query", "document"),
    "labels": ("classification",),
    "similarity": ("sts", "pair_classification"),
}

# Rows below which → batch size and epochs: mostly 60 to 230 steps.
SETTINGS = ((500, 16, 4), (1_000, 16, 2), (2_000, 16, 1), (5_000, 64, 3), (20_000, 128, 2), (math.inf, 256, 1))

logger = logging.getLogger(__name__)


def settings_for(rows: int, only_experts: bool) -> dict[str, Any]:
    """Return batch size, epochs and learning rate for a number of rows; research/lab.md says what they rest on."""
    batch_size, epochs = next(found for most, *found in SETTINGS if rows < most)
    return {
        "batch_size": batch_size,
        "num_train_epochs": epochs,
        "learning_rate": 2.5e-4 if only_experts else 1e-4,
    }


def complete(recipe: Recipe, source: Checkpoint) -> Recipe:
    """Complete the tasks without an `anchor`: roles, loss, and the settings of the training, from their data.

    An expert gets the roles that no expert but `general` has; it is always reached by its own name.
    """
    config: Any = source.config if is_mote(source.config) else None
    own = [name for name, task in recipe.tasks.items() if not task.anchor]
    paper = [] if len(own) == len(recipe.tasks) else [*PAPER_INSTRUCTIONS]
    experts = config.experts if config else recipe.model.experts or [*paper, *own]
    served = dict.fromkeys((*UNSEEN_TASKS, "classification"), GENERAL) if GENERAL in experts else {}
    served |= {
        **(config.tasks if config else {}),
        **{name: name for name in own if name in served},
        **recipe.model.tasks,
    }
    tasks, rows = {**recipe.tasks}, 0
    for name in own:
        data = _read(recipe, name)
        columns, count = data[0].columns, sum(len(one.rows) for one in data)
        documents = served.get("document", GENERAL)
        roles = ROLES[columns.teaches][: 1 if recipe.queries_only and columns.teaches == "search" else None]
        free = all(served.get(role, GENERAL) in (name, GENERAL) for role in roles)
        served |= dict.fromkeys(roles, name) if free else {}
        settings: dict[str, Any] = {"loss": "CoSENTLoss"} if columns.row_type == "scored" else {"temperature": 0.05}
        settings["anchor"] = "query" if "query" in roles and free else name
        if columns.teaches == "search" and recipe.queries_only:
            settings["positive"] = documents
        elif "document" in roles and free:
            settings["positive"] = "document"
        tasks[name] = tasks[name].updated(**{**settings, **tasks[name].model_dump(exclude_unset=True)})
        rows += count
        serves = f"for {', '.join(roles)}" if free else f"by name only, as others serve {', '.join(roles)}"
        logger.info("%s: %s %s; %s", name, f"{count:,}", ROW_TYPES[columns.row_type], serves)
    chosen = settings_for(rows, recipe.training.only_experts is not None)
    training = {**chosen, **recipe.training.model_dump(exclude_unset=True)}
    model = recipe.model.updated(tasks=served, **({} if config else {"experts": experts}))
    return recipe.updated(tasks=tasks, model=model, training=training)


def _read(recipe: Recipe, name: str) -> list[Examples]:
    """Read the datasets of a task, which must all teach the same."""
    places = [one for dataset in recipe.tasks[name].datasets for one in find_datasets(dataset, recipe.data.place)]
    data = {one.name: read_examples(one, recipe.data.max_invalid_fraction) for one in places}
    if len({one.columns.row_type for one in data.values()}) > 1:
        types = "; ".join(f"{dataset}: {ROW_TYPES[one.columns.row_type]}" for dataset, one in data.items())
        raise ValueError(f"tasks.{name} mixes {types}: make them separate tasks")
    return [*data.values()]
