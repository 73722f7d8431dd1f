"""Commands that do more than call one function of the library."""

import inspect
import re
import sys
from collections.abc import Callable
from functools import partial
from importlib.resources import files
from pkgutil import resolve_name
from typing import Any, Literal

import mote
from mote.analysis.options import AnalyzeOptions
from mote.cli.build import EditOptions
from mote.evaluation.options import EvaluateOptions
from mote.upcycling.options import UpcyclingOptions


def upcycle(*, src: str, out: str | None = None, dry_run: bool = False, options: UpcyclingOptions) -> None:
    """Turn a dense text encoder into a MoTE.

    Every expert starts as a copy of the dense blocks.

    Args:
        src: Dense text encoder: a folder, or an id on the Hub.
        out: Output folder. Default: the source's name with -mote.
        dry_run: Print the plan, write nothing.
    """
    if dry_run:
        sys.stdout.write(f"{mote.plan_upcycling(src, out, options)}\nDry run: nothing was written.\n")
    else:
        mote.upcycle(src, out, options)


def _recipe_command(name: str, place: str = "recipes") -> Callable[..., None]:
    """Return the command that trains by a class of runs, `module:name`, from recipes shipped in a folder of `mote`."""
    texts = {file.name: file.read_text("utf-8") for file in files("mote").joinpath(place).iterdir() if file.is_file()}
    found = {name.removesuffix(".yaml"): re.search("(?m)^description: (.*)", text) for name, text in texts.items()}
    recipes = "\n".join(f"- {name}: {line[1] if line else ''}" for name, line in sorted(found.items()))

    def command(
        recipe: str = "",
        overrides: list[str] | None = None,
        *,
        list_: bool = False,
        dry_run: bool = False,
        verbose: bool = False,
        overwrite: bool = False,
    ) -> None:
        """Train a model from a recipe.

        The same command resumes an interrupted run.

        Args:
            recipe: Recipe: a file, or the name of a shipped one.
            overrides: KEY=VALUE, settings that override those of the recipe.
            list_: List the shipped recipes.
            dry_run: Read the data, print the plan, train nothing.
            verbose: With dry_run, print the complete recipe.
            overwrite: Discard a finished or interrupted run and start over.
        """
        if list_:
            sys.stdout.write(recipes + "\n")
            return
        run = resolve_name(name)(recipe, overrides or [], overwrite=overwrite)
        if dry_run:
            sys.stdout.write(f"{run.plan(verbose)}\nDry run: nothing was trained.\n")
        else:
            run.run()

    command.__doc__ = inspect.cleandoc(command.__doc__ or "").replace("\nArgs:", f"\n{recipes}\n\nArgs:")
    return command


train = _recipe_command("mote.training.train:open_run")
pretrain = _recipe_command("mote.training.pretraining:PretrainingRun", "recipes/pretraining")


def evaluate(models: list[str], out: str | None = None, *, options: EvaluateOptions) -> Any:
    """Score models with MTEB.

    Scores are cached by model, data, limit and dtype; the same command resumes an interrupted evaluation. A dataset on
    which a model fails does not stop the others.

    Args:
        models: Any Sentence-Transformers models: folders or ids on the Hub, or LABEL=MODEL.
        out: Folder for tables, scores and the cache. Default: only a cache in the user's Hugging Face assets.
    """
    return mote.evaluate(models, out, options)  # imported here: it takes seconds, for which its help need not wait


def analyze(models: list[str], out: str | None = None, *, options: AnalyzeOptions) -> Any:
    """Show how far experts have specialised.

    Measures similarity between tasks, divergence between queries and documents, and the weight change of each expert.

    Args:
        models: Any Sentence-Transformers models: folders or ids on the Hub, or LABEL=MODEL.
        out: Folder for tables, numbers and charts. Default: nothing is written.
    """
    return mote.analyze(models, out, options)


def export(
    src: str,
    *,
    expert: str | None = None,
    backend: Literal["torch", "onnx", "openvino"] = "torch",
    quantize: Literal["int8"] | None = None,
    options: EditOptions,
) -> None:
    """Write one expert as a dense model, or all experts for ONNX Runtime.

    An expert loads without the code of this package.

    Args:
        src: MoTE: a folder, or an id on the Hub.
        expert: Expert to export. Without it, `--backend onnx` exports all: a graph for each, and their weights once.
        backend: CPU runtime to convert the model for as well.
        quantize: Precision of the runtime's model. Default: float32.
    """
    from mote.data.texts import read_texts
    from mote.inference import runtimes

    if backend == "torch" and quantize:
        raise ValueError("quantize is for other backends: choose one, as in `--backend openvino`")
    if expert is None and backend != "onnx":
        raise ValueError("Name an expert with `--expert`, or export all experts with `--backend onnx`")
    runtimes.require(backend)
    function: Any = mote.experts.export
    convert: Any = partial(runtimes.convert, backend=backend)
    if expert is None:
        from mote.inference import onnx_experts

        function, convert = onnx_experts.whole, onnx_experts.convert_experts
    settings: dict[str, Any] = {}
    if backend != "torch":
        settings["after"] = partial(convert, quantize=quantize, texts=read_texts())
        settings["recorded"] = {"backend": backend, "quantize": quantize}
    names = [] if expert is None else [expert]
    mote.transform(src, options.out, function, *names, revision=options.revision, options=options, **settings)
