"""Cost of `mote embed`: its speed compared with plain `encode`, and its memory over a corpus ten times larger.

    python -m benchmarks.embed speed [--model MODEL] [--data FILE] [--texts N] [--seconds N]
    python -m benchmarks.embed memory [--model MODEL] [--data FILE] [--texts N]

`speed` embeds the first N texts, alternating with a call of `encode` on the same model. `encode` has its texts in
memory and writes nothing; `mote embed` counts, reads, checks and writes. `memory` prints the peak memory of a separate
process for N and for 10 N texts, in shards of N / 4.
"""

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
from itertools import cycle, islice
from pathlib import Path

import pyarrow
from pyarrow import parquet

from benchmarks.pairing import compare

ROOT = Path(__file__).parents[1]
SHARED = ROOT.parent / "shared"
MODELS = (SHARED / "checkpoints" / "all-MiniLM-L6-v2", ROOT / "examples" / "small-encoder")
CORPORA = (
    SHARED / "data" / "beir" / "nfcorpus" / "corpus.jsonl.gz",
    ROOT / "examples" / "data" / "beir" / "arxiv" / "corpus.jsonl.gz",
)


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("speed", "memory"))
    parser.add_argument("--model", default=str(next(filter(Path.exists, MODELS))))
    parser.add_argument("--data", default=str(next(filter(Path.exists, CORPORA))))
    parser.add_argument("--texts", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=60, help="duration of the speed comparison, at least 7 pairs")
    options = parser.parse_args()
    {"speed": speed, "memory": memory}[options.what](options)


def speed(options: argparse.Namespace) -> None:
    """Print texts per second and their ratio."""
    import mote
    from mote.corpora.encoding import Model

    with tempfile.TemporaryDirectory() as folder:
        texts = _write(Path(folder) / "corpus.parquet", options.data, options.texts)
        encoder = Model(options.model).load()
        Model.load = lambda *_: encoder  # type: ignore[method-assign]  # both use the loaded model

        def embed() -> None:
            with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stderr(nowhere):  # the progress bar
                mote.embed_corpus(options.model, Path(folder) / "corpus.parquet", Path(folder) / "out", overwrite=True)

        found = compare(lambda: encoder.encode(texts, show_progress_bar=False), embed, seconds=options.seconds)
    rates = ", ".join(
        f"{name} {len(texts) / seconds:.1f}"
        for name, seconds in (("encode", found.baseline), ("embed", found.candidate))
    )
    print(f"texts per second: {rates}; speed of embed / encode, paired: {1 / found.ratio:.3f} (target: 1.0)")


def memory(options: argparse.Namespace) -> None:
    """Print the peak memory for N and 10 N texts."""
    peaks = []
    for times in (1, 10):
        with tempfile.TemporaryDirectory() as folder:
            count = times * options.texts
            _write(Path(folder) / "corpus.parquet", options.data, count)
            command = [sys.executable, "-m", "mote", "embed", options.model, f"{folder}/corpus.parquet"]
            command += ["--out", f"{folder}/out", "--shard-size", str(max(1, options.texts // 4))]
            # otherwise glibc keeps part of the freed activations, more in the first minutes than later
            environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"}
            process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
            _, status, usage = os.wait4(process.pid, 0)
            if status:
                raise SystemExit(f"{' '.join(command)} failed")
        peaks.append(usage.ru_maxrss / 1024)
        print(f"{count:,} texts: peak {peaks[-1]:,.0f} MiB")
    print(f"ratio: {peaks[1] / peaks[0]:.3f}")


def _write(path: Path, data: str, count: int) -> list[str]:
    """Write the first texts of a corpus, repeating them if there are fewer."""
    from mote.corpora.source import find_corpus

    texts = [document.text for document in islice(find_corpus([data]).counted().read(), count)]
    texts = list(islice(cycle(texts), count))
    parquet.write_table(pyarrow.table({"text": texts}), path, row_group_size=1000)
    return texts


if __name__ == "__main__":
    main()
