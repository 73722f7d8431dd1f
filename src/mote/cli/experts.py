"""The commands `mote experts …`."""

import argparse
from collections.abc import Callable

from mote.cli.parts import Pairs, print_line


def add_experts(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add them to the command `mote`."""
    command = commands.add_parser(
        "experts",
        help="list, add, extract, merge, remove, rename experts",
        description="The experts of a MoTE: list them, put one more in, take one out into files of its own.",
    )
    verbs = command.add_subparsers(required=True, metavar="VERB")
    for add in (_add_list, _add_add, _add_extract, _add_merge, _add_remove, _add_rename):
        add(verbs)


def _add_list(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = _verb(verbs, "list", "say which experts a MoTE has", _list)
    command.add_argument("--revision", help="branch, tag or commit of a source on the Hub")


def _list(src: str, revision: str | None) -> None:
    from mote.experts import life

    print_line(str(life.list_experts(src, revision=revision)))


def _add_add(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = _verb(verbs, "add", "write a MoTE with one expert more", _add)
    command.add_argument(
        "expert",
        metavar="EXPERT",
        help="an expert in files of its own (a folder, or an id on the Hub), an expert of SRC to copy, or mean",
    )
    command.add_argument("--name", help="of the new expert (default: that in its files)")
    _add_tasks(command)
    _add_place(command)


def _add(src: str, expert: str, **arguments: object) -> None:
    from mote.experts import life

    life.add_expert(src, expert, **arguments, report=print_line)  # type: ignore[arg-type]


def _add_extract(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = _verb(verbs, "extract", "write one expert into files of its own", _extract)
    add = command.add_argument
    add("name", metavar="NAME", help="of the expert")
    add("--out", required=True, metavar="DIR", help="where to write")
    add("--revision", help="branch, tag or commit of a source on the Hub")
    add("--overwrite", action="store_true", help="replace DIR where it holds an expert, or a MoTE")
    add("--push", action="store_true", help="push the result to the Hub")
    add("--repo-id", metavar="USER/NAME", help="where to push to (default: the name of DIR, under your user)")
    add("--private", action="store_true", help="make a new repository on the Hub private")


def _extract(src: str, name: str, out: str, **arguments: object) -> None:
    from mote.experts import life

    life.extract_expert(src, name, out, **arguments, report=print_line)  # type: ignore[arg-type]


def _add_merge(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = _verb(verbs, "merge", "write a MoTE with one expert more, the weighted mean of others", _merge)
    command.add_argument(
        "experts",
        nargs="+",
        metavar="EXPERT[=WEIGHT]",
        help="of SRC, or in files of its own (a folder, or an id on the Hub); weights are scaled to sum to 1",
    )
    command.add_argument("--name", required=True, help="of the new expert")
    _add_tasks(command)
    _add_place(command)


def _merge(src: str, experts: list[str], name: str, **arguments: object) -> None:
    from mote.experts import life

    life.merge_experts(src, _weights(experts), name, **arguments, report=print_line)  # type: ignore[arg-type]


def _weights(words: list[str]) -> dict[str, float]:
    """Read EXPERT or EXPERT=WEIGHT, each expert once."""
    weights: dict[str, float] = {}
    for word in words:
        name, equals, weight = word.rpartition("=")
        try:
            name, number = (name, float(weight)) if equals else (word, 1.0)
        except ValueError:
            name = ""
        if not name or name in weights:
            raise ValueError(f"{word!r}: expected EXPERT or EXPERT=WEIGHT, a number, and each expert once")
        weights[name] = number
    return weights


def _add_remove(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = _verb(verbs, "remove", "write a MoTE with one expert less", _remove)
    command.add_argument("name", metavar="NAME", help="of the expert")
    command.add_argument(
        "--task",
        action=Pairs,
        dest="tasks",
        metavar="TASK=EXPERT",
        help="where a task of its goes from now on; with nothing after the =, the task is removed as well",
    )
    _add_place(command)


def _remove(src: str, name: str, tasks: dict[str, str] | None, **arguments: object) -> None:
    from mote.experts import life

    moved = {task: expert or None for task, expert in (tasks or {}).items()}
    life.remove_expert(src, name, tasks=moved, **arguments, report=print_line)  # type: ignore[arg-type]


def _add_rename(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    command = _verb(verbs, "rename", "write a MoTE in which an expert has another name", _rename)
    command.add_argument("name", metavar="NAME", help="of the expert")
    command.add_argument("new_name", metavar="NEW", help="its new name")
    _add_place(command)


def _rename(src: str, name: str, new_name: str, **arguments: object) -> None:
    from mote.experts import life

    life.rename_expert(src, name, new_name, **arguments, report=print_line)  # type: ignore[arg-type]


def _verb(
    verbs: "argparse._SubParsersAction[argparse.ArgumentParser]", name: str, about: str, run: Callable[..., None]
) -> argparse.ArgumentParser:
    command = verbs.add_parser(name, help=about, description=f"{about[0].upper()}{about[1:]}.")
    command.add_argument("src", metavar="SRC", help="a MoTE: a folder, or an id on the Hub (user/name)")
    command.set_defaults(run=run)
    return command


def _add_tasks(command: argparse.ArgumentParser) -> None:
    command.add_argument("--instruction", metavar="TEXT", help="put in front of the new expert's texts")
    command.add_argument("--tasks", nargs="+", default=[], metavar="TASK", help="further tasks that go to it")


def _add_place(command: argparse.ArgumentParser) -> None:
    add = command.add_argument
    add("--out", metavar="DIR", help="where to write (default, with --overwrite: SRC itself)")
    add("--revision", help="branch, tag or commit of a source on the Hub")
    add("--max-shard-size", default="5GB", metavar="SIZE", help="of the files with the weights (default: 5GB)")
    add("--overwrite", action="store_true", help="replace DIR, or SRC itself")
