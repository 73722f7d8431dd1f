"""Variants trained for the paper's tables and figures, and the scales of training."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import mote
from mote.training.recipe import Recipe
from mote.training.recipe_files import load_recipe

TASKS = ("retrieval", "classification", "clustering")
KIND_OF_TASK = {"retrieval": "beir/*", "classification": "classification/*", "clustering": "clustering/*"}
SEARCH = ("beir/*", "reranking/*")
OTHERS = ("classification/*", "clustering/*", "pair/*", "sts/*", "summarization/*")
ALL_DATASETS = (*SEARCH, *OTHERS)
MATCHED = ("pair/*", "sts/*", "summarization/*")
"""Datasets of text matching."""
SERVED = {
    "retrieval": SEARCH,
    "classification": ("classification/*", *MATCHED),
    "clustering": ("clustering/*",),
}
"""Task → datasets on which its expert, or a model of this task alone, is evaluated."""
TEMPERATURES = (0.01, 0.03, 0.06)
BATCHES = ("homogeneous", "heterogeneous")
OF_THE_RECIPE = {name: (task.batches, task.temperature) for name, task in load_recipe("mote").tasks.items()}
"""Batches and temperature of each task in the paper's recipe."""


Making = Callable[[Path, Path, Path], Path]
"""Function of a trained model, a folder for what is made of it, and the dense model that the training started from."""


@dataclass(frozen=True)
class Variant:
    """A model of the comparison: a shipped recipe with changes.

    Attributes:
        recipe: Name of the shipped recipe.
        changes: `key=value` overrides.
        datasets: Patterns of the datasets that it is evaluated on.
        few_seeds: Whether it is trained only with the scale's `few_seeds`.
        made_of: Variant that it is made from, if it is not trained itself.
        made_by: Function that makes it.
        last_stage: Overrides with which what is made then learns the teacher's embeddings; None: it does not.
        after_training: Details of what is done after training that its name does not give, for the stored scores.
        own_rate: Whether it uses its own best learning rate, where the other variants of the scale share one.
        rate_factor: Its learning rate as a multiple of the shared one, if the scale has a sweep.
        expert_rate_factor: Learning rate of its experts, or of those weights of a dense model that a MoTE has once per
            expert, as a multiple of its own learning rate.
        start: Model that it starts from: as given, after learning a teacher's embeddings, or pre-trained with CoT-MAE.
        trained_on: Folder of `benchmarks.paper.data` that it is trained on, in place of the scale's.
        mined: Whether its retrieval pairs have mined negatives.
        trained: Whether it is trained, or is what others start from.
        late: Whether it is dense in the first half of its training, and gets its experts then.
        trial_changes: Further overrides in trials.
    """

    recipe: str
    changes: tuple[str, ...] = ()
    datasets: tuple[str, ...] = ALL_DATASETS
    few_seeds: bool = False
    made_of: str | None = None
    made_by: Making | None = None
    last_stage: tuple[str, ...] | None = None
    after_training: tuple[str, ...] = ()
    own_rate: bool = False
    rate_factor: float = 1.0
    expert_rate_factor: float | None = None
    start: Literal["given", "distilled", "pretrained"] = "given"
    trained_on: str | None = None
    mined: bool = False
    trained: bool = True
    late: bool = False
    trial_changes: tuple[str, ...] = ()

    @property
    def has_teacher(self) -> bool:
        """Whether its start, its mined negatives or its last stage come from a teacher."""
        return self.start == "distilled" or self.mined or self.last_stage is not None


def base_of(name: str) -> str:
    """Return a variant's name without its improvements: `mote` of `mote+mined`."""
    return name.partition("+")[0]


def made_by(function: Callable[..., Any], *arguments: Any, **settings: Any) -> Making:
    """Return a function that makes a variant with one of `mote.experts`."""
    return lambda source, out, start: mote.transform(source, out, function, *arguments, **settings)


def ablations(task: str) -> dict[str, tuple[str, float]]:
    """Runs of Figures 4 to 7: the recipe's batches at each temperature, the other batches at the recipe's temperature.

    Returns:
        Variant → batches and temperature. Each variant is a dense model with instructions, trained only on this task.
    """
    batches, temperature = OF_THE_RECIPE[task]
    pairs = [(batches, step) for step in TEMPERATURES] + [(other, temperature) for other in BATCHES if other != batches]
    return {f"sem-{task}-{kind}-{step:g}": (kind, step) for kind, step in pairs}


def _ablation(task: str, batches: str, temperature: float) -> Variant:
    changes = (f"tasks.{task}.batches={batches}", f"tasks.{task}.temperature={temperature}")
    return Variant(f"sem-{task}", changes, datasets=(KIND_OF_TASK[task],), few_seeds=True)


SHARED_EXPERT = (
    "model.experts=[classification, search_query, search_document]",
    "model.tasks={clustering: search_document}",
)
HOMOGENEOUS = ("tasks.classification.batches=homogeneous", "tasks.clustering.batches=homogeneous")
EXPERT_RATES = "training.learning_rate_mapping={'experts\\.(classification|clustering)\\.': 5.0e-4}"

START = "start"
"""The dense checkpoint, before any training; `start+distilled`: after it has learned from a teacher."""
SWEPT = ("em", "ic", "mote")
"""Variants whose validation scores choose the learning rates of a scale with a sweep."""

VARIANTS: dict[str, Variant] = {
    START: Variant("em", trained=False),
    "em": Variant("em"),
    "ic": Variant("ic"),
    **{f"sem-{task}": Variant(f"sem-{task}", datasets=SERVED[task]) for task in TASKS},
    "mote": Variant("mote"),
    "mote-static": Variant("mote-static"),
    "mote-every-other": Variant("mote-every-other", few_seeds=True),
    "tlr": Variant("tlr", few_seeds=True),
    "mote-average": Variant("mote", made_of="mote", made_by=made_by(mote.experts.average)),
    **{
        f"mote-to-mean-{part:g}": Variant("mote", made_of="mote", made_by=made_by(mote.experts.interpolate, part))
        for part in (0.25, 0.5, 0.75)
    },
    "mote-shared": Variant("mote", SHARED_EXPERT, few_seeds=True),
    "mote-expert-rates": Variant("mote", (EXPERT_RATES,), few_seeds=True),
    "mote-homogeneous": Variant("mote", HOMOGENEOUS, few_seeds=True),
    # At scale `small` its best rate was ten times that of the others (docs/results.md).
    "task-lora": Variant("task-lora", rate_factor=10.0),
    **{f"{name}-high-rate": Variant(name, few_seeds=True) for name in ("em", "ic", "mote", "mote-every-other")},
    **{f"{name}-own-rate": Variant(name, own_rate=True, few_seeds=True) for name in SWEPT},
    **{name: _ablation(task, *changed) for task in TASKS for name, changed in ablations(task).items()},
}


@dataclass(frozen=True)
class Scale:
    """Amount of training and evaluation.

    Attributes:
        source: Dense checkpoint that all variants start from.
        data: Data folder; None: `--data` is required.
        changes: Settings of every run.
        learning_rates: Variant → learning rate; "": all others.
        sweep: Learning rates to choose from on validation sets, if none is given.
        chosen_by: Scale whose trials choose the learning rate, the data and the improvements. Default: its own.
        repeats: Whether the full runs of that scale choose, too: its best recipes are trained again.
        candidates: Variants of which validation sets choose one, in place of the improvements of another scale.
        trained_on: Training data: the data folder as it is, or its `pairs` or `labels` by `benchmarks.paper.data`.
        times: Multiple of the maximum numbers of rows in `benchmarks.paper.data`.
        distilled_by: Scale whose distilled start is this scale's, too. Default: it has its own.
        text_length: Maximum length of a text in training, in tokens. Default: the model's.
        seeds: Seeds of most variants.
        few_seeds: Seeds of variants with `few_seeds`.
        few_seeds_of: Further variants that are trained only with `few_seeds`.
        limits: Patterns of datasets → number of test rows or queries per dataset; None: all. Retrieval costs most,
            because all documents are embedded.
        dtype: Dtype for evaluation.
    """

    source: str
    data: str | None
    changes: tuple[str, ...]
    learning_rates: dict[str, float] = field(default_factory=dict)
    sweep: tuple[float, ...] = ()
    chosen_by: str | None = None
    repeats: bool = False
    candidates: tuple[str, ...] = ()
    trained_on: Literal["folder", "pairs", "labels"] = "folder"
    times: int = 1
    distilled_by: str | None = None
    text_length: int | None = None
    seeds: tuple[int, ...] = (42,)
    few_seeds: tuple[int, ...] = (42,)
    few_seeds_of: tuple[str, ...] = ()
    limits: dict[tuple[str, ...], int | None] = field(default_factory=lambda: {SEARCH: None, OTHERS: None})
    dtype: str | None = None


BF16 = (
    "training.bf16=true",
    "model.attention=eager",  # in bf16 on a CPU several times as fast as the fused kernel
)

MEDIUM = Scale(
    source="runs/mlm-start/model",  # docs/lab.md has the command that makes it
    data=None,
    changes=(
        "training.batch_size=256",
        "training.mini_batch_size=32",
        "training.gradient_caching=false",  # a third less time; the batch fits in memory
        "model.max_length=128",
        "model.dropout=0",  # as the paper's start
        "validation.share=0.005",
        "validation.limit=20",
    ),
    sweep=(2e-4, 4e-4, 8e-4),
    chosen_by="medium-bf16",
    trained_on="pairs",
    text_length=64,
    seeds=(42, 43, 44),
    few_seeds_of=("sem-retrieval", "sem-classification", "sem-clustering", "mote-static"),
    limits={SEARCH: 100, OTHERS: 500},
)
"""The paper's regime: from a masked language model, on pairs of texts for all tasks. docs/plan-of-experiments.md."""

MEDIUM_GPU = replace(
    MEDIUM,
    changes=(*MEDIUM.changes, "training.bf16=true", "training.mini_batch_size=null"),  # a column in one forward pass
    chosen_by="medium-bf16",
    repeats=True,
    dtype="bfloat16",
)
"""The same on one GPU."""

LARGE_GPU = replace(
    MEDIUM_GPU,
    times=4,
    distilled_by="medium-bf16",
    candidates=tuple(
        f"mote+five-tasks+matching-by-search+homogeneous+distilled+labels-twice+to-mean-0.25+unseen-near-start{moved}"
        for moved in ("", "+search-to-start-0.25", "+to-start-0.25", "+search-to-start-0.25+to-start-0.25")
    ),
)
"""With more rows of the same datasets, and without mined negatives, which take long to find."""

MEDIUM_CPU = replace(
    MEDIUM_GPU,
    changes=(*MEDIUM.changes, *BF16),
    distilled_by="medium-bf16",
    candidates=tuple(
        f"mote+five-tasks+matching-by-search+homogeneous+distilled+mined+labels-twice+{moved}+summaries-distilled"
        for moved in ("own-moves-and-shared", "own-moves", "to-mean-0.25")
    ),
)
"""As `medium-bf16`, from the start of `large-gpu`, also without mined negatives; summarization has its own expert."""

SCALES = {
    "smoke": Scale(
        source="examples/small-encoder",
        data="examples/data",
        changes=(
            "data.limit=150",
            "training.batch_size=64",
            "training.mini_batch_size=32",
            "training.max_steps=6",
            "model.max_length=48",
            "validation.limit=20",
        ),
        learning_rates={"": 2e-4},
        limits={SEARCH: 40, OTHERS: 40},
    ),
    "small": Scale(
        source="sentence-transformers/paraphrase-MiniLM-L3-v2",
        data=None,
        changes=(
            "data.limit=200",
            "training.batch_size=128",
            "training.mini_batch_size=16",
            "training.bf16=true",
            "model.max_length=64",
            "validation.limit=40",
        ),
        learning_rates={
            "": 1.5e-4,
            **dict.fromkeys(("em-high-rate", "ic-high-rate", "mote-high-rate", "mote-every-other-high-rate"), 5e-4),
        },
        seeds=(42, 43),
        limits={SEARCH: 100, OTHERS: 500},
        dtype="bfloat16",
    ),
    "full": Scale(
        source="nomic-ai/nomic-bert-2048",
        data=None,
        changes=("training.bf16=true", "model.max_length=512"),
        learning_rates={"": 5e-6},
        seeds=(42, 43, 44),
    ),
    "medium": MEDIUM,
    "medium-bf16": replace(MEDIUM, changes=(*MEDIUM.changes, *BF16), chosen_by=None, dtype="bfloat16"),
    "medium-gpu": MEDIUM_GPU,
    "large-gpu": LARGE_GPU,
    "medium-cpu": MEDIUM_CPU,
    "medium-labels": replace(MEDIUM_GPU, trained_on="labels", repeats=False),
    "medium-embedder": replace(
        MEDIUM,
        source="sentence-transformers/paraphrase-MiniLM-L3-v2",
        sweep=(5e-5, 1e-4, 2e-4, 4e-4),  # a finished embedder bears less
        chosen_by=None,
        seeds=(42,),
    ),
}


def recipe_of(
    variant: Variant, scale: Scale, source: str, data: str, seed: int, changes: Sequence[str] = (), name: str = ""
) -> Recipe:
    """Return the complete recipe of one run, except for its output folder, and for its rate if there is a sweep."""
    rate = scale.learning_rates.get(name, scale.learning_rates.get(""))
    if scale.text_length is not None:
        length = f"max_length: {scale.text_length}"
        tasks = load_recipe(variant.recipe, variant.changes).tasks
        changes = [*(f"tasks.{task}.datasets=[{{path: {task}/*, {length}}}]" for task in tasks), *changes]
    settings = [f"model.source={source}", f"data.folder={data}", *scale.changes, f"training.seed={seed}"]
    if rate is not None:
        settings.append(f"training.learning_rate={rate}")
    return load_recipe(variant.recipe, [*settings, *variant.changes, *changes])
