"""The model card."""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import sentence_transformers
import torch
import transformers

from mote.reporting import table as markdown_table
from scripts.distill_small_encoder.student import (
    DIMENSIONS,
    FEED_FORWARD,
    HEADS,
    LAYERS,
    MAX_TOKENS,
    VOCABULARY_SIZE,
    folder_bytes,
)
from scripts.text_sets import ENCODER_SETS

CARD = Path(__file__).with_suffix(".md")


def shown_command(options: argparse.Namespace) -> str:
    """Write down the command, with the last part of each path only."""
    shown = [f"--teacher {options.teacher.name} --data {options.data.name} --out {options.out.name}"]
    shown += [f"--epochs {options.epochs} --batch-size {options.batch_size} --learning-rate {options.learning_rate}"]
    shown += [f"--seed {options.seed}" + (f" --limit {options.limit}" if options.limit else "")]
    return "python -m scripts.distill_small_encoder " + " \\\n    ".join(shown)


@dataclass(frozen=True)
class Facts:
    """What a run has found out.

    Attributes:
        texts: Number of texts.
        kept: Share of the teacher's squared length that the targets keep.
        minutes: Time of all but the evaluation.
        parameters: Number of parameters, in millions.
    """

    texts: int
    kept: float
    minutes: float
    parameters: float


def write_card(
    options: argparse.Namespace, measured: Sequence[dict[str, float]], counts: dict[str, int], facts: Facts
) -> None:
    """Write the model card.

    Args:
        options: Command line.
        measured: Figures of student, teacher and reduced teacher.
        counts: Set → number of its texts.
        facts: All other numbers.
    """
    models = ["this model", "teacher", f"teacher, {DIMENSIONS} dimensions"]
    figures = [[name, *(f"{figures[name]:.2f}" for figures in measured)] for name in measured[0]]
    sets = [[one.path, one.source, one.licence, f"{counts[one.path]:,}"] for one in ENCODER_SETS]
    card = CARD.read_text(encoding="utf-8").format(
        megabytes=folder_bytes(options.out) / 1e6,
        layers=LAYERS,
        dimensions=DIMENSIONS,
        heads=HEADS,
        feed_forward=FEED_FORWARD,
        vocabulary=VOCABULARY_SIZE,
        tokens=MAX_TOKENS,
        figures=markdown_table(["x 100", *models], figures, align="llll"),
        sets=markdown_table(["set", "from", "licence", "texts"], sets, align="llll"),
        command=shown_command(options),
        limited=f" (a trial: of {sum(counts.values()):,})" if options.limit else "",
        epochs=options.epochs,
        batch_size=options.batch_size,
        learning_rate=options.learning_rate,
        seed=options.seed,
        device=torch.cuda.get_device_name() if torch.cuda.is_available() else "a CPU",
        transformers=transformers.__version__,
        sentence_transformers=sentence_transformers.__version__,
        torch=torch.__version__,
        **asdict(facts),
    )
    (options.out / "README.md").write_text(card, encoding="utf-8")
