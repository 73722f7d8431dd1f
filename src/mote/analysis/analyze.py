"""`mote analyze`: puts the measurements of some models together, and writes them for people and for programs."""

import dataclasses
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sentence_transformers import SentenceTransformer

from mote.analysis import plots
from mote.analysis.divergence import Divergence, divergence_of, tsne
from mote.analysis.similarity import (
    ROLES,
    Similarity,
    WelchTest,
    check_tasks,
    cosines,
    default_tasks,
    embed,
    instructions_of,
    load,
    mote_config,
    similarity_of,
    welch_tests,
)
from mote.analysis.weight_change import Movement, find_start, movement_of
from mote.data.texts import Pairs, Texts, find_pairs, find_texts
from mote.hub import commit_of
from mote.reporting import name_models

Report = Callable[[str], None]


@dataclass(frozen=True)
class ModelAnalysis:
    """What was found out about one model.

    Attributes:
        label: Its name in tables and charts.
        instructions: Task that was compared → text in front.
        experts: Task → expert that served it; empty where a model has none for tasks.
        similarity: As from `inter_task_similarity`.
        divergence: Between queries and documents; None where the model knows no such roles.
        layout: Points [2 N, 2] of their t-SNE, the queries first.
        movement: From the start; None where it cannot be told.
        notes: What a reader should know.
    """

    label: str
    instructions: dict[str, str]
    experts: dict[str, str]
    similarity: Similarity
    divergence: Divergence | None = None
    layout: NDArray[np.float64] | None = None
    movement: Movement | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Analysis:
    """What was found out about some models.

    Attributes:
        models: One by one.
        tests: Of the first model against each other.
        texts: What was embedded under each task.
        pairs: Queries and documents; None where the same texts took both roles.
        seed: Of samples and of t-SNE.
    """

    models: tuple[ModelAnalysis, ...]
    tests: tuple[WelchTest, ...]
    texts: Texts
    pairs: Pairs | None
    seed: int

    def __str__(self) -> str:
        """Sum up for the terminal."""
        return "\n\n".join(_section(title, lines) for title, lines in _sections(self))

    def to_dict(self) -> dict[str, Any]:
        """Return all numbers, as JSON takes them."""
        pairs = {"source": self.pairs.source, "count": len(self.pairs.queries)} if self.pairs else None
        return {
            "texts": {"source": self.texts.source, "count": len(self.texts.texts), "texts": list(self.texts.texts)},
            "pairs": pairs,
            "seed": self.seed,
            "models": [_as_json(model) for model in self.models],
            "tests": [_as_json(test) for test in self.tests],
        }

    def save(self, folder: str | Path) -> Path:
        """Write analysis.json, analysis.md, and the charts.

        Args:
            folder: It is made where there is none; files of an earlier analysis are replaced.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        by_label = {model.label: model for model in self.models}
        content = json.dumps(self.to_dict(), indent=1, ensure_ascii=False, allow_nan=False)
        (folder / "analysis.json").write_text(content + "\n", encoding="utf-8")
        plots.draw_similarity({label: model.similarity for label, model in by_label.items()}, folder / "similarity.png")
        layouts = {label: model.layout for label, model in by_label.items() if model.layout is not None}
        movements = {label: model.movement for label, model in by_label.items() if model.movement is not None}
        for name in ("tsne.png", "movement.png"):  # that of an earlier analysis says nothing of this one
            (folder / name).unlink(missing_ok=True)
        if layouts:
            plots.draw_tsne(layouts, folder / "tsne.png")
        if movements:
            plots.draw_movement(movements, folder / "movement.png")
        (folder / "analysis.md").write_text(_markdown(self, folder), encoding="utf-8")
        return folder


def analyze(
    models: Sequence[str | Path] | Mapping[str, str | Path],
    *,
    out: str | Path | None = None,
    texts: str | Path | Sequence[str] | None = None,
    data: str | Path | None = None,
    pairs: str | Path | None = None,
    tasks: Sequence[str] | None = None,
    start: str | None = None,
    limit: int = 128,
    batch_size: int = 32,
    device: str | None = None,
    seed: int = 0,
    trust_remote_code: bool = False,
    report: Report = lambda line: None,
) -> Analysis:
    """Look at how far the experts of some models have specialised.

    Args:
        models: Folders or ids on the Hub, of anything that Sentence-Transformers loads, or LABEL=MODEL; as a mapping,
            under labels.
        out: Folder for tables and charts. Default: nothing is written.
        texts: To embed under each task: a file as `find_texts` reads it, or the texts themselves. Default: those of
            `data`, otherwise 128 real ones that come with MoTE.
        data: A folder of datasets, to draw texts and pairs from.
        pairs: A file of queries and documents, as `find_pairs` reads it. Default: the retrieval sets of `data`;
            without these, the same texts take both roles.
        tasks: To compare. Default: the first model's experts, or else its prompts, as far as all models know them.
        start: What the models were trained from. Default: what their folders record.
        limit: How many texts, and pairs.
        batch_size: Texts at once.
        device: Of the models. Default: a GPU where there is one.
        seed: Of samples and of t-SNE.
        trust_remote_code: Run code of models on the Hub. That of folders is always run.
        report: Called with each line of progress.

    Returns:
        All numbers.

    Raises:
        FileNotFoundError: If a model, a file or a folder is not there.
        OSError: If `out` cannot be written to.
        ValueError: If a file is damaged, a task is unknown, a model has no two tasks, or `start` does not fit.
    """
    read = isinstance(texts, str | Path) or texts is None
    found = find_texts(texts, data, limit, seed) if read else Texts(tuple(texts), "given texts")  # type: ignore[arg-type]
    found_pairs = find_pairs(pairs, data, limit, seed)
    labelled = models if isinstance(models, Mapping) else name_models([str(model) for model in models])
    named = {label: str(name) for label, name in labelled.items()}
    if not named:
        raise ValueError("No model to look at: name one or more")
    report(f"Texts: {len(found.texts)} ({found.source})")
    commits = {label: commit_of(name) for label, name in named.items()}  # all are there, before any is loaded
    loaded = {}
    for label, name in named.items():
        report(f"{label}: loading …")
        loaded[label] = load(name, commits[label], device, trust_remote_code)
    chosen = _tasks(loaded, tasks)
    if out is not None:
        _prepare(Path(out))
    analyses = []
    for label, name in named.items():
        report(f"{label}: {len(found.texts)} texts under {', '.join(chosen)} …")
        seen = _of_embeddings(label, loaded.pop(label), chosen, found, found_pairs, batch_size, seed)
        report(f"{label}: weights …")
        movement, notes = _movement(name, start)
        analyses.append(dataclasses.replace(seen, movement=movement, notes=(*seen.notes, *notes)))
    first, *others = analyses
    tests = [
        test for other in others for test in welch_tests(first.label, first.similarity, other.label, other.similarity)
    ]
    result = Analysis(tuple(analyses), tuple(tests), found, found_pairs, seed)
    if out is not None:
        report(f"Wrote {result.save(out)}")
    return result


def _prepare(out: Path) -> None:
    """Make the folder, so that one that cannot be written to is known before the work begins."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=out):
            pass
    except OSError as error:
        raise OSError(f"The analysis cannot be written to {out}: {error}") from error


def _tasks(models: Mapping[str, SentenceTransformer], tasks: Sequence[str] | None) -> list[str]:
    """Choose the tasks over which all models are compared, and make sure that each can."""
    if tasks is None:
        first = next(iter(models.values()))
        chosen = [task for task in default_tasks(first) if all(task in instructions_of(m) for m in models.values())]
    else:
        chosen = list(tasks)
    for label, model in models.items():
        check_tasks(model, chosen, label)
    return chosen


def _of_embeddings(
    label: str,
    model: SentenceTransformer,
    tasks: list[str],
    texts: Texts,
    pairs: Pairs | None,
    batch_size: int,
    seed: int,
) -> ModelAnalysis:
    """Measure what can be seen in the embeddings."""
    embeddings = {task: embed(model, texts.texts, task, batch_size) for task in tasks}
    known, config = instructions_of(model), mote_config(model)
    seen = ModelAnalysis(
        label,
        instructions={task: known[task] for task in tasks},
        experts={} if config is None or config.router == "token" else {task: config.expert_of(task) for task in tasks},
        similarity=similarity_of(embeddings),
    )
    roles = next((roles for roles in ROLES if all(role in known for role in roles)), None)
    if roles is None:
        told = ", ".join(" and ".join(roles) for roles in ROLES)
        return dataclasses.replace(seen, notes=(f"No divergence: the model knows no two roles of search ({told})",))
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


def _movement(name: str, start: str | None) -> tuple[Movement | None, list[str]]:
    """Measure from the start that was given, else from the one that is recorded, else from the mean of the experts."""
    if start is not None:
        return movement_of(name, start), []
    try:
        return movement_of(name, find_start(name)), []
    except (ValueError, OSError) as error:
        reason = f"The start of {Path(name).name} was not found ({error}); `--start MODEL` names it"
    try:
        return movement_of(name), [f"{reason}. Instead: how far each expert is from their mean"]
    except (ValueError, OSError) as error:
        return None, [f"{reason}. Nor is there a mean to compare with: {error}"]


def _as_json(value: Any) -> Any:
    """Turn dataclasses, arrays and pairs as keys into what JSON takes; a number that is none becomes null."""
    if dataclasses.is_dataclass(value):
        return {field.name: _as_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {" / ".join(key) if isinstance(key, tuple) else key: _as_json(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return _as_json(value.tolist())
    if isinstance(value, list | tuple):
        return [_as_json(item) for item in value]
    return None if isinstance(value, float) and not np.isfinite(value) else value


# For people: every table is made once, and printed on the terminal or in Markdown -----------------------------------

Table = list[list[str]]


def _sections(analysis: Analysis) -> list[tuple[str, list[Table | str]]]:
    """Lay all out as titles, tables and sentences."""
    sections: list[tuple[str, list[Table | str]]] = [
        (
            f"Inter-task similarity: mean (standard deviation) of the cosine of {len(analysis.texts.texts)} texts",
            [_similarity_table(analysis)],
        )
    ]
    for other in analysis.models[1:]:
        sections.append(_test_section(analysis, other.label))
    measured = [model for model in analysis.models if model.divergence is not None]
    if measured:
        sections.append(("Queries and documents: divergence in nats", [_divergence_table(measured)]))
    sections += [_movement_section(model.label, model.movement) for model in analysis.models if model.movement]
    notes: list[Table | str] = [f"{model.label}: {note}" for model in analysis.models for note in model.notes]
    return [*sections, ("Notes", notes)] if notes else sections


def _similarity_table(analysis: Analysis) -> Table:
    rows = [["tasks", *(model.label for model in analysis.models)]]
    for a, b in analysis.models[0].similarity:
        values = [model.similarity[a, b] for model in analysis.models]
        rows.append([f"{a} / {b}", *(_spread(each.mean(), each.std(ddof=1)) for each in values)])
    means = [np.mean(list(model.similarity.values()), axis=0) for model in analysis.models]  # of each text
    return [*rows, ["all pairs", *(_spread(each.mean(), each.std(ddof=1)) for each in means)]]


def _test_section(analysis: Analysis, other: str) -> tuple[str, list[Table | str]]:
    first = analysis.models[0].label
    rows = [["tasks", "difference", "t", "degrees of freedom", "p"]]
    for test in (test for test in analysis.tests if test.second == other):
        name = "all pairs (mean of each text)" if test.tasks is None else " / ".join(test.tasks)
        numbers = ["-"] * 3 if test.p is None else [f"{test.t:.2f}", f"{test.degrees_of_freedom:.1f}", f"{test.p:.2g}"]
        rows.append([name, f"{test.mean_first - test.mean_second:+.3f}", *numbers])
    title = f"Is {first} less similar over tasks than {other}? One-sided Welch's t-test"
    return title, [rows, f"A small p says so; one near 1 says the opposite, that {first} is more similar."]


def _divergence_table(models: Sequence[ModelAnalysis]) -> Table:
    rows: Table = [
        ["of each pair, mean (standard deviation)"],
        ["KL(query ‖ document)"],
        ["KL(document ‖ query)"],
        ["JS"],
        ["cosine"],
        ["of the mean query and the mean document, KL, KL, JS"],
    ]
    for model in models:
        found: Any = model.divergence
        spreads = (found.kl_query_document, found.kl_document_query, found.js, found.cosine)
        sets = (found.sets_kl_query_document, found.sets_kl_document_query, found.sets_js)
        cells = [model.label, *(_spread(each.mean, each.std) for each in spreads), ", ".join(f"{x:.3f}" for x in sets)]
        for row, cell in zip(rows, cells, strict=True):
            row.append(cell)
    return rows


def _movement_section(label: str, movement: Movement) -> tuple[str, list[Table | str]]:
    layers = len(next(iter(movement.experts.values())))
    rows = [["change in %, layer", *map(str, range(layers)), "all"]]
    for expert, values in movement.experts.items():
        rows.append([expert, *map(_percent, values), _percent(movement.overall[expert])])
    if movement.shared:
        rows.append(["shared", *map(_percent, movement.shared), ""])
    if movement.outside is not None:
        rows.append(["outside the layers", *[""] * layers, _percent(movement.outside)])
    cosine_rows = [["cosine between movements, layer", *map(str, range(layers)), "all"]]
    for (a, b), values in movement.cosines.items():
        cosine_rows.append([f"{a} / {b}", *map(_cosine, values), _cosine(movement.overall_cosines[a, b])])
    tables: list[Table | str] = [rows, cosine_rows] if len(cosine_rows) > 1 else [rows]
    if movement.shared:
        tables.append("shared: the attention, and the whole of a layer without experts.")
    return f"How far {label} moved from {movement.start}: Frobenius norm of the change, relative", tables


def _spread(mean: float, std: float) -> str:
    return f"{mean:.3f} ({std:.3f})"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.2f}"


def _cosine(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _section(title: str, content: list[Table | str]) -> str:
    return "\n".join([title, *("  " + part if isinstance(part, str) else _aligned(part) for part in content)])


def _aligned(table: Table) -> str:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = []
    for first, *rest in table:
        cells = [first.ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(rest, widths[1:], strict=True))]
        lines.append("  " + "  ".join(cells).rstrip())
    return "\n".join(lines)


def _markdown_table(table: Table) -> str:
    head, *rows = [[cell.replace("|", r"\|") for cell in row] for row in table]
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _markdown(analysis: Analysis, folder: Path) -> str:
    pairs = analysis.pairs
    about = [
        f"Texts: {len(analysis.texts.texts)}, {analysis.texts.source}.",
        f"Pairs: {len(pairs.queries)}, {pairs.source}." if pairs else "Pairs: none; the same texts took both roles.",
        *(f"Tasks of {model.label}: {_told(model)}." for model in analysis.models),
    ]
    blocks = ["# How far the experts have specialised", "  \n".join(about)]
    for title, content in _sections(analysis):
        blocks.append(f"## {title}")
        blocks += [f"- {part}" if isinstance(part, str) else _markdown_table(part) for part in content]
    charts = [name for name in ("similarity.png", "tsne.png", "movement.png") if (folder / name).is_file()]
    return "\n\n".join([*blocks, "## Charts", *(f"![{name}]({name})" for name in charts)]) + "\n"


def _told(model: ModelAnalysis) -> str:
    """Say what a model did for each task."""
    return ", ".join(
        f"{task} ({text.strip()!r}" + (f", expert {model.experts[task]}" if task in model.experts else "") + ")"
        for task, text in model.instructions.items()
    )
