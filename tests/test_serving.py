"""`mote serve`: a real process on loopback, under load, with good and bad requests."""

import base64
import functools
import http.client
import itertools
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from helpers.checkpoints import dense_checkpoint, trusted
from helpers.families import assert_near
from helpers.paths import EXAMPLE_DATA
from helpers.rows import read_rows
from sentence_transformers import SentenceTransformer, SparseEncoder

from mote import configure, serving, upcycle
from mote.cli import main
from mote.inference.loading import weight_ids

TASKS = ("classification", "clustering", "search_query", "search_document", "sts", "query")
NAME = "small-mote"


class Answer(NamedTuple):
    request: Any
    status: int
    body: Any


class Client:
    """A connection to a service, kept until the end of the block."""

    def __init__(self, port: int, **headers: str) -> None:
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        self.headers = {"Content-Type": "application/json", **headers}

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.connection.close()

    def send(self, method: str, path: str, body: Any = None, **settings: Any) -> Answer:
        self.connection.request(method, path, body, self.headers, **settings)
        response = self.connection.getresponse()
        content = response.read().decode()
        is_json = response.headers.get_content_type() == "application/json"
        return Answer(body, response.status, json.loads(content) if is_json else content)

    def embed(self, request: Any) -> Answer:
        return self.send("POST", "/v1/embeddings", json.dumps(request))._replace(request=request)


def send(port: int, requests: Sequence[Any], clients: int) -> list[Answer]:
    """Send requests with several clients at once; return the answers in order of the requests."""

    def run(number: int) -> list[Answer]:
        with Client(port) as client:
            return [client.embed(request) for request in requests[number::clients]]

    with ThreadPoolExecutor(clients) as pool:
        parts = [iter(part) for part in pool.map(run, range(clients))]
    return [next(parts[index % clients]) for index in range(len(requests))]


class Server:
    """A running service, in a session of its own, so that whatever it leaves behind can be found."""

    def __init__(self, model: Path, *options: object, **variables: str) -> None:
        words = [sys.executable, "-m", "mote", "serve", *map(str, (model, "--port", 0, *options))]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **variables}
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115  # a pipe could fill up
        pipe: Any = {"stdout": subprocess.PIPE, "stderr": self.log, "text": True}
        self.process: Any = subprocess.Popen(words, env=environment, start_new_session=True, **pipe)
        place = None
        while place is None:
            line = self.process.stdout.readline()
            assert line, "the service did not start"
            place = re.search(r"http://127\.0\.0\.1:(\d+)", line)
        self.port, self.url = int(place[1]), place[0]

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout=30)

    def get(self, path: str) -> Any:
        with Client(self.port) as client:
            return client.send("GET", path).body

    def embed(self, request: Any) -> Any:
        with Client(self.port) as client:
            return client.embed(request)

    def metric(self, name: str) -> int:
        return int(re.search(rf"^mote_{name} (\d+)$", self.get("/metrics"), re.MULTILINE)[1])

    def __enter__(self) -> "Server":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()
        self.log.close()


def assert_nothing_is_left(server: Server) -> None:
    """The port is free, and no process of the session is there."""
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", server.port), timeout=5)
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", server.port))
    with pytest.raises(ProcessLookupError):
        os.killpg(server.process.pid, 0)


@pytest.fixture(scope="module")
def server(trained_folder: Path) -> Iterator[Server]:
    with Server(trained_folder, "--one-pass") as running:
        yield running
        assert running.process.poll() is None, "the service ended during the tests"
        assert running.stop(signal.SIGINT) == 0
        assert_nothing_is_left(running)


@pytest.fixture(scope="module")
def texts() -> list[str]:
    """Real texts, a few words to some hundreds of tokens long."""
    rows = read_rows(EXAMPLE_DATA / "beir" / "arxiv" / "corpus.jsonl.gz")[:24]
    return [text for row in rows for text in (row["title"], row["text"]) if text]


class Reference:
    def __init__(self, model: SentenceTransformer) -> None:
        self.model = model
        self.encode = functools.cache(lambda text, task: model.encode(text, prompt_name=task))

    def __call__(self, text: str, task: str) -> np.ndarray:
        return self.encode(text, task)

    def tokens(self, text: str, task: str) -> int:
        return len(self.model.tokenizer(self.model.prompts[task] + text, truncation=True)["input_ids"])

    def distance_to_others(self, vector: np.ndarray, text: str, task: str) -> float:
        """How near the embedding comes to that of any expert that is not the task's."""
        tasks = self.model[0].config.tasks
        others = [other for other in set(tasks.values()) if other != tasks[task]]
        return min(abs(vector - self(text, other)).max() for other in others)


@pytest.fixture(scope="module")
def reference(model: SentenceTransformer) -> Reference:
    return Reference(model)


def vectors_of(answer: Any) -> np.ndarray:
    values = [row["embedding"] for row in answer.body["data"]]
    if answer.request.get("encoding_format") == "base64":
        return np.stack([np.frombuffer(base64.b64decode(value), dtype="<f4") for value in values])
    return np.array(values, dtype=np.float32)


def check(answer: Any, reference: Reference) -> None:
    assert answer.status == 200, answer
    request, task = answer.request, answer.request["task"]
    texts = [request["input"]] if isinstance(request["input"], str) else request["input"]
    assert answer.body["object"] == "list"
    assert answer.body["model"] == NAME
    assert [row["index"] for row in answer.body["data"]] == list(range(len(texts)))
    tokens = sum(reference.tokens(text, task) for text in texts)
    assert answer.body["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}
    for vector, text in zip(vectors_of(answer), texts, strict=True):
        assert abs(vector - reference(text, task)).max() < 1e-5
        assert reference.distance_to_others(vector, text, task) > 1e-2


def assert_as_encoded(embedder: Any, pairs: list[tuple[str, Any]]) -> None:
    """Texts of several tasks in one batch get what `encode` gives to each alone."""
    results = embedder.embed([embedder.item(*pair) for pair in pairs])
    for result, (text, task) in zip(results, pairs, strict=True):
        assert_near(result.vector, embedder.model.encode(text, prompt_name=task), 1e-5)


def good_request(chance: random.Random, texts: list[str]) -> dict[str, Any]:
    several = chance.choices(texts, k=chance.choice((1, 1, 2, 5)))
    return {
        "model": NAME,
        "task": chance.choice(TASKS),
        "input": chance.choice(several) if chance.random() < 0.5 else several,
        "encoding_format": chance.choice(("float", "base64")),
        "user": "a test",
    }


# What is sent instead of the good fields; status; what the error is about; part of its message
BAD = [
    ({"task": "serch_query"}, 400, "task", "Did you mean 'search_query'?"),
    ({"task": 3}, 400, "task", "string"),
    ({"input": []}, 400, "input", "at least 1 item"),
    ({"input": ["a", ""]}, 400, "input", "input.1: String should have at least 1 character"),
    ({"input": None}, 400, "input", "valid string"),
    ({"input": [[1, 2], [3]]}, 400, "input", "check_embedding_ctx_length=False"),
    ({"input": ["a", "\ud800"]}, 400, None, "The body: Invalid JSON: unexpected end of hex escape"),
    ({"input": ["a"] * 2049}, 400, "input", "at most 2048 items"),
    ({"input": ["a", "b" * 100_001]}, 400, "input", "input.1: String should have at most 100000 characters"),
    ({"model": "text-embedding-3-small"}, 404, "model", f"only '{NAME}', or with a task '{NAME}:TASK'"),
    ({"model": f"{NAME}:serch_query", "task": None}, 400, "task", "Did you mean 'search_query'?"),
    ({"model": f"{NAME}:search_query"}, 400, "task", "task is 'sts', but the model's name ends with 'search_query'"),
    ({"encoding_format": "int8"}, 400, "encoding_format", "'float' or 'base64'"),
    ({"dimensions": 0}, 400, "dimensions", "greater than or equal to 1"),
    ({"dimensions": 257}, 400, "dimensions", "less than or equal to 256"),
    ({"tasks": "sts"}, 400, "tasks", "Did you mean 'task'?"),
]


def bad_request(change: dict[str, Any]) -> dict[str, Any]:
    return {"model": NAME, "task": "sts", "input": "a text", **change}


def check_error(answer: Any, status: int, param: str | None, message: str) -> None:
    assert answer.status == status, answer
    error = answer.body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert message in error["message"]


def test_other_bodies_and_paths(server: Server) -> None:
    check_error(server.embed([1]), 400, None, "The body")
    for method, path, body, status, message in (
        ("POST", "/v1/embeddings", '{"input": "a', 400, ""),
        ("POST", "/v1/embeddings", b'{"input": "\xff"}', 400, ""),
        ("POST", "/v1/embeddings", "[" * 100_000, 400, ""),
        ("GET", "/v1/embeddings", None, 405, "there are POST"),
        ("GET", "/v1/completions", None, 404, "there are POST"),
    ):
        with Client(server.port) as client:
            answer = client.send(method, path, body)
        error = answer.body["error"]
        assert (answer.status, error["type"]) == (status, "invalid_request_error")
        assert message in error["message"]


def test_right_experts_under_load_with_bad_requests_in_between(
    server: Server, reference: Reference, texts: list[str]
) -> None:
    chance = random.Random(0)
    before = {name: server.metric(name) for name in ("texts_total", "batches_total", "mixed_batches_total")}
    bad = itertools.cycle(BAD)
    expected = [next(bad) if chance.random() < 0.15 else None for _ in range(400)]
    requests = [bad_request(error[0]) if error else good_request(chance, texts) for error in expected]
    answers = send(server.port, requests, clients=12)
    assert len(answers) == len(requests)
    embedded = 0
    for answer, error in zip(answers, expected, strict=True):
        if error is None:
            check(answer, reference)
            embedded += len(answer.body["data"])
        else:
            check_error(answer, *error[1:])
    after = {name: server.metric(name) - before[name] for name in before}
    assert after["texts_total"] == embedded
    assert after["batches_total"] < embedded / 2
    assert after["mixed_batches_total"] > 5
    assert server.metric("waiting_texts") == 0


def test_without_a_task_the_rules_of_the_model_apply(server: Server, reference: Reference) -> None:
    tasks = ("search_query", "clustering")
    answer = server.embed({"model": NAME, "input": [*(f"{task}: a whale" for task in tasks), "a whale"]})
    expected = [*(reference("a whale", task) for task in tasks), reference.model.encode("a whale", task="document")]
    for vector, right in zip(vectors_of(answer), expected, strict=True):
        assert abs(vector - right).max() < 1e-5


def test_fewer_dimensions_are_of_length_one_again(server: Server, model: SentenceTransformer) -> None:
    request = {"model": NAME, "task": "sts", "input": ["a whale", "a compiler"], "dimensions": 7}
    expected = model.encode(request["input"], prompt_name="sts", truncate_dim=7, normalize_embeddings=True)
    assert abs(vectors_of(server.embed(request)) - expected).max() < 1e-5


def test_the_client_of_openai(server: Server, trained_folder: Path, reference: Reference) -> None:
    openai = pytest.importorskip("openai")
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        config = reference.model[0].config
        assert [entry.id for entry in client.models.list()] == [NAME, *(f"{NAME}:{task}" for task in config.tasks)]
        for ways in ({"model": NAME, "extra_body": {"task": "search_query"}}, {"model": f"{NAME}:search_query"}):
            answer = client.embeddings.create(input=["a whale"], **ways)
            assert abs(np.array(answer.data[0].embedding) - reference("a whale", "search_query")).max() < 1e-5
            assert answer.usage.prompt_tokens > 0
        ids = weight_ids(trained_folder)["experts"]
        assert {*ids} == {*config.experts}
        tasks = [
            {"task": task, "instruction": config.instruction_of(task), "expert": expert, "weights": ids[expert]}
            for task, expert in config.tasks.items()
        ]
        listed, *named = server.get("/v1/models")["data"]
        assert listed["tasks"] == tasks
        assert all(entry.items() >= task.items() for entry, task in zip(named, tasks, strict=True))
        with pytest.raises(openai.BadRequestError, match="Did you mean 'search_query'") as raised:
            client.embeddings.create(model=NAME, input="a whale", extra_body={"task": "serch_query"})
        assert raised.value.param == "task"


def test_limits_then_a_clean_end_with_requests_under_way(
    trained_folder: Path, reference: Reference, tmp_path: Path
) -> None:
    strict = configure(trained_folder, tmp_path / "strict", default_task="none")
    limits = ("--max-body", 4000, "--max-inputs", 40, "--max-waiting", 60, "--name", NAME, "--no-route-by-text")
    # a batch waits long for more, so that requests are under way when they are to be
    with Server(strict, "--max-batch-size", 64, "--batch-timeout", 1500, "--grace", 5, *limits) as server:
        stalled = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(20)]
        for connection in stalled:  # half a request, and nothing more
            connection.sendall(_head(100) + b'{"input": "a')
        answer = server.embed({"model": NAME, "input": "clustering: a whale"})
        remedy = "the model has no default_task. Send `task`. Available: 'classification', 'clustering'"
        check_error(answer, 400, "task", remedy)
        assert answer.body["error"]["code"] == "missing_task"
        _check_body_limit(server)
        _check_that_who_leaves_costs_nothing(server)
        requests = [{"model": NAME, "task": task, "input": ["a whale"] * 30} for task in TASKS[:2]]
        pool = ThreadPoolExecutor(len(requests))
        answers = [pool.submit(server.embed, request) for request in requests]
        _wait_for(lambda: server.metric("waiting_texts") == 60)
        refused = server.embed(bad_request({}))
        assert refused.status == 503
        error = {"message": "Too many texts are waiting: try again in a moment", "type": "server_error"}
        assert refused.body["error"] == {**error, "param": None, "code": "overloaded"}
        assert server.stop(signal.SIGTERM) == 0
        for answer in answers:  # open requests have been answered
            check(answer.result(timeout=10), reference)
        for connection in stalled:
            connection.close()
        assert_nothing_is_left(server)


def _check_body_limit(server: Server) -> None:
    """Too long, by the length that is announced, and by what comes in pieces."""
    body = json.dumps(bad_request({"input": "a " * 4000})).encode()
    for announced in (True, False):
        with Client(server.port) as client:
            sent = body if announced else iter([body[:3000], body[3000:]])
            answer = client.send("POST", "/v1/embeddings", sent, encode_chunked=not announced)
        assert answer.status == 413
        assert "4000 bytes" in answer.body["error"]["message"]


def _check_that_who_leaves_costs_nothing(server: Server) -> None:
    body = json.dumps(bad_request({"input": ["a whale"] * 7})).encode()
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(_head(len(body)) + body)
        _wait_for(lambda: server.metric("waiting_texts") == 7)
    _wait_for(lambda: server.metric("waiting_texts") == 0)
    assert server.embed(bad_request({})).status == 200
    assert server.metric("texts_total") == 1


def _wait_for(condition: Callable[[], bool], seconds: float = 10) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come to that"
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["{dense}"], "is not a MoTE but a 'bert'"),
        (["{mote}/nothing"], "is neither a folder nor"),
        (["{mote}", "--port", "0", "--device", "cuda:99"], "does not load in Sentence-Transformers"),
        (["{mote}", "--batch-timeout", "0"], "--batch-timeout: Input should be greater than 0"),
        (["{mote}", "--port", "70000"], "--port: Input should be less than 65536"),
        (["{mote}", "--api-key", ""], "--api-key: String should have at least 1 character"),
        (["{mote}", "--expert", "sts"], "Unknown expert 'sts'"),
        (["{mote}", "--port", "{port}"], "Address already in use"),
    ],
)
def test_invalid_options(options: list[str], message: str, trained_folder: Path, dense: Path, capsys: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        places = {"dense": dense, "mote": trained_folder, "port": taken.getsockname()[1]}
        assert main(["serve", *(option.format(**places) for option in options)]) in (1, 2)
    assert message in capsys.readouterr().err


def test_a_key_and_some_experts(trained_folder: Path) -> None:
    """The key is in the environment; texts longer than the model reads are counted, and said once."""
    with Server(trained_folder, "--expert", "clustering", "--name", NAME, MOTE_API_KEY="a key") as server:
        for headers in ({}, {"Authorization": "Bearer a kez"}, {"Authorization": "a key"}):
            with Client(server.port, **headers) as client:
                for answer in (client.embed(bad_request({})), client.send("GET", "/v1/models")):
                    check_error(answer, 401, None, "Authorization: Bearer KEY")
        assert server.get("/health") == {"status": "ok"}
        with Client(server.port, Authorization="Bearer a key") as client:
            listed, *_ = client.send("GET", "/v1/models").body["data"]
            assert {task["expert"] for task in listed["tasks"]} == {"clustering"}
            check_error(client.embed(bad_request({})), 400, "task", "which was not loaded: experts=['clustering']")
            limit = trusted(trained_folder).max_seq_length
            for words in (1, limit, limit):
                answer = client.embed(bad_request({"task": "clustering", "input": ["whale " * words, "whale"]}))
                assert answer.status == 200
        assert server.metric("truncated_texts_total") == 2
        assert server.stop() == 0
        server.log.seek(0)
        assert server.log.read().count(f"Texts over {limit} tokens are truncated") == 1


def test_a_text_that_fails_fails_alone(reference: Reference, texts: list[str]) -> None:
    """A lone surrogate, which the service would refuse: the tokenizer does not take it."""
    embedder = serving.Embedder(reference.model)
    items = [embedder.item(text, task) for text, task in zip(texts, itertools.cycle(TASKS), strict=False)]
    items[5] = embedder.item("\ud800", "clustering")
    results = embedder.embed(items)
    assert isinstance(results[5], TypeError)
    for result, text, task in zip(results, texts, itertools.cycle(TASKS), strict=False):
        if result is not results[5]:
            assert abs(result.vector - reference(text, task)).max() < 1e-5


def test_numbers_that_are_none_are_errors(trained_folder: Path) -> None:
    model = trusted(trained_folder)
    embedder = serving.Embedder(model)
    with torch.no_grad():
        next(model[0].model.blocks[0].experts["clustering"].parameters()).fill_(torch.nan)
    items = [embedder.item("a whale", task) for task in TASKS]
    failed = [isinstance(result, ArithmeticError) for result in embedder.embed(items)]
    assert failed == [task == "clustering" for task in TASKS]
    with pytest.raises(ValueError, match="cannot embed under the task 'clustering': vector not finite"):
        serving.Embedder(model)


def test_prompts_left_out_of_the_pooling(trained_folder: Path, texts: list[str]) -> None:
    model = trusted(trained_folder)
    model[1].include_prompt = False
    assert_as_encoded(serving.Embedder(model), list(itertools.product(texts[:3], TASKS)))


def test_instructions_left_out_of_each_row(trained_folder: Path, tmp_path: Path, texts: list[str]) -> None:
    model = trusted(configure(trained_folder, tmp_path / "excluded", instruction_pooling="excluded"))
    embedder = serving.Embedder(model)
    chosen = [(text, task) for text in texts[:2] for task in TASKS] + [("clustering: a whale", None)]
    assert_as_encoded(embedder, chosen)
    model[0].config.route_by_text = False
    begins = embedder.embed([embedder.item("clustering: a whale", "search_query")])[0].vector
    assert abs(begins - model.encode("clustering: a whale", prompt_name="search_query")).max() < 1e-5


def test_a_token_router_needs_no_task(dense: Path, tmp_path: Path, texts: list[str]) -> None:
    embedder = serving.Embedder(trusted(upcycle(str(dense), tmp_path / "routed", routing="token")))
    assert_as_encoded(embedder, list(itertools.product(texts[:4], (*TASKS, None))))
    with pytest.raises(ValueError, match="Did you mean 'clustering'"):
        embedder.item("a", "clusterin")


def _head(length: int) -> bytes:
    return (
        f"POST /v1/embeddings HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {length}\r\n\r\n"
    ).encode()


@pytest.mark.parametrize("retrieval", ["sparse", "hybrid"])
def test_sparse_and_hybrid_models_answer_with_sparse_embeddings(retrieval: str, tmp_path: Path) -> None:
    """In process: a batch of two tasks gives what the model gives, without the weight of the sparse score."""
    source = dense_checkpoint(tmp_path / "tiny", head="mlm")
    settings: dict[str, Any] = {"retrieval": retrieval, "sparse_from": "embeddings", "max_active_dims": 9}
    model = SparseEncoder(str(upcycle(source, tmp_path / "model", **settings)), trust_remote_code=True)
    if retrieval == "hybrid":
        model[-1].weight = 0.3
    embedder = serving.Embedder(model)
    service = serving.Service(embedder, NAME, {}, serving.ServeOptions())
    request = service.request(input=["one text", "another"], model=NAME)
    tasks = ("search_query", "search_document")
    results = embedder.embed([embedder.item(text, task) for text, task in zip(request.input, tasks, strict=True)])
    data = json.loads(service.response(request, results).body)["data"]
    only = {"retrieval": "sparse"} if retrieval == "hybrid" else {}
    for item, text, encode in zip(data, request.input, (model.encode_query, model.encode_document), strict=True):
        expected = encode(text, **only).to_dense().numpy()
        found = np.zeros_like(expected)
        found[item["sparse_embedding"]["indices"]] = item["sparse_embedding"]["values"]
        assert np.abs(found - expected).max() < 1e-6
        dense = encode(text, retrieval="dense").to_dense().numpy() if only else np.array([])
        assert np.allclose(item["embedding"], dense, atol=1e-6)
