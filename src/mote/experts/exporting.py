"""One expert of a MoTE as a plain dense model, which anything that loads the backbone's architecture loads."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from configuration_mote import MoTEConfig
from mote.checkpoints.reading import load_mote
from mote.experts.merging import open_beside, write_dense
from mote.inference import runtimes

Report = Callable[[str], None]


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
    config.require_experts_of_tasks("exported")
    config.require_expert(expert)
    arguments: dict[str, Any] = {"expert": expert}
    convert = None
    if backend != "torch":
        arguments |= {"backend": backend} | ({"quantize": quantize} if quantize else {})
        convert = partial(runtimes.convert, backend=backend, quantize=quantize, texts=for_runtime, report=report)
    report(f"Taking out the expert {expert} …")
    model: Any = load_mote(source, experts=[expert])
    dense = model.export_expert(expert)
    made = f"the expert `{expert}` of"
    write_dense(
        dense, source, out, "export", arguments, made, max_shard_size, overwrite, expert=expert, convert=convert
    )
    report(f'Wrote {out}\nAutoModel.from_pretrained("{out}")\nSentenceTransformer("{out}").encode(texts)')
    if backend != "torch":
        report(f'mote.load_exported("{out}", backend="{backend}").encode(texts)')
    return out
