"""Rewrite the tables on the pages of results, and the chart of the small MoTE, from the stored scores.

    python -m research.pages            # rewrites them
    python -m research.pages --check    # only compares: exits with 1 and names the tables that differ
    python -m research.pages --add RUNS/scores.jsonl    # first stores the scores that `research.run` has written

A page has a table between `<!-- table: NAME -->` and `<!-- end of table -->`.
"""

import argparse
import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

from research import other_papers
from research.claims import TABLES, Claim, Table
from research.figures import ablation_table
from research.gains import draw_gains, drawn_gains, gains_of, types_table
from research.goal import choices_tables, goal_report, labels_report, ways_table
from research.scores import FIVE_TASKS, START, FoundScores, Scores, Store, found_scores, read, scores_of, write
from research.summary import SUMMARIES, summary_table
from research.tables import (
    Means,
    claims_of,
    means_of,
    means_table,
    models_table,
    paper_of,
    report,
    summary_of,
    sweep_table,
    table_of,
)

ROOT = Path(__file__).parents[1]
PAGES = ("docs/results.md", "research/results.md", "research/tables/*.md")
CHART = "docs/images/gains.png"
END = "<!-- end of table -->"
SMALL_MOTE = "small_mote"
SCALES = (
    "small",
    "medium",
    "medium-bf16",
    "medium-gpu",
    "large-gpu",
    "medium-cpu",
    "medium-labels",
    "medium-embedder",
)
REPEATED = ("medium-gpu", "large-gpu", "medium-cpu")
"""Scales that took their choices from another one."""


def known_tables(store: Store) -> dict[str, str]:
    """Format all stored scores: name of the table → Markdown."""
    of_scales = {scale: scores_of(store.of_scale(scale)) for scale in (*SCALES, SMALL_MOTE)}
    tables = {
        "cot": other_papers.cot_report(store.of_scale("cot")),
        "decoders": other_papers.decoders_report(scores_of(store.of_scale("decoders"))),
        "mining": other_papers.mining_report(scores_of(store.of_scale("mining"))),
        "task_loras": other_papers.task_loras_report(
            store.contents("sweep", "task_loras")["task_loras"]["sweep"], scores_of(store.of_scale("task_loras"))
        ),
        "small_mote": _small_mote(store.contents("table", SMALL_MOTE)[SMALL_MOTE], of_scales[SMALL_MOTE]),
        "small_mote/types": types_table(of_scales[SMALL_MOTE]),
    }
    tables |= {f"summary/{name}": summary_table(rows, of_scales) for name, rows in SUMMARIES.items()}
    for scale in SCALES:
        tables |= {f"{scale}/{name}": text for name, text in _tables_of_scale(store, scale, of_scales[scale]).items()}
    return tables


def _tables_of_scale(store: Store, scale: str, scores: Scores) -> dict[str, str]:
    models = found_scores(store.of_scale(scale))
    of_paper = {name: _measurable(table, scores) for name, table in TABLES.items()}
    of_paper = {name: table for name, table in of_paper.items() if table.claims}
    tables = {name: _paper_table(table, scores) for name, table in of_paper.items()}
    if of_paper:
        tables["claims"] = summary_of(of_paper, scores)
    for name, content in store.contents("table", scale).items():
        table = stored_table(content)
        tables[name] = report(table, scores)
        if name == "best":
            tables["goal"] = goal_report(table, scores)
            tables[name] = "\n\n".join([*_choices(store, scale, content), labels_report(table, scores), tables[name]])
        if name == "unseen":
            trials = _validation_means(store, scale, trials=True)
            tables[name] = f"{ways_table({way: trials[way] for way in content['ways']})}\n\n{tables[name]}"
    if scale in REPEATED:
        tables["validation"] = means_table(_validation_means(store, scale, trials=False))
    if sweep := _sweep(store, scale):
        tables["sweep"] = sweep_table(sweep)
    ablations = scores_of(store.of_scale(scale, trials=True))
    if ablations.every:
        tables["figures4to7"] = ablation_table(ablations)
    return tables | _models_tables(models)


def _models_tables(models: FoundScores) -> dict[str, str]:
    """Format all models seed by seed: those with the scale's own data, and those of five tasks."""
    tables = {}
    for name, five_tasks in (("models", False), (FIVE_TASKS, True)):
        chosen = {one for one in models if (FIVE_TASKS in one.split("+")) == five_tasks}
        if chosen:
            tables[name] = models_table({one: models[one] for one in models if one in chosen or one == START})
    return tables


def _validation_means(store: Store, scale: str, *, trials: bool) -> dict[str, Means]:
    """Return the means over validation sets: of full runs, or of the trials at the rate that most of them have."""
    models = store.of_scale(scale, "validation", trials)
    rates = [one.rate for one in models]
    rate = max(rates, key=rates.count, default=None)
    return {one.variant: means_of(one.scores) for one in models if one.rate == rate}


def _sweep(store: Store, scale: str) -> dict[str, dict[float, float]]:
    """Return the means over the types of validation sets: variant → rate → mean."""
    found: dict[str, dict[float, float]] = {}
    for one in store.of_scale(scale, "validation", trials=True):
        if one.rate is not None and one.variant in ("em", "ic", "mote"):
            found.setdefault(one.variant, {})[one.rate] = mean(means_of(one.scores).values())
    return found


def _choices(store: Store, scale: str, content: Mapping[str, Any]) -> list[str]:
    if "steps" not in content:
        return []
    trials, in_full = (
        {name: mean(of.values()) for name, of in _validation_means(store, scale, trials=trials).items()}
        for trials in (True, False)
    )
    return [choices_tables(content, trials, in_full)]


def _paper_table(table: Table, scores: Scores) -> str:
    """Format a table with claims; only the paper's scores and the claims if the columns cannot be compared."""
    if _comparable(table.variants, scores):
        return report(table, scores)
    return f"{paper_of(table)}\n\n{claims_of(table, scores)}"


def _comparable(names: tuple[str, ...], scores: Scores) -> bool:
    return scores.every.keys() >= {*names} and bool(scores.common_seeds(*names))


def _measurable(table: Table, scores: Scores) -> Table:
    """Leave out claims about variants that cannot be compared."""

    def variants(claim: Claim) -> tuple[str, ...]:
        return tuple(name for name in (claim.better, claim.other, claim.relative_to) if name is not None)

    return replace(table, claims=tuple(one for one in table.claims if _comparable(variants(one), scores)))


def _small_mote(content: Mapping[str, Any], scores: Scores) -> str:
    """Format the table of `scripts.train_small_mote`, also split by whether labels of a dataset are trained on."""
    table = stored_table(content)
    kinds = {name: "labels trained on" if name in content["trained_on"] else "others" for name in scores.types}
    split = replace(table, types=("labels trained on", "others"), claims=())
    return f"{report(table, scores)}\n\n{table_of(split, replace(scores, types=kinds))}"


def stored_table(content: Mapping[str, Any]) -> Table:
    """Return the table of a stored line."""
    given = content["table"]
    claims = tuple(Claim(**claim) for claim in given["claims"])
    return Table(**{**given, "variants": tuple(given["variants"]), "types": tuple(given["types"]), "claims": claims})


def rewrite(page: str, tables: Mapping[str, str]) -> tuple[str, list[str]]:
    """Rewrite the tables of a page; return it, and the names of the tables that differed.

    Raises:
        ValueError: If a table is unknown or has no end.
    """
    before, *rest = re.split(r"<!-- table: (\S+) -->", page)
    parts = [before]
    differing = []
    for name, text in zip(rest[::2], rest[1::2], strict=True):
        if name not in tables:
            raise ValueError(f"No scores are stored for table {name!r}; known: {', '.join(tables)}")
        old, end, after = text.partition(END)
        if not end:
            raise ValueError(f"Table {name!r} has no {END}")
        new = f"\n\n{tables[name]}\n\n"
        differing += [name] if old != new else []
        parts.append(f"<!-- table: {name} -->{new}{END}{after}")
    return "".join(parts), differing


def rewrite_pages(root: Path, store: Store, *, check: bool = False) -> list[str]:
    """Rewrite the tables of all pages, and the chart, or only compare them; return the names of those that differed."""
    tables = known_tables(store)
    differing: list[str] = []
    for path in (path for pattern in PAGES for path in sorted(root.glob(pattern))):
        page = path.read_text(encoding="utf-8")
        new, of_page = rewrite(page, tables)
        differing += of_page
        if of_page and not check:
            path.write_text(new, encoding="utf-8")
    gains = gains_of(scores_of(store.of_scale(SMALL_MOTE)))
    if drawn_gains(root / CHART) != gains:
        differing.append(CHART)
        if not check:
            draw_gains(gains, root / CHART)
    return list(dict.fromkeys(differing))


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="only compare")
    parser.add_argument("--add", type=Path, action="append", default=[], help="further scores to store")
    given = parser.parse_args()
    store = read()
    for file in given.add:
        store = store.with_models(read(file).models)
        write(store)
    differing = rewrite_pages(ROOT, store, check=given.check)
    if differing:
        print(f"{'different from the stored scores' if given.check else 'rewritten'}: {', '.join(differing)}")
    sys.exit(1 if given.check and differing else 0)


if __name__ == "__main__":
    main()
