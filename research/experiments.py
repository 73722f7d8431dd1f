"""Variants trained for the paper's tables, and the scales of training."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from mote.training.recipe import Recipe, load_recipe
from research.scores import START

SEARCH = ("beir/*", "reranking/*")
MATCHING = ("pair/*", "sts/*", "summarization/*")
OTHERS = ("classification/*", "clustering/*", *MATCHING)
ALL_DATASETS = (*SEARCH, *OTHERS)
LIMITS: dict[tuple[str, ...], int | None] = {SEARCH: 100, OTHERS: 500}
"""Patterns of test sets → queries or rows of each. Retrieval costs most, because all documents are embedded."""


@dataclass(frozen=True)
class Variant:
    """A model of the comparison: a shipped recipe with changes.

    Attributes:
        recipe: Name of the shipped recipe.
        changes: `key=value` overrides.
        datasets: Patterns of the datasets that it is evaluated on.
        rate_factor: Its learning rate as a multiple of the scale's.
        average_of: Variant whose experts it averages, if it is not trained itself.
    """

    recipe: str
    changes: tuple[str, ...] = ()
    datasets: tuple[str, ...] = ALL_DATASETS
    rate_factor: float = 1.0
    average_of: str | None = None


VARIANTS: dict[str, Variant] = {
    START: Variant("em"),
    "em": Variant("em"),
    "ic": Variant("ic"),
    "sem-retrieval": Variant("sem-retrieval", datasets=SEARCH),
    "sem-classification": Variant("sem-classification", datasets=("classification/*", *MATCHING)),
    "sem-clustering": Variant("sem-clustering", datasets=("clustering/*",)),
    "mote": Variant("mote"),
    "mote-static": Variant("mote-static"),
    "mote-every-other": Variant("mote-every-other"),
    "mote-average": Variant("mote", average_of="mote"),
    "tlr": Variant("tlr"),
    "task-lora": Variant("task-lora", rate_factor=10.0),  # at scale `small` its best rate was ten times the others'
}
"""The paper's models, and task LoRAs."""

_UNSEEN = ("sts", "pair_classification", "summarization")
_LONGER = "training.num_train_epochs=1.1"
_LABELS_TWICE = ("tasks.classification.weight=2", "tasks.clustering.weight=2", _LONGER)
_FIVE_TASKS = (
    "tasks.paraphrases={anchor: text_matching, batches: homogeneous, datasets: [paraphrases/*]}",
    "tasks.classification.batches=homogeneous",
    "tasks.clustering.batches=homogeneous",
    *_LABELS_TWICE,
)
_MATCHING = (
    "model.experts=[classification, clustering, search_query, search_document, text_matching]",
    *(f"model.tasks.{task}=text_matching" for task in _UNSEEN),
    "model.instructions.text_matching='text_matching: '",
)
_MATCHING_BY_SEARCH = (  # as in mote-best
    "model.experts=[classification, clustering, search]",
    *(f"model.tasks.{task}=search" for task in ("search_query", "search_document", "text_matching", *_UNSEEN)),
    *(f"model.instructions.{task}='{task}: '" for task in ("search_query", "search_document", "text_matching")),
    *(f"model.instructions.{task}='text_matching: '" for task in _UNSEEN),
)
_BACK = "training.start_weight=0.25"  # a quarter back to the start


def _separate(*tasks: str, datasets: tuple[str, ...]) -> Variant:
    """One dense model for some of the tasks of mote-best."""
    others = {"retrieval", "classification", "clustering", "paraphrases"} - {*tasks}
    without = (f"tasks.{task}=null" for task in sorted(others))
    twice = (f"tasks.{task}.weight=2" for task in tasks if task in ("classification", "clustering"))
    changes = ("model.kind=dense", "training.start_weight=0", _LONGER, *without, *twice)
    return Variant("mote-best", changes, datasets)


BEST: dict[str, Variant] = {
    START: Variant("em"),
    "em": Variant("em", (*_MATCHING, *_FIVE_TASKS, _BACK)),
    "ic": Variant("ic", (*_MATCHING, *_FIVE_TASKS, _BACK)),
    "sem-retrieval": _separate("retrieval", "paraphrases", datasets=(*SEARCH, *MATCHING)),
    "sem-classification": _separate("classification", datasets=("classification/*",)),
    "sem-clustering": _separate("clustering", datasets=("clustering/*",)),
    "mote": Variant("mote-best", _LABELS_TWICE),
    "tlr": Variant("tlr", (*_MATCHING, *_FIVE_TASKS, _BACK)),
    "task-lora": Variant("task-lora", (*_MATCHING_BY_SEARCH, *_FIVE_TASKS), rate_factor=10.0),
}
"""The best recipe of each kind on five tasks, which start from a distilled model (scale `best`)."""


@dataclass(frozen=True)
class Scale:
    """Amount of training and evaluation.

    Attributes:
        source: Dense checkpoint that all variants start from.
        changes: Settings of every run.
        learning_rate: Learning rate of all variants.
        variants: Variants by name.
        data: Default data folder.
        trained_on: Training data: the data folder as it is, or a folder of `research.data`.
        distilled: Whether the start first learns a teacher's embeddings of the training texts.
        text_length: Maximum length of a text in training, in tokens. Default: the model's.
        seeds: Default seeds.
        limits: Patterns of datasets → number of test rows or queries per dataset; None: all.
        dtype: Dtype for evaluation.
    """

    source: str
    changes: tuple[str, ...]
    learning_rate: float
    variants: dict[str, Variant] = field(default_factory=lambda: VARIANTS)
    data: str | None = None
    trained_on: Literal["folder", "pairs", "labels", "five_tasks"] = "folder"
    distilled: bool = False
    text_length: int | None = None
    seeds: tuple[int, ...] = (42,)
    limits: dict[tuple[str, ...], int | None] = field(default_factory=lambda: LIMITS)
    dtype: str | None = None


BF16 = (
    "training.bf16=true",
    "model.attention=eager",  # in bf16 on a CPU several times as fast as the fused kernel
)
MEDIUM = Scale(
    source="runs/mlm-start/model",  # research/lab.md has the command that makes it
    changes=(
        "training.batch_size=256",
        "training.mini_batch_size=32",
        "training.gradient_caching=false",  # a third less time; the batch fits in memory
        "model.max_length=128",
        "model.dropout=0",  # as the paper's start
        "validation.share=0.005",
        "validation.limit=20",
    ),
    learning_rate=4e-4,
    trained_on="pairs",
    text_length=64,
    seeds=(42, 43, 44),
)
"""The paper's regime: from a masked language model, on pairs of texts for all tasks (plan-of-experiments.md)."""
MEDIUM_BF16 = replace(MEDIUM, changes=(*MEDIUM.changes, *BF16), dtype="bfloat16")
MEDIUM_GPU = replace(
    MEDIUM, changes=(*MEDIUM.changes, "training.bf16=true", "training.mini_batch_size=null"), dtype="bfloat16"
)

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
        learning_rate=2e-4,
        limits={SEARCH: 40, OTHERS: 40},
    ),
    "small": Scale(
        source="sentence-transformers/paraphrase-MiniLM-L3-v2",
        changes=(
            "data.limit=200",
            "training.batch_size=128",
            "training.mini_batch_size=16",
            "training.bf16=true",
            "model.max_length=64",
            "validation.limit=40",
        ),
        learning_rate=1.5e-4,
        seeds=(42, 43),
        dtype="bfloat16",
    ),
    "medium": MEDIUM,
    "medium-bf16": MEDIUM_BF16,
    "medium-gpu": MEDIUM_GPU,
    "medium-labels": replace(MEDIUM_GPU, trained_on="labels"),
    "medium-embedder": replace(
        MEDIUM, source="sentence-transformers/paraphrase-MiniLM-L3-v2", learning_rate=1e-4, seeds=(42, 43)
    ),
    "best": replace(MEDIUM_BF16, trained_on="five_tasks", distilled=True, variants=BEST),
    "best-gpu": replace(MEDIUM_GPU, trained_on="five_tasks", distilled=True, variants=BEST),
    "full": Scale(
        source="nomic-ai/nomic-bert-2048",
        changes=("training.bf16=true", "model.max_length=512"),
        learning_rate=5e-6,
        seeds=(42, 43, 44),
        limits={ALL_DATASETS: None},
    ),
}
"""Scales whose models can be trained here; `best` is `medium-cpu` without mined negatives."""


def recipe_of(scale: Scale, variant: Variant, source: str, data: str, seed: int, changes: Sequence[str] = ()) -> Recipe:
    """Return the complete recipe of one run, except for its output folder."""
    lengths = []
    if scale.text_length is not None:
        tasks = load_recipe(variant.recipe, variant.changes).tasks
        length = f"max_length: {scale.text_length}"
        lengths = [f"tasks.{task}.datasets=[{{path: {task}/*, {length}}}]" for task in tasks]
    rate = scale.learning_rate * variant.rate_factor
    settings = [f"model.source={source}", f"data.folder={data}", f"training.seed={seed}"]
    settings += [f"training.learning_rate={rate:g}", *scale.changes, *variant.changes, *lengths, *changes]
    return load_recipe(variant.recipe, settings)
