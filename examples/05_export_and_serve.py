"""Export one expert as a plain dense model, and serve all experts over HTTP.

    pip install -e . -r examples/service/requirements.txt
    python examples/05_export_and_serve.py [--model FOLDER] [--out FOLDER]

The exported expert loads wherever the source model does, without this package. The service speaks OpenAI's protocol
with one additional field, `task`. Takes less than a minute on a CPU.
"""

import argparse
import contextlib
import json
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from sentence_transformers import SentenceTransformer
from transformers.utils import logging

import mote
import mote.experts

HERE = Path(__file__).parent
TEXTS = ["how do whales get oxygen", "medicine for a fever"]


@contextlib.contextmanager
def service(folder: Path) -> Iterator[str]:
    """Run examples/service/serve.py; yield its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, str(HERE / "service" / "serve.py"), str(folder), "--port", str(port)]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}"
    try:
        while process.poll() is None:
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{address}/health", timeout=5):
                break
            time.sleep(0.2)
        else:
            raise RuntimeError(f"The service ended with status {process.returncode}: {' '.join(command)}")
        yield address
    finally:
        process.terminate()
        process.wait()


def request(address: str, **fields: Any) -> np.ndarray:
    """Request embeddings, as OpenAI's client would."""
    headers = {"Content-Type": "application/json"}
    post = urllib.request.Request(f"{address}/v1/embeddings", json.dumps(fields).encode(), headers)
    with urllib.request.urlopen(post, timeout=60) as answer:
        return np.array([row["embedding"] for row in json.load(answer)["data"]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=HERE / "small-mote", help="MoTE")
    parser.add_argument("--out", help="folder for the results (default: they are not kept)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        out = Path(options.out or temporary)
        folder = options.model
        model = SentenceTransformer(str(folder), trust_remote_code=True)
        expected = model.encode(TEXTS, task="topic")

        exported = mote.transform(folder, out / "exported", mote.experts.export, "topic")
        dense = SentenceTransformer(str(exported))  # no trust_remote_code; the instruction is the default prompt
        print("exported:", type(dense[0].auto_model).__name__, dense.encode(TEXTS).shape)
        print(f"largest difference from the MoTE: {abs(dense.encode(TEXTS) - expected).max():.1e}")

        with service(folder) as address:
            served = request(address, model=folder.name, input=TEXTS, task="topic")
        print("\nserved:  ", served.shape)
        print(f"largest difference from the MoTE: {abs(served - expected).max():.1e}")


if __name__ == "__main__":
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    main()
