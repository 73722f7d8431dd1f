"""Consistency filtering: a pair stays if a model finds its positive among the other documents.

Nussbaum and Duderstadt, arXiv:2502.07972, section 4.2: within shards of a million pairs, the document must be among the
two nearest to its query (after Wang et al., "Text Embeddings by Weakly-Supervised Contrastive Pre-training",
arXiv:2212.03533, section 3.1).
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mote.corpora.pairs import PairDataset, Pairs, read_pairs, write_rows
from mote.corpora.run import FoundTeacher, Run, Teacher, decide, inputs_of, locate, open_run
from mote.corpora.scorers import Scorer, nearest_unknown
from mote.reporting import table

EXAMPLES = 20  # of dropped pairs, in the record
SHARD = 1_000_000

logger = logging.getLogger(__name__)


def consistent(pairs: Pairs, scorer: Scorer, nearest: int, rows: np.ndarray) -> np.ndarray:
    """Decide which rows stay: their positive is found, and fewer than `nearest` other documents score above it.

    Args:
        pairs: A shard of a dataset.
        scorer: The model, over its texts.
        nearest: Number of nearest documents that must include the positive, other known positives not counted.
        rows: Indices of rows, [R].

    Returns:
        True for rows that stay, [R].
    """
    own = scorer.score(pairs.anchors[rows], pairs.positives[rows])
    others = nearest_unknown(pairs, scorer, rows, nearest)
    above = [(scores > score).sum() for (_, scores), score in zip(others, own, strict=True)]
    return (own > scorer.floor) & (np.array(above) < nearest)


def filter_pairs(
    datasets: Sequence[str],
    out: str | Path,
    teacher: Teacher,
    *,
    nearest: int = 2,
    shard_size: int = SHARD,
    data: str | Path = ".",
    split: str = "train",
    subset: str | None = None,
    overwrite: bool = False,
) -> Path:
    """Copy datasets of pairs, without the pairs that a model does not confirm.

    The same call resumes an interrupted run.

    Args:
        datasets: Paths and patterns below `data`, as in recipes, or `hub:user/name`.
        out: Folder to write: the rows that stay, under the same paths.
        teacher: The model.
        nearest: A pair stays if its positive is among this many nearest documents of its shard.
        shard_size: Pairs per shard.
        data: Data folder.
        split: Split of each dataset.
        subset: Configuration of a dataset on the Hub.
        overwrite: Replace another run in the folder.

    Returns:
        The folder. `record.json` holds the settings, and for each dataset how many pairs stay, with examples of dropped
        pairs.

    Raises:
        FileNotFoundError: If a dataset or the model does not exist.
        OSError: If a package is not installed, another process writes to the folder, or its disk is full.
        ValueError: If a row or setting is invalid, or the folder holds something else.
    """
    for name, number in (("nearest", nearest), ("shard_size", shard_size)):
        if number < 1:
            raise ValueError(f"{name} must be at least 1, got {number}")
    folder = Path(out)
    locations = locate(datasets, data, split, subset)
    found = teacher.find()
    settings = {"nearest": nearest, "shard_size": shard_size}
    record = {
        "what": "filter",
        "teacher": found.identity(),
        "settings": settings,
        "inputs": inputs_of(locations),
    }
    with found, open_run(folder, record, overwrite) as run:
        for location in locations:
            if not run.is_finished(location.name):
                file = f"{location.name}/{split}.jsonl.gz"
                _filter(run, read_pairs(location), found, nearest, shard_size, file)
        entries = run.record["datasets"]
    logger.info("\n%s", filtering_report(entries))
    return folder


def _filter(
    run: Run,
    dataset: PairDataset,
    teacher: FoundTeacher,
    nearest: int,
    shard_size: int,
    file: str,
) -> None:
    name, kept = dataset.name, []
    for number, start in enumerate(range(0, len(dataset.rows), shard_size)):
        pairs, work = dataset.pairs.part(slice(start, start + shard_size)), run.work(name) / str(number)
        scorer = teacher.scorer(pairs, work)
        stays = decide(
            work,
            len(pairs.anchors),
            lambda rows, pairs=pairs, scorer=scorer: {"stays": consistent(pairs, scorer, nearest, rows)},  # type: ignore[misc]
            name,
        )
        kept.append(stays["stays"])
    stays_of_rows = np.concatenate(kept)
    dropped = np.flatnonzero(~stays_of_rows)
    shown = np.random.default_rng(0).permutation(dropped)[:EXAMPLES]
    run.finish(
        name,
        file,
        lambda path: write_rows(path, (dataset.rows[row] for row in np.flatnonzero(stays_of_rows).tolist())),
        rows=len(dataset.rows),
        kept=int(stays_of_rows.sum()),
        dropped=len(dropped),
        examples=[dataset.rows[row] for row in sorted(shown.tolist())],
    )


def filtering_report(entries: dict[str, dict[str, Any]]) -> str:
    """Lay out how many pairs stay, a line for each dataset.

    Args:
        entries: `datasets` of `record.json`.
    """
    rows = [
        [name, *(f"{one[key]:,}" for key in ("rows", "kept", "dropped")), f"{100 * one['dropped'] / one['rows']:.1f} %"]
        for name, one in entries.items()
    ]
    return table(["dataset", "rows", "kept", "dropped", ""], rows)
