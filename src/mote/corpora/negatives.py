"""`mote mine`: datasets of pairs, copied with hard negatives added."""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from mote.corpora.folder import write_whole
from mote.corpora.mining import Mined, MiningSettings, judge, mine
from mote.corpora.pairs import PairDataset, read_pairs, write_rows
from mote.corpora.run import CHART, FoundTeacher, Run, Teacher, decide, inputs_of, locate, open_run
from mote.corpora.source import find_corpus
from mote.reporting import COLORS, table

BINS = 60  # of the chart

logger = logging.getLogger(__name__)


def mine_negatives(
    datasets: Sequence[str],
    out: str | Path,
    teacher: Teacher,
    settings: MiningSettings | None = None,
    *,
    data: str | Path = ".",
    split: str = "train",
    subset: str | None = None,
    corpus: Sequence[str | Path] = (),
    given: bool = False,
    overwrite: bool = False,
) -> Path:
    """Copy datasets of pairs, adding mined negatives in the columns `negative_1`, `negative_2` and so on.

    The same call resumes an interrupted run. Each dataset is mined separately, with its texts in memory.

    Args:
        datasets: Paths and patterns below `data`, as in recipes, or `hub:user/name`.
        out: Folder to write: the same rows, under the same paths, for recipes to read.
        teacher: Model that scores documents for queries.
        settings: Which candidates to accept.
        data: Data folder.
        split: Split of each dataset.
        subset: Configuration of a dataset on the Hub.
        corpus: Files whose texts are candidates in every dataset, beside its own positives; read as in `mote embed`.
        given: Mine nothing; only filter the negatives that rows already have, by the margins.
        overwrite: Replace another run in the folder.

    Returns:
        The folder. `record.json` holds the settings and statistics, `scores.png` the scores of positives and negatives.

    Raises:
        FileNotFoundError: If a dataset, a file or the model does not exist.
        OSError: If a package is not installed, another process writes to the folder, or its disk is full.
        ValueError: If a row or setting is invalid, or the folder holds something else.
    """
    settings, folder = settings or MiningSettings(), Path(out)
    locations = locate(datasets, data, split, subset)
    found = teacher.find()
    texts = find_corpus([str(file) for file in corpus], split=split).counted() if corpus else None
    record = {
        "what": "mine",
        "teacher": found.identity(),
        "settings": asdict(settings),
        "given": given,
        "inputs": inputs_of(locations),
        "corpus": [part.sha256 for part in texts.parts] if texts else [],
    }
    with found, open_run(folder, record, overwrite) as run:
        candidates = [document.text for document in texts.read()] if texts else []
        for location in locations:
            if not run.is_finished(location.name):
                dataset = read_pairs(location, candidates)
                _mine(run, dataset, found, settings, given, f"{location.name}/{split}.jsonl.gz")
        entries = run.record["datasets"]
        write_whole(folder / CHART, lambda path: _draw(entries, path))
    logger.info("\n%s", mining_report(entries))
    return folder


def _mine(
    run: Run,
    dataset: PairDataset,
    teacher: FoundTeacher,
    settings: MiningSettings,
    given: bool,
    file: str,
) -> None:
    name, pairs = dataset.name, dataset.pairs
    has_negatives = "negative" in dataset.columns.names
    if has_negatives and not given:
        raise ValueError(f"{name} already has negatives, and no others can be added: `--filter` filters them")
    if given and not has_negatives:
        raise ValueError(f"{name} has no negatives to filter: leave out `--filter` to mine some")
    counts = len(dataset.rows), len(pairs.queries), len(pairs.documents)
    logger.info("%s: %d rows, %d queries, %d documents", name, *counts)
    work = run.work(name)
    scorer = teacher.scorer(pairs, work)
    block = partial(judge if given else mine, pairs, scorer, settings)
    mined = Mined(**decide(work, len(dataset.rows), lambda rows: vars(block(rows)), name))
    run.finish(name, file, lambda path: write_rows(path, _rows(dataset, mined)), **_statistics(mined))


def _rows(dataset: PairDataset, mined: Mined) -> Iterator[dict[str, Any]]:
    for row, places in enumerate(mined.documents.tolist()):
        given = dict(zip(dataset.pairs.negatives[row], dataset.negatives[row], strict=True))  # as the row spells them
        negatives = [given.get(place, dataset.pairs.documents[place]) for place in places if place >= 0]
        columns = {f"negative_{number}": text for number, text in enumerate(negatives, start=1)}
        yield {**dataset.without_negatives(row), **columns}


def _statistics(mined: Mined) -> dict[str, Any]:
    found = (mined.documents >= 0).sum(axis=1)
    scores = mined.scores[mined.documents >= 0]
    least = min(0.0, mined.positive_scores.min(), scores.min(initial=0.0))
    largest = max(1.0, mined.positive_scores.max(), scores.max(initial=1.0))
    edges = np.linspace(least, largest, BINS + 1)
    return {
        "rows": len(found),
        "with_all_negatives": int((found == mined.documents.shape[1]).sum()),
        "without_negatives": int((found == 0).sum()),
        "negatives": int(found.sum()),
        "too_near": int(mined.too_near.sum()),
        "mean_positive_score": float(mined.positive_scores.mean()),
        "mean_negative_score": float(scores.mean()) if len(scores) else None,
        "histogram": {
            "edges": edges.tolist(),
            "positives": np.histogram(mined.positive_scores, edges)[0].tolist(),
            "negatives": np.histogram(scores, edges)[0].tolist(),
        },
    }


def mining_report(entries: dict[str, dict[str, Any]]) -> str:
    """Lay out the statistics of datasets, one line each.

    Args:
        entries: `datasets` of `record.json`.
    """
    header = ["dataset", "rows", "all negatives", "none", "negatives", "too near", "score +", "score -"]
    rows = [
        [
            name,
            *(f"{one[key]:,}" for key in ("rows", "with_all_negatives", "without_negatives", "negatives", "too_near")),
            f"{one['mean_positive_score']:.3f}",
            "" if one["mean_negative_score"] is None else f"{one['mean_negative_score']:.3f}",
        ]
        for name, one in entries.items()
    ]
    return table(header, rows)


def _draw(entries: dict[str, dict[str, Any]], path: Path) -> None:
    """Draw the scores of positives and negatives, one panel for each dataset."""
    columns = min(4, len(entries))
    figure = Figure(figsize=(3.2 * columns, 2.2 * -(-len(entries) // columns)), layout="constrained")
    panels = figure.subplots(-(-len(entries) // columns), columns, squeeze=False).ravel()
    for panel, (name, one) in zip(panels, entries.items(), strict=False):
        histogram = one["histogram"]
        for (kind, label), color in zip((("positives", "positive"), ("negatives", "negative")), COLORS, strict=False):
            total = max(1, sum(histogram[kind]))
            heights = [count / total for count in histogram[kind]]
            panel.stairs(heights, histogram["edges"], fill=True, alpha=0.5, color=color, label=label)
        panel.set_title(name, fontsize=8)
        panel.tick_params(labelsize=7)
        panel.set_yticks([])
    for panel in panels[len(entries) :]:
        panel.remove()
    panels[0].legend(fontsize=7)
    figure.supxlabel("score of the teacher", fontsize=8)
    figure.savefig(path, format="png", dpi=120)
