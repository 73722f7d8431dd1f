"""The life of experts on disk: listed, taken out into files of their own, added, merged, removed, renamed."""

import math
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from configuration_mote import MoTEConfig, alternatives
from mote import experts as in_memory
from mote import hub
from mote.checkpoints.reading import Source, open_mote
from mote.checkpoints.staging import Staging, refuse_occupied, refuse_source
from mote.experts.artefact import ExpertFiles, fingerprint_of_base, open_expert, without_weights, write_expert
from mote.experts.change import Change, Report
from mote.experts.editing import MEAN, require_task_experts, require_uncompressed
from mote.experts.means import mean_of_experts
from mote.reporting import millions


@dataclass
class ExpertList:
    """The experts of a MoTE.

    Attributes:
        source: The MoTE.
        fingerprint: Of what its experts rely on.
        parameters: Of each expert.
    """

    source: Source
    fingerprint: str
    parameters: dict[str, int]

    def __str__(self) -> str:
        """Lay them out for people."""
        config: MoTEConfig = self.source.config  # type: ignore[assignment]
        rows = [("expert", "parameters", "instruction", "tasks")]
        for name in config.experts:
            size = millions(self.parameters[name]) if name in self.parameters else "not here"
            tasks = ", ".join(task for task, expert in config.tasks.items() if expert == name)
            rows.append((name, size, repr(config.instruction_of(name)), tasks))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        return "\n".join([*lines, f"base  {self.fingerprint}"])


def list_experts(src: str, *, revision: str | None = None) -> ExpertList:
    """Say which experts a MoTE has, what they are for, and what they rely on.

    Args:
        src: A MoTE: a folder or an id on the Hub.
        revision: Of a source on the Hub.

    Raises:
        FileNotFoundError: If the source is not there, or has no weights.
        ValueError: If it is no MoTE, or a router picks its experts token by token.
    """
    source = open_mote(src, revision)
    require_task_experts(source.config)
    return ExpertList(
        source, fingerprint_of_base(source), in_memory.parameter_counts(without_weights(source))["experts"]
    )


def extract_expert(
    src: str,
    name: str,
    out: str | Path,
    *,
    revision: str | None = None,
    overwrite: bool = False,
    push: bool = False,
    repo_id: str | None = None,
    private: bool = False,
    report: Report = lambda line: None,
) -> Path:
    """Write one expert of a MoTE into files of its own: its weights, its tasks and instructions, and its base.

    Args:
        src: A MoTE: a folder or an id on the Hub.
        name: Of the expert.
        out: Folder to write.
        revision: Of a source on the Hub.
        overwrite: Replace `out` where it holds an expert, or a MoTE.
        push: Push the result to the Hub.
        repo_id: Where to push to. Default: the name of `out`, under the user of the token.
        private: Make a new repository on the Hub private.
        report: Called with each line of progress.

    Returns:
        The folder.

    Raises:
        FileNotFoundError: If the source is not there, or has no weights.
        FileExistsError: If `out` is in use.
        ValueError: If the source is no MoTE, has no such expert, or its experts are compressed or routed token by
            token; if a whole model is where it is to be pushed to.
        PermissionError: If the Hub refuses the push.
    """
    out = Path(out)
    if push:
        repo_id = hub.check_before_push(repo_id or out.resolve().name)
        hub.refuse_whole_model(repo_id)
    refuse_occupied(out, overwrite)
    source = open_mote(src, revision)
    refuse_source(out, source.folder)
    config: MoTEConfig = source.config
    require_task_experts(config)
    require_uncompressed(config)
    config.require_expert(name)
    report(f"Extracting the expert {name} …")
    command = shlex.join(["mote", "experts", "extract", source.public_name, name, "--out", out.resolve().name])
    with Staging(out, overwrite) as folder:
        write_expert(source, name, folder, repo_id or out.resolve().name, command)
    report(f"Wrote {out}")
    if push:
        report(f"Pushing to {repo_id} …")
        report(f"Pushed: {hub.push(out, str(repo_id), private=private, what='an expert of a MoTE')}")
    report(f"mote experts add MODEL {repo_id if push else out} --out DIR")
    return out


def add_expert(
    src: str,
    expert: str,
    out: str | Path | None = None,
    *,
    name: str | None = None,
    instruction: str | None = None,
    tasks: Iterable[str] = (),
    revision: str | None = None,
    max_shard_size: str = "5GB",
    overwrite: bool = False,
    report: Report = lambda line: None,
) -> Path:
    """Write a MoTE with one expert more.

    Args:
        src: A MoTE: a folder or an id on the Hub.
        expert: What the new one is: an expert of the MoTE to copy, the `"mean"` of all its experts, or an expert in
            files of its own, a folder or an id on the Hub, which must have the same base.
        out: Folder to write. Default: the source itself, with `overwrite`.
        name: Of the new expert. Default: that in its files.
        instruction: Text in front of its texts. Default: that in its files, else as in `MoTEModel.add_expert`.
        tasks: Further tasks that go to it from now on. Those in its files that the MoTE does not have come with it;
            those that go elsewhere in the MoTE stay there unless they are named here.
        revision: Of a source on the Hub.
        max_shard_size: Of the files with the weights, as in `"5GB"`.
        overwrite: Replace `out` where it holds a MoTE, or a model made of one.
        report: Called with each line of progress.

    Returns:
        The folder.

    Raises:
        FileNotFoundError: If source or expert are not there.
        FileExistsError: If `out` is in use.
        ValueError: If the expert has another base or is damaged, or a name does not hold.
    """
    change = Change(src, out, revision, overwrite, "added")
    given = _find(change, expert)
    tasks = list(tasks)
    words = [*_option("name", name), *_option("instruction", instruction), *_option("task", *tasks)]
    if isinstance(given, str):
        if name is None:
            raise ValueError(
                f"The new expert, a copy of {expert!r}, needs a name of its own: give it one with `--name`"
            )
        in_memory.add(change.model, name, given, instruction=instruction, tasks=tasks)
    else:
        name = name or given.name
        texts, brought = _of_files(given, name, change.model.config, tasks, report)
        texts = texts if instruction is None else {**texts, name: instruction}
        in_memory.add(change.model, name, given.load_weights(), instruction=texts, tasks=brought)
    shown = given if isinstance(given, str) else given.public_name
    made = f"made by adding the expert `{name}` to"
    return change.write(["add", shown], words, made, max_shard_size, report)


def merge_experts(
    src: str,
    experts: Mapping[str, float],
    name: str,
    out: str | Path | None = None,
    *,
    instruction: str | None = None,
    tasks: Iterable[str] = (),
    revision: str | None = None,
    max_shard_size: str = "5GB",
    overwrite: bool = False,
    report: Report = lambda line: None,
) -> Path:
    """Write a MoTE with one expert more, the weighted mean of others.

    Args:
        src: A MoTE: a folder or an id on the Hub.
        experts: Expert → its weight in the mean, above 0; they are scaled to sum to 1. An expert is one of the MoTE, or
            one in files of its own, as in `add_expert`.
        name: Of the new expert.
        out: Folder to write. Default: the source itself, with `overwrite`.
        instruction: As in `add_expert`.
        tasks: Further tasks that go to it from now on.
        revision: Of a source on the Hub.
        max_shard_size: Of the files with the weights, as in `"5GB"`.
        overwrite: As in `add_expert`.
        report: Called with each line of progress.

    Returns:
        The folder.

    Raises:
        FileNotFoundError: If the source or an expert is not there.
        FileExistsError: If `out` is in use.
        ValueError: If an expert has another base or is damaged, a weight is not above 0, or a name does not hold.
    """
    for word, weight in experts.items():
        if not 0 < weight < math.inf:
            raise ValueError(f"The weight of {word!r} is {weight}: expected a number above 0")
    if sum(experts.values()) == math.inf:
        raise ValueError("The weights are too large for their sum: expected numbers such as 0.7 and 0.3")
    if not experts:
        raise ValueError("Name the experts to merge, as in search_query=0.7 search_document=0.3")
    change = Change(src, out, revision, overwrite, "merged")
    tasks = list(tasks)
    found = [_find(change, word) for word in experts]
    weights = [
        in_memory.weights(change.model, each) if isinstance(each, str) else each.load_weights() for each in found
    ]
    merged = mean_of_experts(weights, list(experts.values()))
    in_memory.add(change.model, name, merged, instruction=instruction, tasks=tasks)
    shown = [each if isinstance(each, str) else each.public_name for each in found]
    parts = [f"{each}={weight:g}" for each, weight in zip(shown, experts.values(), strict=True)]
    words = [*_option("name", name), *_option("instruction", instruction), *_option("task", *tasks)]
    made = f"made by merging {', '.join(f'`{part}`' for part in parts)} into the expert `{name}`, of"
    return change.write(["merge", *parts], words, made, max_shard_size, report)


def remove_expert(
    src: str,
    name: str,
    out: str | Path | None = None,
    *,
    tasks: Mapping[str, str | None] | None = None,
    revision: str | None = None,
    max_shard_size: str = "5GB",
    overwrite: bool = False,
    report: Report = lambda line: None,
) -> Path:
    """Write a MoTE with one expert less.

    Args:
        src: A MoTE: a folder or an id on the Hub.
        name: Of the expert.
        out: Folder to write. Default: the source itself, with `overwrite`.
        tasks: Where its tasks go from now on, as in `MoTEModel.remove_expert`.
        revision: Of a source on the Hub.
        max_shard_size: Of the files with the weights, as in `"5GB"`.
        overwrite: As in `add_expert`.
        report: Called with each line of progress.

    Returns:
        The folder.

    Raises:
        FileNotFoundError: If the source is not there, or has no weights.
        FileExistsError: If `out` is in use.
        ValueError: As in `MoTEModel.remove_expert`.
    """
    change = Change(src, out, revision, overwrite, "removed")
    in_memory.remove(change.model, name, tasks=tasks)
    moved = [f"{task}={expert or ''}" for task, expert in (tasks or {}).items()]
    made = f"made by removing the expert `{name}` from"
    words = [word for task in moved for word in _option("task", task)]
    return change.write(["remove", name], words, made, max_shard_size, report)


def rename_expert(
    src: str,
    name: str,
    new_name: str,
    out: str | Path | None = None,
    *,
    revision: str | None = None,
    max_shard_size: str = "5GB",
    overwrite: bool = False,
    report: Report = lambda line: None,
) -> Path:
    """Write a MoTE in which an expert, and the task of its name, has another name.

    Args:
        src: A MoTE: a folder or an id on the Hub.
        name: As it is called.
        new_name: As it is to be called.
        out: Folder to write. Default: the source itself, with `overwrite`.
        revision: Of a source on the Hub.
        max_shard_size: Of the files with the weights, as in `"5GB"`.
        overwrite: As in `add_expert`.
        report: Called with each line of progress.

    Returns:
        The folder.

    Raises:
        FileNotFoundError: If the source is not there, or has no weights.
        FileExistsError: If `out` is in use.
        ValueError: As in `MoTEModel.rename_expert`.
    """
    change = Change(src, out, revision, overwrite, "renamed")
    in_memory.rename(change.model, name, new_name)
    made = f"made by renaming the expert `{name}` to `{new_name}` in"
    return change.write(["rename", name, new_name], [], made, max_shard_size, report)


def _find(change: Change, word: str) -> str | ExpertFiles:
    """Find the expert that a word names: one of the MoTE, the mean of them all, or one in files of its own."""
    config: MoTEConfig = change.source.config
    if word in config.experts or word == MEAN:
        return word
    if "/" not in word and not Path(word).is_dir():
        raise ValueError(
            f"Unknown expert {word!r}."
            + alternatives(word, config.experts)
            + " An expert in files of its own is named by its folder, or by its id on the Hub (user/name)"
        )
    found = open_expert(word)
    found.require_base(change.source)
    if not change.in_place:
        refuse_source(change.out, found.folder)
    return found


def _of_files(
    expert: ExpertFiles, name: str, config: MoTEConfig, wanted: list[str], report: Report
) -> tuple[dict[str, str], list[str]]:
    """Tell with which instructions and tasks an expert in files comes into a MoTE, perhaps under another name."""
    stay = [task for task in expert.tasks if task in config.tasks and task not in (expert.name, name, *wanted)]
    for task in stay:
        report(f"The task {task} stays with {config.tasks[task]}: `--task {task}` sends it to {name}")
    brought = [task for task in expert.tasks if task not in (expert.name, name, *stay, *wanted)]
    tasks = [*brought, *wanted]
    own = {name if task == expert.name else task: text for task, text in expert.instructions.items()}
    texts = {task: text for task, text in own.items() if task == name or task in tasks}
    return texts, tasks


def _option(name: str, *values: str | None) -> list[str]:
    given = [value for value in values if value is not None]
    return [word for each in given for word in ("--" + name, each)]
