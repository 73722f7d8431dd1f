"""After training: experts averaged into one dense model, or moved towards their mean."""

import copy
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from configuration_mote import MoTEConfig, alternatives
from experts_mote import mean_of, native_model, require_all_experts, weight_of_an_expert
from modeling_mote import MoTEModel
from mote.checkpoints import writing as repository
from mote.checkpoints.reading import Source, load_mote, load_tokenizer, open_mote
from mote.checkpoints.staging import Staging, refuse_occupied, refuse_source
from mote.checkpoints.writing import MERGING_RECORD

Report = Callable[[str], None]


def average_experts(model: MoTEModel) -> PreTrainedModel:
    """Make the mean of the experts a dense native model (Expert Averaging, EA in the paper).

    Args:
        model: A MoTE with all its experts. It stays as it is.

    Returns:
        The model of the backbone's architecture, without a pooler. Blocks that have no experts are as they were.

    Raises:
        ValueError: If experts were not loaded, or a router picks them token by token.
    """
    require_mergeable(model.config)
    key = weight_of_an_expert(model)
    dense: dict[str, torch.Tensor] = {}
    of_experts: dict[str, list[torch.Tensor]] = {}
    for name, weight in model.state_dict().items():
        found = key.fullmatch(name)
        if found is None:
            dense[name.removeprefix("backbone.")] = weight.clone()
        elif found["expert"] is None:
            dense[found["layer"] + found["weight"]] = weight.clone()
        else:
            of_experts.setdefault(found["layer"] + found["weight"], []).append(weight)
    dense |= {name: mean_of(weights).to(weights[0]) for name, weights in of_experts.items()}
    return native_model(model, dense)


def interpolate_experts(model: MoTEModel, to_mean: float | dict[str, float]) -> MoTEModel:
    """Move experts towards their mean, in a straight line.

    Args:
        model: A MoTE with all its experts. It stays as it is.
        to_mean: How far, from 0 (the expert as it is, bit for bit) to 1 (the mean, as from `average_experts`): for all
            experts, or by name, where an expert that is not named stays.

    Returns:
        A new model.

    Raises:
        ValueError: As `average_experts`, and if an expert is unknown or a number is not from 0 to 1.
    """
    require_mergeable(model.config)
    distances = _distances(model.config, to_mean)
    key = weight_of_an_expert(model)
    moved = copy.deepcopy(model)
    groups: dict[str, dict[str, torch.Tensor]] = {}
    for name, weight in moved.state_dict().items():
        found = key.fullmatch(name)
        if found is not None and found["expert"] is not None:
            groups.setdefault(found["layer"] + found["weight"], {})[found["expert"]] = weight
    for weights in groups.values():
        mean = mean_of(list(weights.values()))
        for expert, weight in weights.items():  # what a state dict holds are the model's own tensors
            weight.copy_(torch.lerp(weight.to(mean), mean, distances[expert]))
    return moved


def average(
    src: str,
    out: str | Path,
    *,
    revision: str | None = None,
    max_shard_size: str = "5GB",
    overwrite: bool = False,
    report: Report = lambda line: None,
) -> Path:
    """Write the mean of a MoTE's experts as a complete dense model, which loads without any code of ours.

    Args:
        src: A MoTE: a folder or an id on the Hub.
        out: Folder to write. The prompts, pooling and tokenizer of the MoTE are kept.
        revision: Of a source on the Hub.
        max_shard_size: Of the files with the weights, as in `"5GB"`.
        overwrite: Replace `out` where it holds a MoTE, or a model that this function wrote.
        report: Called with each line of progress.

    Returns:
        The folder.

    Raises:
        FileNotFoundError: If the source is not there, or has no weights.
        FileExistsError: If `out` is in use.
        ValueError: If the source is no MoTE, or its experts cannot be averaged.
    """
    source, out = open_to_change(src, Path(out), revision, overwrite)
    config: MoTEConfig = source.config  # type: ignore[assignment]
    report(f"Averaging the experts {', '.join(config.experts)} …")
    dense = average_experts(load_mote(source))
    write_dense(dense, source, out, "average", {}, "the mean of the experts of", max_shard_size, overwrite)
    report(
        f'Wrote {out}\nAutoModel.from_pretrained("{out}")\nSentenceTransformer("{out}").encode(texts, prompt_name=…)'
    )
    return out


def interpolate(
    src: str,
    out: str | Path,
    *,
    to_mean: float | dict[str, float],
    revision: str | None = None,
    max_shard_size: str = "5GB",
    overwrite: bool = False,
    report: Report = lambda line: None,
) -> Path:
    """Write a MoTE whose experts are nearer to their mean.

    Args:
        src: A MoTE: a folder or an id on the Hub.
        out: Folder to write.
        to_mean: As in `interpolate_experts`.
        revision: Of a source on the Hub.
        max_shard_size: Of the files with the weights, as in `"5GB"`.
        overwrite: Replace `out` where it holds a MoTE, or a model that `average` wrote.
        report: Called with each line of progress.

    Returns:
        The folder.

    Raises:
        FileNotFoundError: If the source is not there, or has no weights.
        FileExistsError: If `out` is in use.
        ValueError: If the source is no MoTE, an expert is unknown, or a number is not from 0 to 1.
    """
    source, out = open_to_change(src, Path(out), revision, overwrite)
    distances = _distances(source.config, to_mean)  # type: ignore[arg-type]
    report("Moving experts towards their mean: " + ", ".join(f"{name} {by:g}" for name, by in distances.items()))
    model = interpolate_experts(load_mote(source), to_mean)
    made = "made by moving the experts towards their mean, of"
    write_mote(model, source, out, "interpolate", {"to_mean": to_mean}, made, max_shard_size, overwrite)
    report(f"Wrote {out}")
    return out


def write_mote(
    model: MoTEModel,
    source: Source,
    out: Path,
    verb: str,
    arguments: dict[str, Any],
    made: str,
    max_shard_size: str = "5GB",
    overwrite: bool = False,
) -> None:
    """Write a MoTE that was made of another one, with what belongs to it, whole or not at all.

    Args:
        model: The new model.
        source: The other one.
        out: Folder to write.
        verb: Of the command line.
        arguments: Of the command, beside source and `out`.
        made: What was done to the source, as in "made by moving the experts towards their mean, of".
        max_shard_size: Of the files with the weights.
        overwrite: As in `interpolate`.
    """
    command = _command(verb, source, out, arguments)
    tokenizer = load_tokenizer(source)
    with Staging(out, overwrite) as folder:
        repository.write_model(model, tokenizer, source, folder, max_shard_size)
        repository.write_sentence_transformer(model, source, folder)
        repository.write_card(
            model, source, folder, out.name, command, made=made, fresh=False, record_file=MERGING_RECORD
        )
        record = repository.describe_change(model, source, command, arguments=arguments)
        repository.write_record(record, folder, MERGING_RECORD)


def write_dense(
    dense: PreTrainedModel,
    source: Source,
    out: Path,
    verb: str,
    arguments: dict[str, Any],
    made: str,
    max_shard_size: str = "5GB",
    overwrite: bool = False,
    *,
    expert: str | None = None,
    convert: Callable[[Path], dict[str, Any]] | None = None,
) -> None:
    """Write a dense model that was made of a MoTE, with what belongs to it, whole or not at all.

    Args:
        dense: The model, of a native class.
        source: The MoTE.
        out: Folder to write.
        verb: Of the command line.
        arguments: Of the command, beside source and `out`.
        made: What the model is, as in "the mean of the experts of".
        max_shard_size: Of the files with the weights.
        overwrite: As in `average`.
        expert: Where the model is one of the experts: its name. The prompts are then `repository.prompts_of_expert`.
        convert: Called with the folder once the model is in it: writes the model into it in a further format, and
            says, for record and card, what came of that.
    """
    config: MoTEConfig = source.config  # type: ignore[assignment]
    command = _command(verb, source, out, arguments)
    tokenizer = load_tokenizer(source)
    with Staging(out, overwrite) as folder:
        repository.write_model(dense, tokenizer, source, folder, max_shard_size)
        repository.write_sentence_transformer(dense, source, folder, config, expert)
        converted = convert(folder) if convert else None
        repository.write_dense_card(dense, config, source, folder, out.name, command, made, expert, converted)
        told = {"arguments": arguments, **({"converted": converted} if converted else {})}
        record = repository.describe_change(dense, source, command, **told)
        repository.write_record(record, folder, MERGING_RECORD)


def open_to_change(
    src: str, out: Path, revision: str | None, overwrite: bool, done: str = "merged"
) -> tuple[Source, Path]:
    """Find a MoTE, and make sure that what is to be `done` to its experts can be, and that `out` is free for it.

    Raises:
        FileNotFoundError: If the source is not there, or has no weights.
        FileExistsError: If `out` is in use.
        ValueError: If the source is no MoTE, is `out` or within it, or as `require_mergeable`.
    """
    source = open_beside(src, out, revision, overwrite)
    require_mergeable(source.config, done)  # type: ignore[arg-type]
    return source, out


def open_beside(src: str, out: Path, revision: str | None, overwrite: bool) -> Source:
    """Find a MoTE, and make sure that `out` is free for something made of it; the errors of `open_to_change`."""
    refuse_occupied(out, overwrite)
    source = open_mote(src, revision)
    refuse_source(out, source.folder)
    return source


def require_mergeable(config: MoTEConfig, done: str = "merged") -> None:
    """Raise `ValueError` where the mean of the experts cannot be taken, or would mean nothing."""
    config.require_experts_of_tasks(done)
    config.require_whole_experts(done)
    require_all_experts(config)


def _distances(config: MoTEConfig, to_mean: float | dict[str, float]) -> dict[str, float]:
    """Tell for each expert how far it is to be moved, 0 to 1."""
    named = to_mean if isinstance(to_mean, dict) else dict.fromkeys(config.experts, to_mean)
    for name, distance in named.items():
        if name not in config.experts:
            raise ValueError(f"Unknown expert {name!r}." + alternatives(name, config.experts))
        if not 0 <= distance <= 1:
            raise ValueError(f"to_mean of {name!r} is {distance}: expected a number from 0 (as it is) to 1 (the mean)")
    return {name: float(named.get(name, 0.0)) for name in config.experts}


def _command(verb: str, source: Source, out: Path, arguments: dict[str, Any]) -> str:
    """Write the command line that makes a model, without the folders of this machine."""
    words = ["mote", verb, source.public_name, "--out", out.resolve().name]
    for name, value in arguments.items():
        values = [f"{key}={number:g}" for key, number in value.items()] if isinstance(value, dict) else [str(value)]
        option = "--weight" if name == "to_mean" else "--" + name.replace("_", "-")
        words += [word for each in values for word in (option, each)]
    return shlex.join(words)
