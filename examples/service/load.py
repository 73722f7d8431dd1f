"""Put an embedding service under load, and report how fast it answers.

    python examples/service/load.py http://127.0.0.1:8000 [--requests 1000] [--clients 16] [--texts 1]

Each client sends its requests one after another, each with a random task. Needs only Python's standard library.
"""

import argparse
import http.client
import json
import random
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

WORDS = ["the", "of", "whale", "compiler", "verse", "sugar", "protein", "window", "rain", "court", "letter", "engine"]


@dataclass(frozen=True)
class Answer:
    """Answer to a request.

    Attributes:
        request: Body of the request.
        status: HTTP status; 0 if the connection failed.
        body: Body of the answer; the reason if the connection failed.
        seconds: Time until the answer.
    """

    request: Any
    status: int
    body: Any
    seconds: float


class Client:
    """One connection to a service, kept until the end of the block."""

    def __init__(self, url: str, timeout: float = 60.0) -> None:
        """Store the address; the connection is opened when it is needed."""
        place = urlsplit(url)
        self.connection = http.client.HTTPConnection(place.hostname or "", place.port or 80, timeout=timeout)

    def __enter__(self) -> "Client":
        """Return the client."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the connection."""
        self.connection.close()

    def get(self, path: str) -> Any:
        """Read JSON, or text if it is not JSON."""
        return self._send("GET", path)[1]

    def embed(self, request: Any) -> Answer:
        """Request embeddings; a failure is returned as an answer, too."""
        started = time.perf_counter()
        try:
            status, body = self._send("POST", "/v1/embeddings", json.dumps(request))
        except (OSError, http.client.HTTPException) as error:
            self.connection.close()
            status, body = 0, f"{type(error).__name__}: {error}"
        return Answer(request, status, body, time.perf_counter() - started)

    def _send(self, method: str, path: str, body: str | None = None) -> tuple[int, Any]:
        self.connection.request(method, path, body, {"Content-Type": "application/json"} if body else {})
        response = self.connection.getresponse()
        content = response.read().decode()
        is_json = response.headers.get_content_type() == "application/json"
        return response.status, json.loads(content) if is_json else content


def wait(url: str, seconds: float = 60.0) -> None:
    """Wait until a service answers.

    Raises:
        TimeoutError: If it does not answer in time.
    """
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            with Client(url, timeout=5) as client:
                if client.get("/health") == {"status": "ok"}:
                    return
        except (OSError, http.client.HTTPException):
            time.sleep(0.05)
    raise TimeoutError(f"nothing answers at {url}")


def send(url: str, requests: Sequence[Any], clients: int) -> list[Answer]:
    """Send requests with several clients at once, distributed in turn; return the answers in order of the requests."""

    def run(number: int) -> list[Answer]:
        with Client(url) as client:
            return [client.embed(request) for request in requests[number::clients]]

    answers: list[Answer | None] = [None] * len(requests)
    with ThreadPoolExecutor(clients) as pool:
        for number, some in enumerate(pool.map(run, range(clients))):
            answers[number::clients] = some
    return [answer for answer in answers if answer is not None]


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value below which a share of the values lies."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url", help="URL of the service, without a path")
    parser.add_argument("--requests", type=int, default=1000, help="number of requests")
    parser.add_argument("--clients", type=int, default=16, help="number of concurrent requests")
    parser.add_argument("--texts", type=int, default=1, help="texts per request")
    parser.add_argument("--words", type=int, default=20, help="maximum number of words per text")
    options = parser.parse_args()
    wait(options.url, seconds=10)
    with Client(options.url) as client:
        model = client.get("/v1/models")["data"][0]
    tasks = [task["task"] for task in model["tasks"]]
    chance = random.Random(0)

    def text() -> str:
        return " ".join(chance.choices(WORDS, k=chance.randint(1, options.words)))

    requests = [
        {"model": model["id"], "task": chance.choice(tasks), "input": [text() for _ in range(options.texts)]}
        for _ in range(options.requests)
    ]
    started = time.perf_counter()
    answers = send(options.url, requests, options.clients)
    seconds = time.perf_counter() - started
    times = [1000 * answer.seconds for answer in answers if answer.status == 200]
    failed = [answer for answer in answers if answer.status != 200]
    print(f"{len(times)} requests answered in {seconds:.1f} s: {len(times) / seconds:.0f} requests/s", end=", ")
    print(f"{len(times) * options.texts / seconds:.0f} texts/s")
    if times:
        print(f"latency: median {percentile(times, 0.5):.1f} ms, 95 % below {percentile(times, 0.95):.1f} ms")
    print(f"{len(failed)} errors" + (f", the first: {failed[0].status} {failed[0].body}" if failed else ""))


if __name__ == "__main__":
    main()
