"""The command `mote embed`."""

from typing import Annotated, Literal

import typer

import mote
from mote.cli import options


def embed(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=f"Any Sentence-Transformers model: {options.SRC}.")],
    files: Annotated[
        list[str],
        typer.Argument(metavar="FILE...", help=".jsonl, .jsonl.gz, .parquet; patterns, folders, hub:user/name."),
    ],
    out: Annotated[str, typer.Option(metavar="DIR", help="Output folder; one that is not finished is resumed.")],
    task: Annotated[
        str | None, typer.Option(metavar="NAME", help="Task: the name of a prompt. Default: the model's default.")
    ] = None,
    prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="Text in front of all texts.")] = None,
    task_column: Annotated[str | None, typer.Option(metavar="COL", help="Column with the task of each text.")] = None,
    text_columns: Annotated[
        list[str] | None,
        typer.Option(
            "--text-column",
            metavar="COL",
            help="Column of texts; repeatable, joined by a space. Default: by its usual name, with `title` in front.",
        ),
    ] = None,
    id_column: Annotated[
        str | None, typer.Option(metavar="COL", help="Column of ids. Default: _id or id, else the row's number.")
    ] = None,
    split: Annotated[str, typer.Option(metavar="NAME", help="Split of folders and datasets on the Hub.")] = "train",
    subset: Annotated[str | None, typer.Option(metavar="NAME", help="Configuration of a dataset on the Hub.")] = None,
    dtype: Annotated[
        Literal["float32", "float16", "int8"], typer.Option(help="Data type of the embeddings.")
    ] = "float32",
    dimensions: Annotated[int | None, typer.Option(metavar="N", min=1, help="Dimensions kept. Default: all.")] = None,
    batch_size: options.BatchSize = 32,
    shard_size: Annotated[int, typer.Option(metavar="N", min=1, help="Texts in a file; bounds the memory.")] = 50_000,
    index: Annotated[
        str | None, typer.Option(metavar="FACTORY", help="Also write a FAISS index: Flat, HNSW32, IVF1024,Flat …")
    ] = None,
    device: Annotated[
        list[str] | None,
        typer.Option(metavar="D", help="cpu, cuda:0 …; repeatable, a process each. Default: the best available."),
    ] = None,
    processes: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Processes on the CPU; with Ray, workers.")
    ] = None,
    engine: Annotated[Literal["local", "ray"], typer.Option(help="This machine, or a cluster by Ray Data.")] = "local",
    address: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Ray cluster to join. Default: a local one is started.")
    ] = None,
    backend: Annotated[
        Literal["torch", "onnx", "openvino"], typer.Option(help="Runtime of a model from `mote export`.")
    ] = "torch",
    revision: options.Revision = None,
    trust_remote_code: options.TrustRemoteCode = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace other embeddings in DIR.")] = False,
) -> None:
    """Embed a corpus, into sharded parquet files.

    The same command resumes one that was killed.
    """
    settings = {**locals(), "text_columns": text_columns or ()}
    from transformers.utils import logging

    with options.extra("corpora"):
        run = mote.embed_corpus
    logging.disable_progress_bar()
    run(**settings)
