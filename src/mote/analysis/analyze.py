"""Analyze how far experts have specialised: all measurements of some models, as tables, JSON and charts."""

import dataclasses
import json
import logging
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mote.analysis import plots
from mote.analysis.divergence import Divergence, Spread, divergence_of, tsne
from mote.analysis.similarity import (
    ROLES,
    Encoder,
    Similarity,
    WelchTest,
    check_tasks,
    cosines,
    default_tasks,
    embed,
    instructions_of,
    mote_config,
    similarity_of,
    welch_test,
    welch_tests,
)
from mote.analysis.weight_change import WeightChange, find_start, weight_change_of
from mote.checkpoints.reading import open_checkpoint
from mote.data.texts import TextPairs, Texts, find_pairs, find_texts
from mote.hub import commit_of
from mote.inference.loading import check_device, check_retrieval, load_any_encoder
from mote.reporting import Report, label_models, table, write_together

logger = logging.getLogger(__name__)

Rows = list[list[str]]  # a table, its header first
CHARTS = ("similarity.png", "tsne.png", "weight_change.png")


@dataclass(frozen=True)
class ModelAnalysis:
    """Results for one model.

    Attributes:
        label: Name in tables and charts.
        instructions: Compared task → its prompt.
        experts: Task → its expert; empty for models that do not route by task.
        similarity: Inter-task similarity, as from `inter_task_similarity`; empty if a model has no tasks to compare.
        divergence: Divergence between queries and documents; None if the model knows no such roles.
        layout: t-SNE of queries and documents, [2 N, 2], queries first.
        weight_change: Weight change from the start; None if it cannot be measured.
        notes: Caveats about the results.
    """

    label: str
    instructions: dict[str, str]
    experts: dict[str, str]
    similarity: Similarity
    divergence: Divergence | None = None
    layout: NDArray[np.float64] | None = None
    weight_change: WeightChange | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, repr=False)
class Analysis(Report):
    """Results for some models.

    Attributes:
        models: Results of each model.
        tests: Tests of the first model against each other one.
        texts: Texts that were embedded under each task.
        pairs: Queries and documents; None if the same texts took both roles.
        seed: Random seed of samples and t-SNE.
        retrieval: Kind of vectors that was analyzed. Default: the models' own.
    """

    models: tuple[ModelAnalysis, ...]
    tests: tuple[WelchTest, ...]
    texts: Texts
    pairs: TextPairs | None
    seed: int
    retrieval: str | None = None

    def __str__(self) -> str:
        """Format as plain text."""
        blocks = []
        for title, content in _sections(self):
            lines = [part if isinstance(part, str) else table(part[0], part[1:]) for part in content]
            blocks.append("\n".join([title, *("  " + line for part in lines for line in part.splitlines())]))
        return "\n\n".join(blocks)

    def to_markdown(self) -> str:
        """Format as Markdown."""
        pairs = (
            f"{len(self.pairs.queries)}, {self.pairs.source}" if self.pairs else "none; the same texts took both roles"
        )
        about = [
            f"Texts: {len(self.texts.texts)}, {self.texts.source}.",
            f"Pairs: {pairs}.",
            *([f"Vectors: {self.retrieval}."] if self.retrieval else []),
            *(f"Tasks of {model.label}: {_tasks_of(model)}." for model in self.models),
        ]
        blocks = ["# How far the experts have specialised", "  \n".join(about)]
        for title, content in _sections(self):
            blocks.append(f"## {title}")
            blocks += [f"- {part}" if isinstance(part, str) else table(part[0], part[1:]) for part in content]
        return "\n\n".join(blocks)

    def to_dict(self) -> dict[str, Any]:
        """Return all numbers as JSON values."""
        pairs = {"source": self.pairs.source, "count": len(self.pairs.queries)} if self.pairs else None
        return {
            "texts": {"source": self.texts.source, "count": len(self.texts.texts), "texts": list(self.texts.texts)},
            "pairs": pairs,
            "seed": self.seed,
            "retrieval": self.retrieval,
            "models": [_as_json(model) for model in self.models],
            "tests": [_as_json(test) for test in self.tests],
        }

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> "Analysis":
        """Read what `to_dict` returned, as from analysis.json; the texts of pairs, which it lacks, are empty."""
        texts, pairs = content["texts"], content["pairs"]
        no_texts = ("",) * pairs["count"] if pairs else ()
        tests = [{**test, "tasks": test["tasks"] and tuple(test["tasks"])} for test in content["tests"]]
        return cls(
            tuple(_model_from_json(model) for model in content["models"]),
            tuple(WelchTest(**test) for test in tests),
            Texts(tuple(texts["texts"]), texts["source"]),
            TextPairs(no_texts, no_texts, pairs["source"]) if pairs else None,
            content["seed"],
            content.get("retrieval"),
        )

    def save(self, folder: str | Path) -> Path:
        """Write analysis.json, analysis.md and the charts.

        Args:
            folder: Folder, created if needed; files of an earlier analysis are replaced once all are complete.

        Raises:
            OSError: If they cannot be written.
        """
        folder = Path(folder)
        by_label = {model.label: model for model in self.models}
        charts: dict[str, Callable[[Path], object]] = {}  # name → writer
        if similarities := {label: model.similarity for label, model in by_label.items() if model.similarity}:
            charts["similarity.png"] = partial(plots.draw_similarity, similarities)
        if layouts := {label: model.layout for label, model in by_label.items() if model.layout is not None}:
            charts["tsne.png"] = partial(plots.draw_tsne, layouts)
        if changes := {label: model.weight_change for label, model in by_label.items() if model.weight_change}:
            charts["weight_change.png"] = partial(plots.draw_weight_change, changes)
        texts = {
            "analysis.json": json.dumps(self.to_dict(), indent=1, ensure_ascii=False, allow_nan=False),
            "analysis.md": "\n\n".join([self.to_markdown(), "## Charts", *(f"![{name}]({name})" for name in charts)]),
        }
        writers = {**charts}
        for name, text in texts.items():
            writers[name] = partial(Path.write_text, data=f"{text}\n", encoding="utf-8")
        write_together(
            {folder / name: writer for name, writer in writers.items()},
            obsolete=[folder / name for name in CHARTS if name not in charts],
            name="The analysis",
        )
        return folder


def analyze(
    models: str | Path | Sequence[str | Path] | Mapping[str, str | Path],
    *,
    out: str | Path | None = None,
    texts: str | Path | Sequence[str] | None = None,
    data: str | Path | None = None,
    pairs: str | Path | None = None,
    tasks: Sequence[str] | None = None,
    start: str | None = None,
    retrieval: str | None = None,
    limit: int = 128,
    batch_size: int = 32,
    device: str | None = None,
    seed: int = 0,
    trust_remote_code: bool = False,
) -> Analysis:
    """Analyze how far the experts of some models have specialised.

    Args:
        models: Folders or Hub ids of anything that Sentence-Transformers loads, or LABEL=MODEL; or a mapping from
            labels; or one model.
        out: Folder for tables and charts. Default: nothing is written.
        texts: Texts to embed under each task, or a file as `find_texts` reads it. Default: those of `data`, otherwise
            the 128 real ones shipped with MoTE.
        data: Folder of datasets to draw texts and pairs from.
        pairs: File of queries and documents, as `find_pairs` reads it. Default: the retrieval datasets of `data`;
            without these, the same texts take both roles.
        tasks: Tasks to compare. Default: the first model's experts, or else its prompts, if all models know them. If a
            model distinguishes no tasks (a dense model without prompts), only pairs are compared.
        start: Model that the models were trained from. Default: the one recorded in their folders.
        retrieval: Kind of vectors to analyze, `dense`, `sparse` or `hybrid`; a hybrid model gives all of them.
            Default: the models' own.
        limit: Number of texts, if none are given, and of pairs.
        batch_size: Batch size of `encode`.
        device: Device of the models. Default: a GPU if there is one.
        seed: Random seed of samples and t-SNE.
        trust_remote_code: Run code from the models' repositories.

    Raises:
        FileNotFoundError: If a model, file or folder does not exist.
        OSError: If `out` is not writable.
        ValueError: If a file is damaged, a task is unknown, a model has fewer than two tasks, brings code that is not
            trusted, or lacks the kind of vectors; or if `start` matches no model.
    """
    if texts is None or isinstance(texts, str | Path):
        found = find_texts(texts, data, limit, seed)
    else:
        found = Texts(tuple(texts), "given texts")
    found_pairs = find_pairs(pairs, data, limit, seed)
    named = label_models(models)
    if not named:
        raise ValueError("No models given: name one or more")
    logger.info("Texts: %d (%s)", len(found.texts), found.source)
    _check(device, retrieval, seed, start)
    commits = {label: commit_of(name) for label, name in named.items()}  # all exist, before any is loaded
    loaded = {}
    for label, name in named.items():
        logger.info("%s: loading …", label)
        settings = {"device": device, "trust_remote_code": trust_remote_code}
        loaded[label] = load_any_encoder(name, retrieval=retrieval, revision=commits[label], **settings)
    chosen = _tasks(loaded, tasks, only_pairs=found_pairs is not None)
    if out is not None:
        _prepare(Path(out))
    analyses = []
    for label, name in named.items():
        logger.info("%s: %d texts under %s …", label, len(found.texts), ", ".join(chosen) or "no tasks")
        seen = _of_embeddings(label, loaded.pop(label), chosen, found, found_pairs, batch_size, seed)
        logger.info("%s: weights …", label)
        change, notes = _weight_change(name, start)
        analyses.append(dataclasses.replace(seen, weight_change=change, notes=(*seen.notes, *notes)))
    _refuse_unused_start(start, analyses)
    first, *others = analyses
    tests = [
        test
        for other in others
        for test in (
            *welch_tests(first.label, first.similarity, other.label, other.similarity),
            *_divergence_tests(first, other),
        )
    ]
    result = Analysis(tuple(analyses), tuple(tests), found, found_pairs, seed, retrieval)
    if out is not None:
        logger.info("Wrote %s", result.save(out))
    return result


def _check(device: str | None, retrieval: str | None, seed: int, start: str | None) -> None:
    """Check what is needed only after models are loaded and texts embedded."""
    check_device(device)
    if retrieval is not None:
        check_retrieval(retrieval)
    if not 0 <= seed < 2**32:  # what scikit-learn takes
        raise ValueError(f"The seed is {seed}: expected 0 to {2**32 - 1}")
    if start is not None:
        open_checkpoint(start)


def _refuse_unused_start(start: str | None, analyses: Sequence[ModelAnalysis]) -> None:
    if start is not None and not any(one.weight_change for one in analyses):
        reasons = "; ".join(f"{one.label}: {one.notes[-1]}" for one in analyses)
        raise ValueError(f"{start} is not the start of any model. {reasons}")


def _prepare(out: Path) -> None:
    """Create the folder, to fail before the work begins if it is not writable."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise OSError(f"The analysis cannot be written to {out}: {error}") from error


def _tasks(models: Mapping[str, Encoder], tasks: Sequence[str] | None, only_pairs: bool) -> list[str]:
    """Choose the tasks to compare, and check that every model knows them; none if `only_pairs` is allowed."""
    try:
        if tasks is None:  # a model without tasks is named, rather than the first one, of which no task would be left
            for label, model in models.items():
                check_tasks(model, default_tasks(model), label)
            first = next(iter(models.values()))
            chosen = [task for task in default_tasks(first) if all(task in instructions_of(m) for m in models.values())]
        else:
            chosen = list(tasks)
        for label, model in models.items():
            check_tasks(model, chosen, label)
    except ValueError as error:
        if tasks is not None or not only_pairs:
            raise
        logger.info("Comparing queries and documents only: %s", error)
        return []
    return chosen


def _divergence_tests(first: ModelAnalysis, other: ModelAnalysis) -> list[WelchTest]:
    """Test whether queries and documents of the first model diverge less."""
    if first.divergence is None or other.divergence is None:
        return []
    values = {
        "KL": (first.divergence.neighbors_kl, other.divergence.neighbors_kl),
        "JS": (first.divergence.neighbors_js, other.divergence.neighbors_js),
    }
    return [welch_test(first.label, other.label, None, a, b, name) for name, (a, b) in values.items()]


def _of_embeddings(
    label: str,
    model: Encoder,
    tasks: list[str],
    texts: Texts,
    pairs: TextPairs | None,
    batch_size: int,
    seed: int,
) -> ModelAnalysis:
    """Take all measurements on the model's embeddings."""
    embeddings = {task: embed(model, texts.texts, task, batch_size) for task in tasks}
    known, config = instructions_of(model), mote_config(model)
    seen = ModelAnalysis(
        label,
        instructions={task: known[task] for task in tasks},
        experts={} if config is None or not config.routes_by_task else {task: config.expert_of(task) for task in tasks},
        similarity=similarity_of(embeddings),
    )
    roles = next((roles for roles in ROLES if all(role in known for role in roles)), None)
    if roles is None:
        known_roles = ", ".join(" and ".join(roles) for roles in ROLES)
        return dataclasses.replace(seen, notes=(f"No divergence: the model has no tasks for search ({known_roles})",))
    sides = (texts.texts, texts.texts) if pairs is None else (pairs.queries, pairs.documents)
    queries, documents = (
        embeddings[role] if pairs is None and role in embeddings else embed(model, side, role, batch_size)
        for side, role in zip(sides, roles, strict=True)
    )
    both = "Queries and documents are the same texts under both roles: no pairs were given (`--pairs`)"
    return dataclasses.replace(
        seen,
        divergence=divergence_of(queries, documents, roles, cosines(queries, documents)),
        layout=tsne(queries, documents, seed),
        notes=(both,) if pairs is None else (),
    )


def _weight_change(name: str, start: str | None) -> tuple[WeightChange | None, list[str]]:
    """Measure from the start given, else the recorded one, else the mean of the experts; with notes on that."""
    if start is not None:
        try:
            return weight_change_of(name, start), []
        except (ValueError, OSError) as error:
            return None, [f"No weight change from {Path(start).name}: {error}"]
    try:
        return weight_change_of(name, *find_start(name)), []
    except (ValueError, OSError) as error:
        reason = f"The start of {Path(name).name} was not found ({error}); name it with `--start MODEL`"
    try:
        return weight_change_of(name), [f"{reason}. Instead: the distance of each expert from their mean"]
    except (ValueError, OSError) as error:
        return None, [f"{reason}. Nor is there a mean to compare with: {error}"]


def _as_json(value: Any) -> Any:
    """Convert dataclasses, arrays and keys that are pairs to JSON values; non-finite numbers to null."""
    if dataclasses.is_dataclass(value):
        return {field.name: _as_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {" / ".join(key) if isinstance(key, tuple) else key: _as_json(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return _as_json(value.tolist())
    if isinstance(value, list | tuple):
        return [_as_json(item) for item in value]
    return None if isinstance(value, float) and not np.isfinite(value) else value


def _model_from_json(content: Mapping[str, Any]) -> ModelAnalysis:
    """Undo `_as_json`."""
    divergence, layout, change = content["divergence"], content["layout"], content["weight_change"]
    if divergence is not None:
        spreads = {key: Spread(**value) for key, value in divergence.items() if isinstance(value, Mapping)}
        arrays = {key: np.array(divergence[key]) for key in ("neighbors_kl", "neighbors_js")}
        divergence = Divergence(**{**divergence, **spreads, **arrays, "roles": tuple(divergence["roles"])})
    if change is not None:
        change = WeightChange(**{**change, **{key: _by_pair(change[key]) for key in ("cosines", "overall_cosines")}})
    found = {
        "similarity": {pair: np.array(values) for pair, values in _by_pair(content["similarity"]).items()},
        "divergence": divergence,
        "layout": None if layout is None else np.array(layout),
        "weight_change": change,
        "notes": tuple(content["notes"]),
    }
    return ModelAnalysis(**{**content, **found})


def _by_pair(content: Mapping[str, Any]) -> dict[tuple[str, ...], Any]:
    return {tuple(key.split(" / ")): value for key, value in content.items()}


# Tables, as plain text and as Markdown -------------------------------------------------------------------------------


def _sections(analysis: Analysis) -> list[tuple[str, list[Rows | str]]]:
    """Arrange all results into sections: a title, with tables and sentences."""
    sections: list[tuple[str, list[Rows | str]]] = []
    if analysis.models[0].similarity:
        count = len(analysis.texts.texts)
        title = f"Inter-task similarity: mean (standard deviation) of the cosine of {count} texts"
        sections.append((title, [_similarity_table(analysis)]))
        sections += [_test_section(analysis, other.label) for other in analysis.models[1:]]
    measured = {model.label: model.divergence for model in analysis.models if model.divergence is not None}
    if measured:
        tests = [test for test in analysis.tests if test.measure != "similarity"]
        sections.append(("Queries and documents: divergence in nats", [_divergence_table(measured)]))
        sections.append(
            ("The same by distances to all others, as in the CoT-MoTE paper", _neighbor_tables(measured, tests))
        )
    sections += [_weight_section(model.label, model.weight_change) for model in analysis.models if model.weight_change]
    notes: list[Rows | str] = [f"{model.label}: {note}" for model in analysis.models for note in model.notes]
    return [*sections, ("Notes", notes)] if notes else sections


def _similarity_table(analysis: Analysis) -> Rows:
    rows = [["tasks", *(model.label for model in analysis.models)]]
    for a, b in analysis.models[0].similarity:
        values = [model.similarity[a, b] for model in analysis.models]
        rows.append([f"{a} / {b}", *(_spread(each.mean(), each.std(ddof=1)) for each in values)])
    means = [np.mean(list(model.similarity.values()), axis=0) for model in analysis.models]  # of each text
    return [*rows, ["all pairs", *(_spread(each.mean(), each.std(ddof=1)) for each in means)]]


def _test_section(analysis: Analysis, other: str) -> tuple[str, list[Rows | str]]:
    first = analysis.models[0].label
    rows = [["tasks", "difference", "t", "degrees of freedom", "p"]]
    for test in (test for test in analysis.tests if test.second == other and test.measure == "similarity"):
        name = "all pairs (mean of each text)" if test.tasks is None else " / ".join(test.tasks)
        numbers = ["-"] * 3 if test.p is None else [f"{test.t:.2f}", f"{test.degrees_of_freedom:.1f}", f"{test.p:.2g}"]
        rows.append([name, f"{test.mean_first - test.mean_second:+.3f}", *numbers])
    title = f"Is {first} less similar over tasks than {other}? One-sided Welch's t-test"
    return title, [rows, f"A small p says so; one near 1 says the opposite, that {first} is more similar."]


def _divergence_table(measured: Mapping[str, Divergence]) -> Rows:
    rows: Rows = [
        ["of each pair, mean (standard deviation)"],
        ["KL(query ‖ document)"],
        ["KL(document ‖ query)"],
        ["JS"],
        ["cosine"],
        ["of the mean query and the mean document, KL, KL, JS"],
    ]
    for label, found in measured.items():
        spreads = (found.kl_query_document, found.kl_document_query, found.js, found.cosine)
        sets = (found.sets_kl_query_document, found.sets_kl_document_query, found.sets_js)
        cells = [label, *(_spread(each.mean, each.std) for each in spreads), ", ".join(f"{x:.3f}" for x in sets)]
        for row, cell in zip(rows, cells, strict=True):
            row.append(cell)
    return rows


def _neighbor_tables(measured: Mapping[str, Divergence], tests: list[WelchTest]) -> list[Rows | str]:
    rows = [["of each pair, mean (standard deviation)", "KL(query ‖ document)", "JS"]]
    for label, found in measured.items():
        values = (found.neighbors_kl, found.neighbors_js)
        rows.append([label, *(f"{each.mean():.2e} ({each.std(ddof=1):.2e})" for each in values)])
    if not tests:
        return [rows]
    tested = [["one-sided Welch's t-test: is the first lower?", "t", "degrees of freedom", "p"]]
    for test in tests:
        numbers = ["-"] * 3 if test.p is None else [f"{test.t:.2f}", f"{test.degrees_of_freedom:.1f}", f"{test.p:.2g}"]
        tested.append([f"{test.measure}: {test.first}, {test.second}", *numbers])
    return [rows, tested]


def _weight_section(label: str, change: WeightChange) -> tuple[str, list[Rows | str]]:
    layers = len(next(iter(change.experts.values())))
    rows = [["change in %, layer", *map(str, range(layers)), "all"]]
    for expert, values in change.experts.items():
        rows.append([expert, *map(_percent, values), _percent(change.overall[expert])])
    if change.shared:
        rows.append(["shared", *map(_percent, change.shared), ""])
    if change.outside is not None:
        rows.append(["outside of the layers", *[""] * layers, _percent(change.outside)])
    cosine_rows = [["cosine between changes, layer", *map(str, range(layers)), "all"]]
    for (a, b), values in change.cosines.items():
        cosine_rows.append([f"{a} / {b}", *map(_cosine, values), _cosine(change.overall_cosines[a, b])])
    content: list[Rows | str] = [rows, cosine_rows] if len(cosine_rows) > 1 else [rows]
    if change.shared:
        content.append("shared: the attention, and the whole of a layer without experts.")
    return f"Weight change of {label} from {change.start}: relative Frobenius norm", content


def _spread(mean: float, std: float) -> str:
    return f"{mean:.3f} ({std:.3f})"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f}"


def _cosine(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _tasks_of(model: ModelAnalysis) -> str:
    """List the prompt and the expert of each task."""
    return ", ".join(
        f"{task} ({text.strip()!r}" + (f", expert {model.experts[task]}" if task in model.experts else "") + ")"
        for task, text in model.instructions.items()
    )
