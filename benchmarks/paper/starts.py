"""Models that improved variants start from."""

from pathlib import Path
from typing import TYPE_CHECKING

import mote
from benchmarks.locking import alone
from benchmarks.paper.experiments import Variant, recipe_of
from benchmarks.paper.improvements import variant_of
from benchmarks.trained import hash_of_weights, trained
from mote.checkpoints.reading import open_mote
from mote.remote.configuration_mote import PAPER_INSTRUCTIONS
from mote.training.recipe import Recipe
from mote.training.recipe_files import load_recipe

if TYPE_CHECKING:
    from benchmarks.paper.runs import Runs


def distilled(runs: "Runs", trained_on: str | None) -> Path:
    """Return the start after it has learned a teacher's embeddings of all training texts; train it first if missing."""
    name = f"em+{trained_on.replace('_', '-')}" if trained_on else "em"
    variant = variant_of(name)
    changes = [*runs.settings_of(variant), *taught(variant, runs.teacher)]
    changes.append(f"output={runs.out / runs.kind / f'distilled-{name}'}")
    seed = runs.scale.few_seeds[0]
    data = runs.training_data(variant)
    recipe = recipe_of(variant, runs.scale, runs.source, data, seed, changes)
    return trained(recipe, runs.report, {**runs.digest_of_data(variant), "teacher": hash_of_weights(runs.teacher)})


def taught(variant: Variant, teacher: str) -> list[str]:
    """Return the overrides with which a variant learns a teacher's embeddings, in all of its tasks."""
    tasks = load_recipe(variant.recipe, variant.changes).tasks
    settings = ("loss=EmbedDistillLoss", f"teacher.source={teacher}")
    return [f"tasks.{task}.{setting}" for task in tasks for setting in settings]


def pretrained(folder: Path, out: Path, recipe: Recipe) -> Path:
    """Return a model that `benchmarks.cot` has pre-trained: one encoder for both sides, or experts.

    A MoTE gets the experts, tasks and instructions that the recipe requires; new experts are copies of the document
    expert. One encoder is the start of LoRAs, too, and of a MoTE with one expert for both sides.
    """
    model = recipe.model
    experts = model.experts or list(PAPER_INSTRUCTIONS)
    one_encoder = model.kind == "dense" or recipe.training.peft is not None
    if one_encoder or not {"search_query", "search_document"} <= {*experts}:
        return folder / "siamese" / "pretrained" / "model"
    made = out / "-".join(["pretrained", *experts])
    with alone(made):
        if not made.exists():
            source = folder / "mote" / "pretrained" / "model"
            for name in [name for name in experts if name not in open_mote(str(source)).config.experts]:
                more = made.with_name(f"{made.name}.{name}")
                if not more.exists():
                    mote.transform(source, more, mote.experts.add, name, "search_document")
                source = more
            texts = {**PAPER_INSTRUCTIONS, **model.instruction_texts}
            own = {task: text for task, text in texts.items() if task in experts or task in model.tasks}
            mote.configure(source, made, tasks=model.tasks, instructions=own)
    return made
