"""The HTTP service of examples/service under load, compared with calls of `encode` in the same process."""

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from sentence_transformers import SentenceTransformer

from benchmarks.pairing import compare
from benchmarks.performance.benchmark import ROOT, Benchmark, Options
from benchmarks.performance.models import TASKS, milliseconds, real_texts, seconds
from mote import upcycle

FOLDER = ROOT / "examples" / "service"
sys.path.append(str(FOLDER))
import load  # type: ignore[import-not-found]  # noqa: E402 - a file of the example, which is not a package

CLIENTS = 16
BATCH = 32


def measure(options: Options) -> Benchmark:
    """Embed single texts of four tasks, alternating: with `encode`, and with the service in three settings."""
    texts = real_texts(options, 4 if options.quick else 64)
    rows = zip(*(texts[task] for task in TASKS), strict=True)
    requests = [
        {"model": "mote", "task": task, "input": text} for row in rows for task, text in zip(TASKS, row, strict=True)
    ]
    with tempfile.TemporaryDirectory() as temporary:
        folder = upcycle(str(options.checkpoint), Path(temporary) / "mote")
        model = SentenceTransformer(
            str(folder), trust_remote_code=True, device=options.device, model_kwargs={"dtype": options.dtype}
        )
        with serving(folder, options, 1) as single, serving(folder, options, BATCH) as batching:
            ways = {
                "`encode`, sequential calls": lambda: direct(model, requests),
                "service, 1 client": lambda: served(batching, requests, 1),
                f"service, {CLIENTS} clients, batches of 1": lambda: served(single, requests, CLIENTS),
                f"service, {CLIENTS} clients, batches up to {BATCH}": lambda: served(batching, requests, CLIENTS),
            }
            table = _table(ways, len(requests), seconds(options))
            batch = _mean_batch(batching, requests)
    return Benchmark(
        name="service",
        title="The HTTP service under load",
        columns=["client", "texts/s", "speed-up over `encode`", "median, ms", "95th percentile, ms"],
        rows=table,
        notes=[
            f"{len(requests)} requests, each with one real text; the four tasks alternate. Each client keeps its "
            "connection open and sends its next request as soon as it has an answer.",
            "Clients and service share the machine. The service waits up to 5 ms for more texts to fill a batch, "
            f"which only adds latency with a single client. With {CLIENTS} clients, a batch held {batch:.1f} texts on "
            "average.",
        ],
    )


def _table(ways: dict[str, Callable[[], list[float]]], count: int, duration: float) -> list[list[str]]:
    """Compare the first way with each of the others; return rows with speed and latency."""
    times: dict[str, list[float]] = {name: [] for name in ways}

    def timed(name: str) -> Callable[[], None]:
        return lambda: times[name].extend(ways[name]())

    for way in ways.values():  # warm-up
        way()
    first, *others = ways
    found = {name: compare(timed(first), timed(name), seconds=duration) for name in others}
    speed = {first: count / found[others[-1]].baseline}
    speed |= {name: count / comparison.candidate for name, comparison in found.items()}
    ratios = {first: 1.0} | {name: 1 / comparison.ratio for name, comparison in found.items()}
    return [
        [
            name,
            f"{speed[name]:.0f}",
            f"{ratios[name]:.2f}",
            milliseconds(load.percentile(times[name], 0.5)),
            milliseconds(load.percentile(times[name], 0.95)),
        ]
        for name in ways
    ]


def direct(model: SentenceTransformer, requests: list[dict]) -> list[float]:
    """Embed in this process; return the seconds of each call."""
    times = []
    for request in requests:
        started = time.perf_counter()
        model.encode(request["input"], prompt_name=request["task"], show_progress_bar=False)
        times.append(time.perf_counter() - started)
    return times


def served(url: str, requests: list[dict], clients: int) -> list[float]:
    """Embed with the service; return the seconds of each request.

    Raises:
        RuntimeError: If a request fails.
    """
    answers = load.send(url, requests, clients)
    failed = [answer for answer in answers if answer.status != 200]
    if failed:
        raise RuntimeError(f"{len(failed)} of {len(answers)} requests failed, the first: {failed[0]}")
    return [answer.seconds for answer in answers]


def _mean_batch(url: str, requests: list[dict]) -> float:
    """Return the mean number of texts per batch under load."""
    counts = []
    with load.Client(url) as client:
        for before in (True, False):
            found = dict(re.findall(r"^mote_(\w+) (\d+)$", client.get("/metrics"), re.MULTILINE))
            counts.append((int(found["texts_total"]), int(found["batches_total"])))
            if before:
                served(url, requests, CLIENTS)
    (texts, batches), (more_texts, more_batches) = counts
    return (more_texts - texts) / (more_batches - batches)


@contextmanager
def serving(model: Path, options: Options, batch: int) -> Iterator[str]:
    """Run the service in a separate process; yield its URL."""
    dtype = str(options.dtype).removeprefix("torch.")
    command = [sys.executable, str(FOLDER / "serve.py"), str(model), "--port=0", "--name=mote"]
    command += [f"--max-batch-size={batch}", f"--device={options.device}", f"--dtype={dtype}"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            line = process.stdout.readline() if process.stdout is not None else ""
            place = re.search(r"http://[\d.]+:\d+", line)
            if place is None:
                raise RuntimeError(f"the service did not start: {line}")
            load.wait(place[0])
            yield place[0]
        finally:
            process.terminate()
