"""The command `mote`."""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from mote.cli import experts as experts_commands
from mote.cli.parts import Pairs as _Pairs
from mote.cli.parts import print_line as _print_line


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line.

    Args:
        argv: Arguments after the program's name. Default: the process's.

    Returns:
        The exit status: 0, or 1 after an error, which is printed.
    """
    arguments = _parse(argv)
    run = arguments.pop("run")
    try:
        run(**arguments)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    except KeyboardInterrupt as interrupt:
        sys.stderr.write(f"interrupted: {str(interrupt) or 'nothing was left behind'}\n")
        return 130
    return 0


def _parse(argv: Sequence[str] | None) -> dict[str, Any]:
    """Parse, with KEY=VALUE before and after options, which argparse by itself does not take."""
    parser = _parser()
    known, rest = parser.parse_known_args(argv)
    arguments = vars(known)
    if any(word.startswith("-") or "overrides" not in arguments for word in rest):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    return {**arguments, "overrides": [*arguments["overrides"], *rest]} if rest else arguments


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="mote", description="Text-embedding models with task experts.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_upcycle(commands)
    _add_train(commands)
    _add_evaluate(commands)
    _add_analyze(commands)
    _add_average(commands)
    _add_interpolate(commands)
    _add_compress(commands)
    _add_export(commands)
    experts_commands.add_experts(commands)
    _add_memory(commands)
    return parser


def _add_upcycle(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = commands.add_parser(
        "upcycle",
        help="turn a dense checkpoint into a MoTE",
        description="Turn a dense text encoder into a MoTE: every expert starts as a copy of the dense blocks.",
    )
    add = command.add_argument
    add("--src", required=True, help="a folder, or an id on the Hub (user/name)")
    add("--out", metavar="DIR", help="where to write (default: the source's name with -mote)")
    add("--revision", help="branch, tag or commit of a source on the Hub")
    add("--experts", nargs="+", metavar="NAME", help="names of the experts (default: the paper's four)")
    add(
        "--layers",
        type=_layers,
        default="every",
        help="blocks that get experts: every, every_other (the 2nd, 4th, …), or indices from 0, as in 1,3,5",
    )
    add("--task", action=_Pairs, dest="tasks", metavar="NAME=EXPERT", help="send a further task to an expert")
    add(
        "--instruction",
        action=_Pairs,
        dest="instructions",
        metavar="TASK=TEXT",
        help="text put in front of a task's inputs (default: the source's prompts, then the paper's)",
    )
    add("--default-task", help="task of texts for which none is given (default: that is an error)")
    add("--pooling", choices=("mean", "cls", "last_token"), help="default: the source's, or mean")
    add("--layer-path", metavar="PATH", help="of an architecture that MoTE does not know: where its layers are")
    add("--shared-modules", nargs="+", metavar="PATH", help="and what makes up the attention of each layer")
    add("--router", choices=("task", "token"), default="task", help="what picks the expert (default: the task)")
    add("--experts-per-token", type=int, default=2, metavar="K", help="of a token router (default: 2)")
    add(
        "--no-normalize-router",
        dest="normalize_router",
        action="store_false",
        help="of a token router: weight experts by its probabilities as they are, not scaled to sum to 1",
    )
    add("--load-balancing", type=float, default=0.01, metavar="F", help="of a token router: factor of its loss (0.01)")
    add("--tokenizer", metavar="SRC", help="a folder or an id on the Hub (default: the source's own)")
    add("--dtype", choices=("auto", "float32", "float16", "bfloat16"), default="auto", help="of the weights")
    add("--max-shard-size", default="5GB", metavar="SIZE", help="of the files with the weights (default: 5GB)")
    add("--push", action="store_true", help="push the result to the Hub")
    add("--repo-id", metavar="USER/NAME", help="where to push to (default: the name of DIR, under your user)")
    add("--private", action="store_true", help="make a new repository on the Hub private")
    add("--dry-run", action="store_true", help="print the plan, write nothing")
    add("--overwrite", action="store_true", help="replace DIR where it holds a MoTE already")
    command.set_defaults(run=_upcycle)


def _upcycle(*, dry_run: bool, **arguments: object) -> None:
    from mote import upcycling  # takes seconds to import, which `--help` and a mistyped option need not wait for

    if dry_run:
        beside_the_plan = {"tokenizer", "overwrite", "push", "repo_id", "private"}
        plan = {name: value for name, value in arguments.items() if name not in beside_the_plan}
        _print_line(str(upcycling.plan_upcycling(**plan)))  # type: ignore[arg-type]
        _print_line("Dry run: nothing was written.")
    else:
        upcycling.upcycle(**arguments, report=_print_line)  # type: ignore[arg-type]


def _add_train(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = commands.add_parser(
        "train",
        help="train a MoTE, or a model to compare it with, as a recipe says",
        description="Train as a recipe says. The same command goes on where a run was broken off.",
    )
    add = command.add_argument
    add("recipe", metavar="RECIPE", help="a file, or the name of a shipped recipe")
    add("overrides", nargs="*", metavar="KEY=VALUE", help="settings over those of the recipe")
    add("--dry-run", action="store_true", help="read the data and print the plan, train nothing")
    add("--overwrite", action="store_true", help="start again where a run has ended or was broken off")
    command.set_defaults(run=_train)


def _train(*, recipe: str, overrides: list[str], dry_run: bool, overwrite: bool) -> None:
    from transformers.utils import logging

    try:
        from datasets.utils import logging as datasets_logging

        from mote.training import train as run
    except ModuleNotFoundError as error:
        raise OSError(f'training needs {error.name}, which is not installed: pip install -e ".[train]"') from error

    for library in (logging, datasets_logging):  # one bar is enough
        library.disable_progress_bar()
    if dry_run:
        _print_line(run.plan(recipe, overrides))
        _print_line("Dry run: nothing was trained.")
    else:
        run.train(recipe, overrides, overwrite=overwrite, report=_print_line)


def _add_evaluate(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = commands.add_parser(
        "evaluate",
        help="score models on the task types of MTEB",
        description="Score models with MTEB. The same command goes on where it was broken off.",
    )
    add = command.add_argument
    add("models", nargs="+", metavar="MODEL", help="a folder or an id on the Hub, or LABEL=MODEL")
    add("--data", metavar="FOLDER", help="score on the sets of a folder")
    add("--benchmark", metavar="NAME", help='score on a benchmark of MTEB, as in "MTEB(eng, v1)"')
    add(
        "--tasks",
        nargs="+",
        default=(),
        metavar="NAME",
        help="sets of the folder or the benchmark, also by patterns as in 'beir/*'; without these, tasks of MTEB",
    )
    add("--limit", type=int, metavar="N", help="cut the sets of the folder down to about N texts each")
    add("--reference", metavar="MODEL", help="gains are over this one of the models (default: the first)")
    add("--out", metavar="DIR", help="write tables, scores, a chart of gains and mteb's results")
    add("--batch-size", type=int, default=32, metavar="N", help="texts embedded at once (default: 32)")
    add("--device", metavar="D", help="cpu, cuda, cuda:1, mps … (default: the best there is)")
    add("--dtype", metavar="T", help="of the weights: float32, float16, bfloat16 (default: as they are stored)")
    add("--trust-remote-code", action="store_true", help="run code of models on the Hub; that of folders always is")
    add("--overwrite", action="store_true", help="compute scores again that are there already")
    command.set_defaults(run=_evaluate)


def _evaluate(*, models: list[str], out: str | None, **arguments: object) -> None:
    try:
        from mote.evaluation import evaluate as run
    except ModuleNotFoundError as error:
        raise OSError(f'evaluation needs {error.name}, which is not installed: pip install -e ".[evaluate]"') from error

    evaluation = run.evaluate(models, out=out, **arguments, report=_print_line)  # type: ignore[arg-type]
    _print_line("\n" + evaluation.table())
    if out is not None:
        _print_line(f"\nWrote {out}")
    if failed := evaluation.failed():
        total = len(models) * len(evaluation.types)
        raise ValueError(f"{len(failed)} of {total} scores failed: {'; '.join(failed)}")


def _add_analyze(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = commands.add_parser(
        "analyze",
        help="see how far experts have specialised",
        description="See how far the experts of models have specialised: by similarity between tasks, by divergence "
        "between queries and documents, and by how far each expert moved from its start.",
    )
    add = command.add_argument
    add("models", nargs="+", metavar="MODEL", help="a folder or an id on the Hub, or LABEL=MODEL")
    add("--out", metavar="DIR", help="write analysis.json, analysis.md and charts")
    add("--texts", metavar="FILE", help="one text per line, or .jsonl (default: 128 texts that come with MoTE)")
    add("--data", metavar="FOLDER", help="draw texts and pairs from the datasets of a folder")
    add("--pairs", metavar="FILE", help=".jsonl with columns 'query' and 'positive' (default: those of --data)")
    add("--tasks", nargs="+", metavar="NAME", help="to compare (default: the experts, or the paper's four)")
    add("--start", metavar="MODEL", help="what was trained (default: what the model's folder records)")
    add("--limit", type=int, default=128, metavar="N", help="how many texts, and pairs (default: 128)")
    add("--batch-size", type=int, default=32, metavar="N", help="texts embedded at once (default: 32)")
    add("--device", metavar="D", help="cpu, cuda, cuda:1, mps … (default: the best there is)")
    add("--seed", type=int, default=0, metavar="N", help="of samples and of t-SNE (default: 0)")
    add("--trust-remote-code", action="store_true", help="run code of models on the Hub; that of folders always is")
    command.set_defaults(run=_analyze)


def _analyze(*, models: list[str], **arguments: object) -> None:
    from transformers.utils import logging

    try:
        from mote.analysis.analyze import analyze
    except ModuleNotFoundError as error:
        raise OSError(f'analysis needs {error.name}, which is not installed: pip install -e ".[evaluate]"') from error

    logging.disable_progress_bar()
    analysis = analyze(models, **arguments, report=_print_line)  # type: ignore[arg-type]
    _print_line(f"\n{analysis}")


def _add_average(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = commands.add_parser(
        "average",
        help="make one dense model of the experts",
        description="Write the mean of a MoTE's experts as a dense model that loads without any code of ours.",
    )
    _add_source_and_out(command)
    command.set_defaults(run=_average)


def _average(src: str, out: str, **arguments: object) -> None:
    from mote.experts import merging

    merging.average(src, out, **arguments, report=_print_line)  # type: ignore[arg-type]


def _add_interpolate(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = commands.add_parser(
        "interpolate",
        help="move experts towards their mean",
        description="Write a MoTE whose experts are nearer to their mean.",
    )
    _add_source_and_out(command)
    command.add_argument(
        "--to-mean",
        required=True,
        nargs="+",
        metavar="L",
        help="how far: 0 is the expert as it is, 1 the mean; one number for all, or NAME=L for some experts",
    )
    command.set_defaults(run=_interpolate)


def _interpolate(src: str, out: str, to_mean: list[str], **arguments: object) -> None:
    from mote.experts import merging

    merging.interpolate(src, out, to_mean=_to_mean(to_mean), **arguments, report=_print_line)  # type: ignore[arg-type]


def _add_export(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = commands.add_parser(
        "export",
        help="take out one expert as a dense model",
        description="Write one expert of a MoTE as a dense model that loads without any code of ours.",
    )
    _add_source_and_out(command)
    add = command.add_argument
    add("--expert", required=True, metavar="NAME", help="which one")
    add("--backend", default="torch", metavar="B", help="write also for a runtime on CPUs: onnx or openvino")
    add("--quantize", metavar="Q", help="of that runtime's model: int8 (default: float32)")
    add("--texts", metavar="FILE", help="for calibration, one per line (default: 128 texts that come with MoTE)")
    command.set_defaults(run=_export)


def _export(src: str, out: str, **arguments: object) -> None:
    from mote.experts import exporting

    exporting.export(src, out, **arguments, report=_print_line)  # type: ignore[arg-type]


def _to_mean(words: list[str]) -> float | dict[str, float]:
    """Read one number, or NAME=NUMBER for each expert."""
    pairs = [word.rpartition("=") for word in words]
    try:
        numbers = {name: float(number) for name, _, number in pairs}
    except ValueError:
        numbers = {}
    if len(numbers) != len(words) or ("" in numbers and len(words) > 1):
        raise ValueError(f"--to-mean {' '.join(words)}: expected one number, or NAME=NUMBER once for each expert")
    return numbers.get("", numbers)


def _add_compress(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = commands.add_parser(
        "compress",
        help="make experts take less memory",
        description="Write a MoTE whose experts take less memory. It loads wherever a MoTE loads.",
    )
    _add_source_and_out(command)
    how = command.add_mutually_exclusive_group(required=True)
    how.add_argument("--rank", type=int, metavar="R", help="keep experts as differences of this rank from their mean")
    how.add_argument("--bits", type=int, metavar="8", help="keep the matrices of experts in 8 bits")
    command.set_defaults(run=_compress)


def _compress(src: str, out: str, **arguments: object) -> None:
    from mote.experts import compression

    compression.compress(src, out, **arguments, report=_print_line)  # type: ignore[arg-type]


def _add_source_and_out(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("src", metavar="SRC", help="a MoTE: a folder, or an id on the Hub (user/name)")
    add("--out", required=True, metavar="DIR", help="where to write")
    add("--revision", help="branch, tag or commit of a source on the Hub")
    add("--max-shard-size", default="5GB", metavar="SIZE", help="of the files with the weights (default: 5GB)")
    add("--overwrite", action="store_true", help="replace DIR where it holds a MoTE, or a model made of one")


def _add_memory(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = commands.add_parser(
        "memory",
        help="estimate the memory of training",
        description="Estimate what a step of contrastive training with AdamW takes on each device. Reads no weights.",
    )
    add = command.add_argument
    add("src", metavar="SRC", help="a MoTE or a dense model: a folder, or an id on the Hub (user/name)")
    add("--revision", help="branch, tag or commit of a source on the Hub")
    add("--experts", nargs="+", metavar="NAME", help="of the MoTE that a dense SRC would become")
    add("--batch-size", type=int, required=True, metavar="N", help="rows of a step, over all processes")
    add("--mini-batch-size", type=int, metavar="N", help="of a cached loss (default: a loss that is not cached)")
    add("--length", type=int, required=True, metavar="L", help="tokens of each text")
    add("--columns", type=int, default=2, metavar="N", help="texts in a row: 2 (default), 3 with a hard negative")
    add("--gradient-checkpointing", action="store_true", help="compute activations within blocks again")
    add("--precision", default="fp32", metavar="P", help="fp32 (default), or bf16 for autocast")
    add("--processes", type=int, default=1, metavar="N", help="devices (default: 1)")
    add("--sharding", default="ddp", metavar="S", help="ddp (default), fsdp2 or deepspeed-stage-2")
    add("--device", default="gpu", metavar="D", help="gpu (default) or cpu")
    command.set_defaults(run=_memory)


def _memory(src: str, revision: str | None, experts: list[str] | None, **arguments: object) -> None:
    from mote.training import memory

    config = memory.config_of(src, revision, experts)
    _print_line(str(memory.estimate_memory(config, **arguments)))  # type: ignore[arg-type]


def _layers(text: str) -> str | list[int]:
    if text in ("every", "every_other"):
        return text
    try:
        return [int(index) for index in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not 'every', 'every_other', or indices with commas as in 1,3,5"
        ) from None
