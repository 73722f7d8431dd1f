"""Serve a MoTE over HTTP, with OpenAI's embeddings API and one additional field: `task`.

    pip install -e . -r examples/service/requirements.txt
    python examples/service/serve.py MODEL [--port 8000] [--max-batch-size 32] [--batch-timeout 5] [--device cuda]

    POST /v1/embeddings   {"input": "a text" or ["…"], "model": NAME, "task": "search_query",
                           "encoding_format": "float" or "base64", "dimensions": 128, "user": "…"}
    GET  /v1/models       the model and its tasks, each also as a model, NAME:task
    GET  /health          200 as soon as requests are answered
    GET  /metrics         counters in Prometheus format

A `task` puts its instruction in front of the texts, as `encode(texts, prompt_name=task)` does, and picks the expert.
For clients that send no other field, it may end the model's name: `NAME:search_query`. Without a task, the rules of
`encode(texts)` apply: a text's own instruction, then the model's default task, otherwise an error. With
`--no-route-by-text`, a text's own instruction does not count.

Concurrent requests are embedded together, whatever their tasks: the model is told the task of each row.
"""

import argparse
import asyncio
import base64
import logging
import signal
import socket
import sys
import time
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
import uvicorn
from batched import aio
from fastapi import FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse
from pydantic import BaseModel, ConfigDict, Field, field_validator
from sentence_transformers import SentenceTransformer, SparseEncoder
from sentence_transformers.util import batch_to_device, select_max_active_dims
from starlette.exceptions import HTTPException as AnyHTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mote.checkpoints.reading import open_mote
from mote.checkpoints.st_settings import retrieval_in
from mote.inference.loading import load_any_encoder
from mote.remote.configuration_mote import alternatives

PATHS = "POST /v1/embeddings, GET /v1/models, GET /health, GET /metrics"

logger = logging.getLogger("uvicorn.error")  # uvicorn's name for the server's own log


class Item(NamedTuple):
    """A text to embed, its instruction, and its expert (None for a token-routed model)."""

    text: str
    instruction: str
    expert: str | None


class Embedding(NamedTuple):
    """Embedding of a text: dense vector [H], tokens including instruction and special tokens, sparse vector [V]."""

    vector: np.ndarray
    tokens: int
    sparse: np.ndarray | None = None


class Embedder:
    """The model, and the routing of texts."""

    def __init__(self, model: SentenceTransformer | SparseEncoder, retrieval: str = "dense") -> None:
        """Embed a text under each task, so that errors show at startup."""
        self.model = model.eval()
        self.retrieval = retrieval
        self.config = model[0].config
        self.tasks = list(self.config.available_tasks)
        self.task_ids = {task: index for index, task in enumerate(self.config.tasks)}
        # An instruction that is left out of the pooling is that of all rows of a batch.
        self.one_instruction = any(getattr(module, "include_prompt", True) is False for module in model)
        results = self.embed([self.item("a text", task) for task in self.tasks])
        for task, result in zip(self.tasks, results, strict=True):
            if isinstance(result, Exception):
                raise ValueError(f"The model cannot embed under the task {task!r}: {result}") from result  # noqa: TRY004
        self.dimensions = len(results[0].vector)

    def item(self, text: str, task: str | None) -> Item:
        """Route a text; raise `ValueError` if the task is unknown or missing."""
        by_task = self.config.routes_by_task
        if task is not None:
            expert = self.config.expert_of(task)
            prompt = self.model.prompts.get(task, self.config.instruction_of(task))  # it may be reworded
            return Item(text, prompt, expert if by_task else None)
        prompt = self.model.prompts.get(self.model.default_prompt_name) or ""  # as encode(text) does
        return Item(text, prompt, self.config.expert_of(self.config.task_of([text], None, prompt)) if by_task else None)

    def embed(self, batch: list[Item]) -> list[Embedding | Exception]:
        """Embed a batch; a text that cannot be embedded gets an error, the others their embeddings."""
        groups: dict[str, list[int]] = {}
        for row, item in enumerate(batch):
            groups.setdefault(item.instruction if self.one_instruction else "", []).append(row)
        results: dict[int, Embedding | Exception] = {}
        for prompt, rows in groups.items():
            results |= zip(rows, self._try([batch[row] for row in rows], prompt), strict=True)
        return [results[row] for row in range(len(batch))]

    def _try(self, items: list[Item], prompt: str) -> list[Embedding | Exception]:
        """Embed texts; if that fails, embed each one separately, to find the cause."""
        try:
            return self._run(items, prompt)
        except Exception as error:  # whatever tokenizer, model and device raise
            return [error] if len(items) == 1 else [self._try([item], prompt)[0] for item in items]

    @torch.inference_mode()
    def _run(self, items: list[Item], prompt: str) -> list[Embedding | Exception]:
        """Run texts through the model, each row with the expert of its item."""
        texts = [item.instruction.removeprefix(prompt) + item.text for item in items]
        features = self.model.preprocess(texts, prompt=prompt, mixed_tasks=True)
        features = batch_to_device(features, self.model.device)
        tokens = features["attention_mask"].sum(dim=1)  # [B]
        if self.config.routes_by_task:  # the expert of each row is given, not inferred from the text
            features["route"] = torch.tensor([self.task_ids[item.expert] for item in items])
        both = {"weight": 1.0} if self.retrieval == "hybrid" else {}  # clients weight the scores themselves
        vectors = self.model(features, **both)["sentence_embedding"]  # [B, H], [B, V], or [B, V + H]
        limit = getattr(self.model, "max_active_dims", None)
        if limit is not None:
            vectors = select_max_active_dims(vectors, limit)
        size = 0 if self.retrieval == "dense" else self.config.vocab_size
        return [
            Embedding(vector[size:], count, vector[:size] if size else None)
            if np.isfinite(vector).all()
            else ArithmeticError("The embedding is not finite")
            for vector, count in zip(vectors.float().cpu().numpy(), tokens.tolist(), strict=True)
        ]


class EmbeddingsRequest(BaseModel):
    """The body of `POST /v1/embeddings`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    input: str | list[str]
    model: str
    task: str | None = None
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, Field(ge=1)] | None = None
    user: str | None = None

    @field_validator("input", mode="before")
    @classmethod
    def _check_input(cls, value: Any) -> Any:
        texts = value if isinstance(value, list) else [value]
        if any(isinstance(text, int | list) for text in texts):
            raise ValueError(
                "token ids are not accepted, since they do not say of which tokenizer: send texts (in LangChain, "
                "OpenAIEmbeddings(check_embedding_ctx_length=False))"
            )
        if not texts or not all(isinstance(text, str) and text for text in texts):
            raise ValueError("must be a text, or a list of texts, none of them empty")
        for index, text in enumerate(texts):
            if any("\ud800" <= character <= "\udfff" for character in text):  # JSON lets them through
                raise ValueError(f"text {index} holds half of a surrogate pair, which is not a character")
        return value

    @property
    def texts(self) -> list[str]:
        """The input, as a list."""
        return [self.input] if isinstance(self.input, str) else self.input


class LimitedBody:
    """Middleware that refuses a request whose body is too large, before all of it is in memory."""

    def __init__(self, app: ASGIApp, limit: int) -> None:
        """Wrap an application; `limit` is in bytes."""
        self.app = app
        self.limit = limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Count the bytes while the application reads them."""
        read = 0

        async def counted() -> Message:
            nonlocal read
            message = await receive()
            read += len(message.get("body", b""))
            if read > self.limit:
                raise refusal(413, f"The request is longer than {self.limit} bytes: send fewer texts at once")
            return message

        await self.app(scope, counted, send)


def refusal(status: int, message: str, param: str | None = None, code: str | None = None) -> HTTPException:
    """Return an error for a client, in OpenAI's format."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    detail = {"message": message, "type": kind, "param": param, "code": code}
    return HTTPException(status, detail, {"Retry-After": "1"} if status == 503 else None)


class Service:
    """The model behind HTTP.

    Args:
        embedder: The model.
        name: Model name that clients use.
        options: Options of the command line.
    """

    def __init__(self, embedder: Embedder, name: str, options: argparse.Namespace) -> None:
        """Set up batching."""
        self.embedder = embedder
        self.name = name
        self.options = options
        self.embed = aio.dynamically(
            self.embed_batch, batch_size=options.max_batch_size, timeout_ms=options.batch_timeout
        )
        self.mixed_batches = 0
        self.waiting = 0  # unanswered texts; the queue of `batched` does not count those being embedded
        self.started = int(time.time())

    def application(self) -> FastAPI:
        """Return the application with its routes."""
        app = FastAPI(title=f"{self.name}, a Mixture of Task Experts")
        app.add_middleware(LimitedBody, limit=self.options.max_body)
        app.add_api_route("/v1/embeddings", self.embeddings, methods=["POST"])
        for path, answer in {"/v1/models": self.models, "/health": self.health, "/metrics": self.metrics}.items():
            app.add_api_route(path, answer, methods=["GET"])
        app.add_exception_handler(AnyHTTPException, http_error)
        app.add_exception_handler(RequestValidationError, validation_error)
        app.add_exception_handler(Exception, unforeseen_error)
        return app

    async def embeddings(self, request: EmbeddingsRequest, connection: Request) -> JSONResponse:
        """Embed texts, together with the texts of other requests."""
        task = self.check(request)
        try:
            items = [self.embedder.item(text, task) for text in request.texts]
        except ValueError as error:
            if task:
                raise refusal(400, str(error), "task", "unknown_task") from error
            reason = str(error).partition(" Available:")[0]  # the rest is for the person who loads the model
            message = f"{reason} Send `task`.{alternatives('', self.embedder.tasks)}"
            raise refusal(400, message, "task", "missing_task") from error
        self.waiting += len(items)
        try:
            results = await self.embed_unless_gone(items, connection)
        finally:
            self.waiting -= len(items)
        for index, result in enumerate(results):
            if isinstance(result, Exception):
                logger.error("Text %d of a request was not embedded", index, exc_info=result)
                raise refusal(500, f"Text {index} could not be embedded: {type(result).__name__}", "input")
        return JSONResponse(response(request, results))

    async def embed_unless_gone(self, items: list[Item], connection: Request) -> list[Embedding | Exception]:
        """Wait for the embeddings; if the client disconnects, its texts leave the queue."""
        embedding = asyncio.create_task(self.embed(items))
        leaving = asyncio.create_task(connection.receive())  # the body has been read: only a disconnect can follow
        try:
            await asyncio.wait((embedding, leaving), return_when=asyncio.FIRST_COMPLETED)
            if not embedding.done():
                raise refusal(499, "The client has left")  # nobody reads this
            return embedding.result()
        finally:
            embedding.cancel()
            leaving.cancel()

    def embed_batch(self, batch: list[Item]) -> list[Embedding | Exception]:
        """Embed the texts of several requests."""
        self.mixed_batches += len({item.expert for item in batch}) > 1
        return self.embedder.embed(batch)

    def check(self, request: EmbeddingsRequest) -> str | None:
        """Return the task, which may end the model's name; refuse what this model or service does not support."""
        task = request.task if request.model == self.name else request.model.removeprefix(f"{self.name}:")
        if task == request.model != self.name:
            message = f"No model {request.model!r} here, only {self.name!r}, or with a task {self.name + ':TASK'!r}"
            raise refusal(404, message, "model", "model_not_found")
        if request.task not in (None, task):
            raise refusal(400, f"task is {request.task!r}, but the model's name ends with {task!r}: send one", "task")
        if len(request.texts) > self.options.max_inputs:
            message = f"{len(request.texts)} texts in one request: send {self.options.max_inputs} at most"
            raise refusal(400, message, "input")
        if (longest := max(map(len, request.texts))) > self.options.max_text:
            message = f"A text has {longest:,} characters: send {self.options.max_text:,} at most, or split it"
            raise refusal(400, message, "input")
        if request.dimensions and request.dimensions > self.embedder.dimensions:
            message = f"dimensions must be at most {self.embedder.dimensions}, not {request.dimensions}"
            raise refusal(400, message, "dimensions")
        if self.waiting >= self.options.max_waiting:
            raise refusal(503, "Too many texts are waiting: try again in a moment", code="overloaded")
        return task

    async def models(self) -> JSONResponse:
        """List the model with its tasks, and its name with each task."""
        ways = {task: self.embedder.item("", task) for task in self.embedder.tasks}
        tasks = [{"task": task, "instruction": way.instruction, "expert": way.expert} for task, way in ways.items()]
        model = {"id": self.name, "object": "model", "created": self.started, "owned_by": "mote"}
        names = [{**model, "id": f"{self.name}:{task}"} for task in self.embedder.tasks]
        return JSONResponse({"object": "list", "data": [{**model, "tasks": tasks}, *names]})

    async def health(self) -> JSONResponse:
        """Report that requests are answered."""
        return JSONResponse({"status": "ok"})

    async def metrics(self) -> PlainTextResponse:
        """Return counters in Prometheus format."""
        stats = self.embed.stats
        metrics = {
            ("texts_total", "counter"): stats.total_processed,
            ("batches_total", "counter"): stats.total_batches,
            ("mixed_batches_total", "counter"): self.mixed_batches,
            ("waiting_texts", "gauge"): self.waiting,
        }
        lines = [f"# TYPE mote_{name} {kind}\nmote_{name} {value}\n" for (name, kind), value in metrics.items()]
        return PlainTextResponse("".join(lines))


def response(request: EmbeddingsRequest, results: list[Embedding]) -> dict[str, Any]:
    """Format the answer to a request like OpenAI."""
    vectors = np.stack([result.vector for result in results]).astype("<f4")  # [N, H]
    if request.dimensions is not None:  # as encode(truncate_dim=…, normalize_embeddings=True)
        vectors = vectors[:, : request.dimensions]
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True).clip(1e-12)
    in_base64 = request.encoding_format == "base64"
    data = [
        {
            "object": "embedding",
            "index": index,
            "embedding": base64.b64encode(vector.tobytes()).decode() if in_base64 else vector.tolist(),
        }
        for index, vector in enumerate(vectors)
    ]
    for item, result in zip(data, results, strict=True):
        if result.sparse is not None:
            indices = np.flatnonzero(result.sparse)
            item["sparse_embedding"] = {"indices": indices.tolist(), "values": result.sparse[indices].tolist()}
    tokens = sum(result.tokens for result in results)
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "data": data, "model": request.model, "usage": usage}


async def http_error(_: Any, error: AnyHTTPException) -> JSONResponse:
    """Answer with one of our errors, or with the framework's error for an unknown path or an unreadable body."""
    detail = error.detail if isinstance(error.detail, dict) else None
    paths = f": there are {PATHS}" if error.status_code in (404, 405) else ""
    detail = detail or refusal(error.status_code, f"{error.detail}{paths}").detail
    return JSONResponse({"error": detail}, error.status_code, error.headers)


async def validation_error(_: Any, error: RequestValidationError) -> JSONResponse:
    """Report the first error of an invalid body."""
    first = error.errors()[0]
    is_json = first["type"] != "json_invalid"
    param = str(first["loc"][1]) if is_json and len(first["loc"]) > 1 else None
    message = first["msg"].removeprefix("Value error, ") if is_json else f"invalid JSON: {first['ctx']['error']}"
    if first["type"] == "extra_forbidden":
        message += "." + alternatives(param, EmbeddingsRequest.model_fields)
    return JSONResponse({"error": refusal(400, f"{param or 'The body'}: {message}", param).detail}, 400)


async def unforeseen_error(_: Any, error: Exception) -> JSONResponse:
    """Report an internal error; the log has the details."""
    return JSONResponse({"error": refusal(500, f"The service failed: {type(error).__name__}").detail}, 500)


def listen(host: str, port: int) -> socket.socket:
    """Bind the port before the model is loaded; connections are accepted later."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise OSError(f"cannot listen at {host}, port {port}: {error.strerror}. Choose another `--port`") from error
    return listener


def arguments() -> argparse.Namespace:
    def positive(text: str) -> int:
        if int(text) < 1:
            raise ValueError
        return int(text)

    def port(text: str) -> int:
        if not 0 <= int(text) < 2**16:
            raise ValueError
        return int(text)

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("model", help="a MoTE: a folder, or an id on the Hub")
    add("--revision", help="branch, tag or commit on the Hub")
    add("--name", help="name that clients ask for (default: the last part of MODEL)")
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s, only this machine)")
    add("--port", type=port, default=8000, help="port; 0 picks a free one (default: %(default)s)")
    add("--max-batch-size", type=positive, default=32, help="texts per batch (default: %(default)s)")
    add("--batch-timeout", type=positive, default=5, metavar="MS", help="wait for more texts (default: %(default)s ms)")
    add("--no-route-by-text", action="store_true", help="an instruction in a text does not pick its expert")
    add("--device", help="cpu, cuda, cuda:1 … (default: a GPU if there is one)")
    add("--dtype", help="dtype of the weights, such as bfloat16 (default: as stored)")
    add("--max-inputs", type=positive, default=2048, help="texts per request (default: %(default)s)")
    add("--max-text", type=positive, default=100_000, help="characters per text (default: %(default)s)")
    add("--max-body", type=positive, default=16 * 2**20, metavar="BYTES", help="size of a request (default: 16 MiB)")
    add("--max-waiting", type=positive, default=8192, help="unanswered texts before 503 (default: %(default)s)")
    add("--grace", type=positive, default=30, metavar="S", help="time to answer open requests at exit (default: 30 s)")
    return parser.parse_args()


def main() -> None:
    # uvicorn answers open requests, then raises the signal again; the exit status must still be 0
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: sys.exit(0))
    options = arguments()
    try:
        source = open_mote(options.model, options.revision)
        with listen(options.host, options.port) as listener:
            retrieval = retrieval_in(source.folder).kind
            settings = {"device": options.device, "dtype": options.dtype, "trust_remote_code": True}
            model = load_any_encoder(source.folder, **settings)
            if options.no_route_by_text:
                model[0].config.route_by_text = False
            name = options.name or source.short_name
            app = Service(Embedder(model, retrieval), name, options).application()
            config = uvicorn.Config(
                app,
                access_log=False,
                timeout_graceful_shutdown=options.grace,
                timeout_keep_alive=60,
                log_level="warning",
            )
            print(f"{name} at http://{options.host}:{listener.getsockname()[1]}/v1/embeddings", flush=True)
            uvicorn.Server(config).run(sockets=[listener])
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
