"""`mote serve`: a MoTE over HTTP, with OpenAI's embeddings API and one additional field, `task`.

    POST /v1/embeddings   {"input": "a text" or ["…"], "model": NAME, "task": "search_query",
                           "encoding_format": "float" or "base64", "dimensions": 128, "user": "…"}
    GET  /v1/models       the model, its tasks and the ids of their weights; each task also as a model, NAME:task
    GET  /health          200 as soon as requests are answered
    GET  /metrics         counters in Prometheus format

Concurrent requests are embedded together, whatever their tasks: the model is told the expert of each row.
"""

import asyncio
import base64
import logging
import os
import socket
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from secrets import compare_digest
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
import torch
import uvicorn
from batched import aio
from pydantic import BeforeValidator, ConfigDict, Field, PositiveInt, ValidationError, create_model
from sentence_transformers import SparseEncoder
from sentence_transformers.util import batch_to_device, select_max_active_dims
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from mote.checkpoints.hashing import folder_hash
from mote.checkpoints.reading import open_mote
from mote.inference.loading import AUTO, load_any_encoder, weight_ids
from mote.inference.routing import ROUTER_FILE, Router, open_router
from mote.inference.speed import speed_up
from mote.reporting import label_models
from mote.settings import Settings, alternatives

PATHS = "POST /v1/embeddings, GET /v1/models, GET /health, GET /metrics"

logger = logging.getLogger(__name__)


class ServeOptions(Settings):
    """What is served, and how.

    Attributes:
        revision: Branch, tag or commit on the Hub.
        experts: Experts to open. Default: all.
        name: Name that clients ask for. Default: the last part of MODEL, of `RUN/model` RUN.
        api_key: Key that clients must send, as OpenAI's do; safer in the environment, as MOTE_API_KEY. Default: none.
        host: Address to listen on; 0.0.0.0 for other machines, too.
        port: Port; 0 picks a free one.
        max_batch_size: Texts per batch.
        batch_timeout: Milliseconds to wait for more texts.
        route_by_text: Whether an instruction that a text begins with picks its expert.
        device: Device. Default: a GPU if there is one.
        dtype: Dtype of the weights, such as bfloat16. Default: as stored.
        one_pass: Whether short texts of several tasks share a pass: see docs/performance.md.
        cuda_graphs: Whether to capture and replay the passes of short texts on a GPU.
        max_inputs: Maximum number of texts per request.
        max_text: Maximum number of characters per text.
        max_body: Maximum size of a request in bytes.
        max_waiting: Number of unanswered texts from which requests are refused.
        grace: Seconds for open requests at the end.
    """

    revision: str | None = None
    experts: list[str] | None = None
    name: str | None = None
    api_key: Annotated[str, Field(min_length=1)] | None = Field(default_factory=lambda: os.environ.get("MOTE_API_KEY"))
    host: str = "127.0.0.1"
    port: Annotated[int, Field(ge=0, lt=2**16)] = 8000
    max_batch_size: PositiveInt = 32
    batch_timeout: PositiveInt = 5
    route_by_text: bool = True
    device: str | None = None
    dtype: str | None = None
    one_pass: bool = False
    cuda_graphs: bool = False
    max_inputs: PositiveInt = 2048
    max_text: PositiveInt = 100_000
    max_body: PositiveInt = 16 * 2**20
    max_waiting: PositiveInt = 8192
    grace: PositiveInt = 30


class Item(NamedTuple):
    """A text to embed, its instruction, and its expert (None for a token-routed model)."""

    text: str
    instruction: str
    expert: str | None


class Embedding(NamedTuple):
    """Embedding of a text: a vector, [H], [V] if it is sparse, or both, [V + H]."""

    vector: np.ndarray
    tokens: int  # that the model read, including instruction and special tokens
    cut: bool  # whether there were more


class Embedder:
    """A `SentenceTransformer` or `SparseEncoder`, and the routing of texts."""

    def __init__(self, model: Any, router: Router | None = None) -> None:
        self.model, self.config, self.router = model.eval(), model[0].config, router
        self.sparse = self.config.vocab_size if isinstance(model, SparseEncoder) else 0  # V
        self.tasks = list(self.config.available_tasks)
        # An instruction that is left out of the pooling is that of all rows of a batch.
        self.one_instruction = any(getattr(module, "include_prompt", True) is False for module in model)
        results: Any = self.embed([self.item("a text", task) for task in self.tasks])  # errors show at startup
        for task, result in zip(self.tasks, results, strict=True):
            if isinstance(result, Exception):
                raise ValueError(f"The model cannot embed under the task {task!r}: {result}") from result  # noqa: TRY004
        self.dimensions = len(results[0].vector) - self.sparse

    def item(self, text: str, task: str | None) -> Item:
        """Route a text; raise `ValueError` if the task is unknown or missing."""
        by_task = self.config.routes_by_task
        if task == AUTO and self.router:
            (task,) = self.router.tasks_of([text])
        if task is not None:
            expert = self.config.expert_of(task)
            prompt = self.model.prompts.get(task, self.config.instruction_of(task))  # it may be reworded
            return Item(text, prompt, expert if by_task else None)
        prompt = self.model.prompts.get(self.model.default_prompt_name) or ""  # as encode(text) does
        return Item(text, prompt, self.config.expert_of(self.config.task_of([text], None, prompt)) if by_task else None)

    def embed(self, batch: list[Item]) -> list[Embedding | Exception]:
        """Embed a batch; a text that cannot be embedded gets an error, the others their embeddings."""
        results: dict[int, Embedding | Exception] = {}
        for prompt in {item.instruction for item in batch} if self.one_instruction else {""}:
            rows = [row for row, item in enumerate(batch) if not self.one_instruction or item.instruction == prompt]
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
        cut = [bool(row.overflowing) for row in features.encodings or ()] or [False] * len(items)  # None if it is slow
        features = batch_to_device(features, self.model.device)
        tokens = features["attention_mask"].sum(dim=1).tolist()
        if self.config.routes_by_task:  # the expert of each row is given, not inferred from the text
            features["route"] = self.model[0].task_ids_of([item.expert for item in items])
        both = {"weight": 1.0} if type(self.model[-1]).__name__ == "HybridPooling" else {}  # clients weight scores
        vectors = self.model(features, **both)["sentence_embedding"]
        vectors = select_max_active_dims(vectors, getattr(self.model, "max_active_dims", None))
        rows = map(Embedding, vectors.float().cpu().numpy(), tokens, cut)
        return [row if np.isfinite(row.vector).all() else ArithmeticError("vector not finite") for row in rows]


def error(status: int, message: str, param: str | None = None, code: str | None = None) -> JSONResponse:
    """Answer with an error in OpenAI's format."""
    kind = "invalid_request_error" if status < 500 else "server_error"
    headers = {401: {"WWW-Authenticate": "Bearer"}, 503: {"Retry-After": "1"}}.get(status)
    return JSONResponse({"error": {"message": message, "type": kind, "param": param, "code": code}}, status, headers)


class Service:
    """A model behind HTTP, under a name; `weights` are as from `weight_ids`."""

    def __init__(self, embedder: Embedder, name: str, weights: dict[str, Any], options: ServeOptions) -> None:
        self.embedder, self.name, self.weights, self.options = embedder, name, weights, options
        self.embed = aio.dynamically(self._batch, batch_size=options.max_batch_size, timeout_ms=options.batch_timeout)
        self.started, self.mixed_batches, self.truncated_texts = int(time.time()), 0, 0
        self.waiting = 0  # unanswered texts; the queue of `batched` does not count those being embedded
        text: Any = Annotated[str, Field(min_length=1, max_length=options.max_text)]
        as_list = BeforeValidator(lambda given: given if isinstance(given, list) else [given])
        fields: dict[str, Any] = {
            "input": Annotated[list[text], Field(min_length=1, max_length=options.max_inputs), as_list],
            "model": str,
            "task": (str | None, None),
            "encoding_format": (Literal["float", "base64"], "float"),
            "dimensions": (Annotated[int, Field(ge=1, le=embedder.dimensions)] | None, None),
            "user": (str | None, None),
        }
        self.request: Any = create_model("Request", __config__=ConfigDict(extra="forbid", strict=True), **fields)

    def application(self) -> Starlette:
        """Return the application with its routes."""
        routes = [
            Route("/v1/embeddings", self.with_key(self.embeddings), methods=["POST"]),
            Route("/v1/models", self.with_key(self.models)),
            Route("/health", lambda _: JSONResponse({"status": "ok"})),
            Route("/metrics", self.metrics),
        ]
        handlers: dict[Any, Callable[[Request, Any], Response]] = {
            HTTPException: lambda _, problem: error(problem.status_code, f"{problem.detail}: there are {PATHS}"),
            ValidationError: self.invalid,
            ClientDisconnect: lambda *_: Response(status_code=499),  # nobody reads this
            Exception: lambda _, problem: error(500, f"The service failed: {type(problem).__name__}"),  # see the log
        }
        return Starlette(routes=routes, exception_handlers=handlers)

    def with_key(self, endpoint: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        """Answer only who sends the key, if there is one."""

        async def answer(connection: Request) -> Response:
            sent, key = connection.headers.get("authorization", ""), self.options.api_key
            if key is None or compare_digest(sent.encode(), f"Bearer {key}".encode()):
                return await endpoint(connection)
            return error(401, "The API key is missing or wrong: `Authorization: Bearer KEY`", code="invalid_api_key")

        return answer

    async def embeddings(self, connection: Request) -> Response:
        """Embed texts, together with the texts of other requests."""
        body = bytearray()
        async for part in connection.stream():
            body += part
            if len(body) > self.options.max_body:
                return error(413, f"The request is longer than {self.options.max_body} bytes: send fewer texts at once")
        request = self.request.model_validate_json(body)
        items = self.route(request)
        if isinstance(items, Response):
            return items
        self.waiting += len(items)
        embedding = asyncio.create_task(self.embed(items))
        leaving = asyncio.ensure_future(connection.receive())  # the body has been read: only a disconnect can follow
        try:
            await asyncio.wait((embedding, leaving), return_when=asyncio.FIRST_COMPLETED)
            return self.response(request, embedding.result()) if embedding.done() else Response(status_code=499)
        finally:
            self.waiting -= len(items)
            embedding.cancel()  # what is still in the queue is dropped
            leaving.cancel()

    def route(self, request: Any) -> list[Item] | Response:
        """Decide on instruction and expert of each text; the task may end the model's name."""
        task = request.task if request.model == self.name else request.model.removeprefix(f"{self.name}:")
        if task == request.model != self.name:
            message = f"No model {request.model!r} here, only {self.name!r}, or with a task {self.name + ':TASK'!r}"
            return error(404, message, "model", "model_not_found")
        if request.task not in (None, task):
            return error(400, f"task is {request.task!r}, but the model's name ends with {task!r}: send one", "task")
        if self.waiting >= self.options.max_waiting:
            return error(503, "Too many texts are waiting: try again in a moment", code="overloaded")
        try:
            return [self.embedder.item(text, task) for text in request.input]
        except ValueError as problem:
            if task is not None:
                return error(400, str(problem), "task", "unknown_task")
            reason, *_ = str(problem).split(" Available:")  # the rest is for the person who loads the model
            message = f"{reason} Send `task`.{alternatives('', self.embedder.tasks)}"
            return error(400, message, "task", "missing_task")

    def _batch(self, batch: list[Item]) -> list[Embedding | Exception]:
        self.mixed_batches += len({item.expert for item in batch}) > 1
        results = self.embedder.embed(batch)
        cut = sum(isinstance(result, Embedding) and result.cut for result in results)
        if cut and not self.truncated_texts:
            logger.warning(
                "Texts over %s tokens are truncated: /metrics counts them", self.embedder.model.max_seq_length
            )
        self.truncated_texts += cut
        return results

    def response(self, request: Any, results: list[Any]) -> Response:
        """Format the answer to a request like OpenAI."""
        for index, result in enumerate(results):
            if isinstance(result, Exception):
                logger.error("Text %d of a request was not embedded", index, exc_info=result)
                return error(500, f"Text {index} could not be embedded: {type(result).__name__}", "input")
        both = np.stack([result.vector for result in results])  # [N, V + H], V may be 0
        sparse, vectors = both[:, : self.embedder.sparse], both[:, self.embedder.sparse :].astype("<f4")
        if request.dimensions is not None:  # as encode(truncate_dim=…, normalize_embeddings=True)
            vectors = vectors[:, : request.dimensions]
            vectors /= np.linalg.norm(vectors, axis=1, keepdims=True).clip(1e-12)
        data: list[dict[str, Any]] = []
        as_text = request.encoding_format == "base64"
        for index, vector in enumerate(vectors):
            embedding = base64.b64encode(vector.tobytes()).decode() if as_text else vector.tolist()
            data.append({"object": "embedding", "index": index, "embedding": embedding})
            if self.embedder.sparse:
                places = np.flatnonzero(sparse[index])
                data[-1]["sparse_embedding"] = {"indices": places.tolist(), "values": sparse[index, places].tolist()}
        usage = dict.fromkeys(("prompt_tokens", "total_tokens"), sum(result.tokens for result in results))
        return JSONResponse({"object": "list", "data": data, "model": request.model, "usage": usage})

    def invalid(self, _: Request, problem: ValidationError) -> Response:
        """Report the first error of an invalid body."""
        first = problem.errors()[0]
        place, message = ".".join(map(str, first["loc"])), first["msg"]
        if first["type"] == "extra_forbidden":
            message += f".{alternatives(place, self.request.model_fields)}"
        elif place.startswith("input") and isinstance(first["input"], int | list):
            message += ". No token ids: send texts (in LangChain, OpenAIEmbeddings(check_embedding_ctx_length=False))"
        return error(400, f"{place or 'The body'}: {message}", place.partition(".")[0] or None)

    async def models(self, _: Request) -> Response:
        """List the model with its tasks, and its name with each task; equal `weights` make equal vectors."""
        model = {"id": self.name, "object": "model", "created": self.started, "owned_by": "mote"}
        tasks = []
        for task in self.embedder.tasks:
            __, instruction, expert = self.embedder.item("", task)
            weights = self.weights["experts"].get(expert, self.weights["base"])
            tasks.append({"task": task, "instruction": instruction, "expert": expert, "weights": weights})
        named = [{**model, "id": f"{self.name}:{each['task']}", **each} for each in tasks]
        return JSONResponse({"object": "list", "data": [{**model, "tasks": tasks}, *named]})

    def metrics(self, _: Request) -> Response:
        """Return counters in Prometheus format."""
        stats, lines = self.embed.stats, [f"# TYPE mote_waiting_texts gauge\nmote_waiting_texts {self.waiting}\n"]
        counts = {"texts": stats.total_processed, "truncated_texts": self.truncated_texts}
        counts |= {"batches": stats.total_batches, "mixed_batches": self.mixed_batches}
        lines += [f"# TYPE mote_{name}_total counter\nmote_{name}_total {count}\n" for name, count in counts.items()]
        return PlainTextResponse("".join(lines))


def serve(model: str, options: ServeOptions) -> None:
    """Serve a MoTE over HTTP, with OpenAI's embeddings API.

    Requests name a task by the field `task`, or at the end of the model's name: `NAME:TASK`; the task `auto` is that
    which a router in the model's folder picks for each text (see `mote route`). SIGINT and SIGTERM end the
    service after it has answered open requests. The code in the model's folder or repository is run.

    Args:
        model: MoTE: a folder, or an id on the Hub.
        options: What is served, and how.
    """
    source = open_mote(model, options.revision, options.experts)
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    with socket.create_server((options.host, options.port), family=family) as listener:
        settings: Any = {"device": options.device, "dtype": options.dtype, "experts": options.experts}
        encoder: Any = load_any_encoder(source.folder, trust_remote_code=True, **settings)
        encoder[0].config.route_by_text &= options.route_by_text
        if options.one_pass or options.cuda_graphs:
            speed_up(encoder[0].model, one_pass=options.one_pass, cuda_graphs=options.cuda_graphs)
        weights = weight_ids(source.folder) or {"base": source.revision or folder_hash(source.folder), "experts": {}}
        name = next(iter(label_models(model))).rpartition("/")[2]
        router = open_router(encoder, source.folder) if (source.folder / ROUTER_FILE).is_file() else None
        service = Service(Embedder(encoder, router), options.name or name, weights, options)
        limits: Any = {"timeout_graceful_shutdown": options.grace, "timeout_keep_alive": 60}
        config = uvicorn.Config(service.application(), access_log=False, log_level="warning", **limits)
        logger.info("%s at http://%s:%d/v1/embeddings", service.name, options.host, listener.getsockname()[1])
        with suppress(KeyboardInterrupt):  # uvicorn raises the signal again once open requests are answered
            uvicorn.Server(config).run(sockets=[listener])
