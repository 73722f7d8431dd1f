"""Commands that do more than call one function of the library."""

import logging
from functools import partial
from pkgutil import resolve_name
from typing import Any, Literal

import mote
from mote.analysis.options import AnalyzeOptions
from mote.cli.build import EditOptions, ResultOptions, show, transform, weights
from mote.evaluation.options import EvaluateOptions
from mote.upcycling.options import UpcyclingOptions

logger = logging.getLogger(__name__)


def upcycle(*, src: str, out: str | None = None, dry_run: bool = False, options: UpcyclingOptions) -> None:
    """Turn a dense text encoder into a MoTE.

    Every expert starts as a copy of the dense blocks.

    Args:
        src: Dense text encoder: a folder, or an id on the Hub.
        out: Output folder. Default: the source's name with -mote.
        dry_run: Print the plan, write nothing.
    """
    if dry_run:
        show(mote.plan_upcycling(src, out, options))
        show("Dry run: nothing was written.")
    else:
        mote.upcycle(src, out, options)


def run_recipe(
    recipe: str,
    overrides: list[str] | None = None,
    *,
    dry_run: bool = False,
    overwrite: bool = False,
    function: str,
    plan: str,
) -> None:
    """Train a model from a recipe.

    The same command resumes an interrupted run.

    Args:
        recipe: Recipe: a file, or the name of a shipped one.
        overrides: KEY=VALUE, settings that override those of the recipe.
        dry_run: Read the data, print the plan, train nothing.
        overwrite: Discard a finished or interrupted run and start over.
        function: `module:name` of the function that trains.
        plan: The same of the function that plans.
    """
    from datasets.utils import disable_progress_bars

    # One bar is enough.
    _without_bars()
    disable_progress_bars()
    result = resolve_name(plan if dry_run else function)(recipe, overrides or [], overwrite=overwrite)
    if dry_run:
        show(f"{result}\nDry run: nothing was trained.")


def evaluate(models: list[str], *, out: str | None = None, options: EvaluateOptions) -> None:
    """Score models with MTEB.

    The same command resumes an interrupted evaluation.

    Args:
        models: Models: folders, ids on the Hub, or LABEL=MODEL.
        out: Folder for tables, scores and mteb's results.
    """
    _without_bars()
    evaluation = mote.evaluate(models, out, options)
    show(evaluation)
    failed = evaluation.failed()
    if failed:
        raise ValueError(f"{len(failed)} scores failed: {'; '.join(failed)}")


def analyze(models: list[str], *, out: str | None = None, options: AnalyzeOptions) -> Any:
    """Show how far experts have specialised.

    Reports similarity between tasks, divergence between queries and documents, and the weight change of each expert.

    Args:
        models: Models: folders, ids on the Hub, or LABEL=MODEL.
        out: Folder for tables, numbers and charts.
    """
    _without_bars()
    return mote.analyze(models, out, options)


def export(
    src: str,
    *,
    expert: str,
    backend: Literal["torch", "onnx", "openvino"] = "torch",
    quantize: Literal["int8"] | None = None,
    texts: str | None = None,
    options: ResultOptions,
) -> None:
    """Write one expert as a dense model.

    It loads without the code of this package.

    Args:
        src: MoTE: a folder, or an id on the Hub.
        expert: Expert to export.
        backend: CPU runtime to convert the model for as well.
        quantize: Precision of the runtime's model. Default: float32.
        texts: File with calibration texts, one per line (`.txt`). Default: 128 shipped with MoTE.
    """
    from mote.data.texts import read_texts
    from mote.inference import runtimes

    calibration = read_texts(texts)
    if backend == "torch" and (texts or quantize):
        raise ValueError("quantize and texts are for other backends: choose one, as in `--backend openvino`")
    runtimes.require(backend)
    settings: dict[str, Any] = {}
    if backend != "torch":
        settings["after"] = partial(runtimes.convert, backend=backend, quantize=quantize, texts=calibration)
        settings["recorded"] = {"backend": backend, "quantize": quantize}
    transform(src, options, mote.experts.export, expert, **settings)
    if backend != "torch":
        logger.info('mote.load_exported("%s", backend="%s").encode(texts)', options.out, backend)


def add_expert(
    src: str,
    expert: str,
    *,
    name: str | None = None,
    instruction: str | None = None,
    tasks: list[str] | None = None,
    options: EditOptions,
) -> None:
    """Write a MoTE with one more expert.

    Args:
        src: MoTE: a folder, or an id on the Hub.
        expert: Expert of SRC, 'mean', or an extracted expert: a folder, or an id on the Hub.
        name: Name of the new expert. Default: the extracted one's.
        instruction: Instruction in front of the new expert's texts.
        tasks: Additional tasks of the expert.
    """
    from mote.experts.artefact import ExpertArtefact, open_word

    start = open_word(expert)
    name = name or (start.name if isinstance(start, ExpertArtefact) else None)
    if name is None:
        raise ValueError(f"The new expert, a copy of {expert!r}, needs a name of its own: give it one with `--name`")
    transform(src, options, mote.experts.add, name, start, instruction=instruction, tasks=tasks)


def merge_experts(
    src: str,
    experts: list[str],
    *,
    name: str,
    instruction: str | None = None,
    tasks: list[str] | None = None,
    options: EditOptions,
) -> None:
    """Write a MoTE with one more expert, the weighted mean of others.

    Args:
        src: MoTE: a folder, or an id on the Hub.
        experts: EXPERT[=WEIGHT], experts of SRC or extracted ones; weights are scaled to sum to 1.
        name: Name of the new expert.
        instruction: Instruction in front of the new expert's texts.
        tasks: Additional tasks of the expert.
    """
    from mote.experts.artefact import open_word

    opened_weights = {open_word(expert): weight for expert, weight in weights(experts, default=1.0).items()}
    transform(src, options, mote.experts.merge, opened_weights, name, instruction=instruction, tasks=tasks)


def _without_bars() -> None:
    """Turn off the progress bars of transformers."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
