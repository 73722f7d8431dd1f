"""The verbs on disk, until `mote.transform` takes their place."""

import shlex
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from configuration_mote import MoTEConfig
from modeling_mote import MoTEModel
from mote import experts as in_memory
from mote.checkpoints import writing as repository
from mote.checkpoints.reading import Source, load_mote, load_tokenizer, open_mote
from mote.checkpoints.staging import Staging, refuse_occupied, refuse_source
from mote.checkpoints.writing import MERGING_RECORD
from mote.experts.merging import _interpolation_weights, require_mergeable
from mote.inference import runtimes

Report = Callable[[str], None]


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
    dense = in_memory.average(load_mote(source))
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
    distances = _interpolation_weights(source.config, to_mean)  # type: ignore[arg-type]
    report("Moving experts towards their mean: " + ", ".join(f"{name} {by:g}" for name, by in distances.items()))
    model = in_memory.interpolate(load_mote(source), to_mean)
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
    require_mergeable(source.config)  # type: ignore[arg-type]
    return source, out


def open_beside(src: str, out: Path, revision: str | None, overwrite: bool) -> Source:
    """Find a MoTE, and make sure that `out` is free for something made of it; the errors of `open_to_change`."""
    refuse_occupied(out, overwrite)
    source = open_mote(src, revision)
    refuse_source(out, source.folder)
    return source


def _command(verb: str, source: Source, out: Path, arguments: dict[str, Any]) -> str:
    """Write the command line that makes a model, without the folders of this machine."""
    words = ["mote", verb, source.public_name, "--out", out.resolve().name]
    for name, value in arguments.items():
        values = [f"{key}={number:g}" for key, number in value.items()] if isinstance(value, dict) else [str(value)]
        option = "--weight" if name == "to_mean" else "--" + name.replace("_", "-")
        words += [word for each in values for word in (option, each)]
    return shlex.join(words)


def compress(
    src: str,
    out: str | Path,
    *,
    rank: int | None = None,
    bits: int | None = None,
    revision: str | None = None,
    max_shard_size: str = "5GB",
    overwrite: bool = False,
    report: Report = lambda line: None,
) -> Path:
    """Write a MoTE with compressed experts, which loads wherever a MoTE loads.

    Args:
        src: A MoTE: a folder or an id on the Hub.
        out: Folder to write.
        rank: As in `compress_experts`.
        bits: As in `compress_experts`.
        revision: Of a source on the Hub.
        max_shard_size: Of the files with the weights, as in `"5GB"`.
        overwrite: Replace `out` where it holds a MoTE, or a model that was made of one.
        report: Called with each line of progress.

    Returns:
        The folder.

    Raises:
        FileNotFoundError: If the source is not there, or has no weights.
        FileExistsError: If `out` is in use.
        ValueError: If the source is no MoTE, or as `compress_experts`.
    """
    source, out = open_to_change(src, Path(out), revision, overwrite, "compressed")
    compressed = in_memory.compress(load_mote(source), rank=rank, bits=bits)
    compression = compressed.config.compression
    arguments = {"rank": rank} if rank is not None else {"bits": bits}
    made = f"made by compressing the experts ({compression}) of"
    write_mote(compressed, source, out, "compress", arguments, made, max_shard_size, overwrite)
    report(f"Wrote {out}")
    return out


def export(
    src: str,
    out: str | Path,
    *,
    expert: str,
    backend: str = "torch",
    quantize: str | None = None,
    texts: str | Path | None = None,
    revision: str | None = None,
    max_shard_size: str = "5GB",
    overwrite: bool = False,
    report: Report = lambda line: None,
) -> Path:
    """Write one expert as a complete dense model of the backbone's own architecture, which loads without code of ours.

    Its embeddings equal those of the MoTE, bit for bit: `encode(texts)` those of `encode(texts, prompt_name=expert)`.

    Args:
        src: A MoTE: a folder or an id on the Hub. The weights of the expert alone are loaded.
        out: Folder to write. Pooling, tokenizer and the prompts of the tasks that the expert serves are kept.
        expert: Its name.
        backend: `"torch"`, or `"onnx"` or `"openvino"` to write the model also in that runtime's format, for CPUs:
            see `load_exported`.
        quantize: Of the runtime's model: `"int8"`, or None for float32.
        texts: A file with one text per line, by which OpenVINO's int8 is calibrated and the result compared with the
            model in torch. Default: 128 texts that come with MoTE.
        revision: Of a source on the Hub.
        max_shard_size: Of the files with the weights, as in `"5GB"`.
        overwrite: Replace `out` where it holds a MoTE, or a dense model that was made of one.
        report: Called with each line of progress.

    Returns:
        The folder.

    Raises:
        FileNotFoundError: If the source or the texts are not there, or the source has no weights.
        FileExistsError: If `out` is in use.
        OSError: If the runtime is not installed, or the disk is full.
        ValueError: If the source is no MoTE or a token router, the expert is unknown, the runtime cannot run the
            architecture, or does not give the embeddings that it should.
    """
    out = Path(out)
    for_runtime = runtimes.read_texts(texts)
    if texts is not None and backend == "torch":
        raise ValueError("texts are for the backends 'onnx' and 'openvino': choose one, as in `--backend openvino`")
    runtimes.require(backend, quantize)
    source = open_beside(src, out, revision, overwrite)
    config: MoTEConfig = source.config  # type: ignore[assignment]
    config.require_expert(expert)
    arguments: dict[str, Any] = {"expert": expert}
    convert = None
    if backend != "torch":
        arguments |= {"backend": backend} | ({"quantize": quantize} if quantize else {})
        convert = partial(runtimes.convert, backend=backend, quantize=quantize, texts=for_runtime, report=report)
    report(f"Taking out the expert {expert} …")
    model: Any = load_mote(source, experts=[expert])
    dense = in_memory.export(model, expert)
    made = f"the expert `{expert}` of"
    write_dense(
        dense, source, out, "export", arguments, made, max_shard_size, overwrite, expert=expert, convert=convert
    )
    report(f'Wrote {out}\nAutoModel.from_pretrained("{out}")\nSentenceTransformer("{out}").encode(texts)')
    if backend != "torch":
        report(f'mote.load_exported("{out}", backend="{backend}").encode(texts)')
    return out
