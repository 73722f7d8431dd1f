"""Texts of unknown task: a small router beside a MoTE picks the task of each text.

It is a logistic regression over the mean of the model's token embeddings, without a pass through the model.
"""

import copy
import inspect
import logging
import random
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from mote import hub
from mote.checkpoints.provenance import RECORD_FILE
from mote.data.columns import Example, read_examples
from mote.data.rows import find_datasets
from mote.data.settings import DatasetSource
from mote.files import read_json, replaced, write_json
from mote.inference.loading import AUTO, load_encoder, weight_ids
from mote.remote.configuration_mote import require_known
from mote.remote.modeling_mote import MoTEModel

ROUTER_FILE = "router.safetensors"  # task → weights of the mean embedding, and a bias: [H + 1]
_ARGUMENTS = [*inspect.signature(MoTEModel.forward).parameters][1:]
_TEXTS = 5000  # of a task, at most
_HELD_OUT = 0.1

logger = logging.getLogger(__name__)


class Router:
    """The router of a model, by its weights as in the file."""

    def __init__(self, model: MoTEModel, tokenizer: Any, weights: Mapping[str, torch.Tensor]) -> None:
        self.model, self.names = model, list(weights)
        self.tokenizer = copy.deepcopy(tokenizer)  # which cannot be used by two threads at once
        self.added = {tokenizer.pad_token_id, *tokenizer("")["input_ids"]}  # tokens that are not of a text
        self.weights = torch.stack([*weights.values()])  # [T, H + 1]

    def tasks_of(self, texts: Iterable[str]) -> list[str]:
        """Return the most probable task of each text."""
        return self._tasks_of(token_ids(self.tokenizer, texts))

    def _tasks_of(self, ids: Iterable[list[int]]) -> list[str]:
        scores = mean_embeddings(self.model, ids) @ self.weights[:, :-1].T + self.weights[:, -1]
        return [self.names[index] for index in scores.argmax(dim=1).tolist()]

    def add_task(self, _: MoTEModel, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        """Add the task of each row to the arguments of `forward`, unless they have tasks: a hook before it."""
        given = {**dict(zip(_ARGUMENTS, args, strict=False)), **kwargs}
        if given.get("task") is None and given.get("task_ids") is None:
            if given.get("input_ids") is None:
                raise ValueError('route="auto" needs `input_ids`; with other inputs, pass `task`')
            rows = given["input_ids"].tolist()
            given["task"] = self._tasks_of([[token for token in row if token not in self.added] for row in rows])
        return (), given


def token_ids(tokenizer: Any, texts: Iterable[str]) -> list[list[int]]:
    """Tokenize texts, without special tokens, up to the length that the model reads."""
    return tokenizer([*texts], truncation=True, add_special_tokens=False)["input_ids"]


@torch.no_grad()
def mean_embeddings(model: MoTEModel, ids: Iterable[Sequence[int]]) -> torch.Tensor:
    """Average the embeddings of the tokens of each text: [N, H], of length 1, in float32 on the CPU."""
    table: Any = model.get_input_embeddings().weight
    means = [table[[*row]].float().mean(dim=0) for row in ids]
    return torch.nn.functional.normalize(torch.stack(means).nan_to_num(), dim=1).cpu()  # of no tokens: NaN


def open_router(encoder: Any, src: str | Path, revision: str | None = None) -> Router:
    """Open the router in the folder, or Hub repository, of a loaded encoder.

    Raises:
        FileNotFoundError: If there is none.
        ValueError: If it was trained for other weights, or knows a task that the model lacks.
    """
    return router_of(encoder[0].model, encoder.tokenizer, src, revision)


def router_of(model: MoTEModel, tokenizer: Any, src: str | Path, revision: str | None) -> Router:
    """Open the router of a model, which is without a tokenizer, as `open_router` does."""
    with hub.explained(f"{src} has no router for unknown tasks", FileNotFoundError, "See `mote route --help`"):
        folder = hub.local_folder(src, revision) or hub.fetch(str(src), revision, [ROUTER_FILE])
        with safe_open(folder / ROUTER_FILE, "pt") as file:
            weights = {task: file.get_tensor(task) for task in file.keys()}  # noqa: SIM118
            base = (file.metadata() or {}).get("base", "")
    unknown = [task for task in weights if task not in model.config.available_tasks]
    if unknown or base != weight_ids(src, revision).get("base", ""):
        problem = f"unknown tasks {unknown}" if unknown else "other token embeddings"
        raise ValueError(
            f"The router of {src} was trained before the model changed ({problem}): run `mote route` again"
        )
    return Router(model, tokenizer, weights)


def _texts_for(task: str, tasks: Mapping[str, str], row: Example) -> Iterable[str]:
    """Return the texts of a row that the expert of a task embeds."""
    query, document = (tasks.get(role) == tasks[task] for role in ("query", "document"))
    if not row.positives or (query and not document):
        return [row.anchor]
    return row.positives if document and not query else [row.anchor, *row.positives]


def train_router(model: str | Path, data: list[str], *, trust_remote_code: bool = False) -> dict[str, float]:
    """Train a router for texts of unknown task, and save it in the model's folder.

    It takes seconds: only token embeddings are read. Its accuracy on a tenth of the texts, held out, is logged.

    Args:
        model: Folder of a MoTE.
        data: TASK=FILES, for each task what its expert was trained on: a file, a pattern, or a folder with files for
            the split `train`. Of pairs, an expert of queries gets the first texts, one of documents the second ones,
            and any other both.
        trust_remote_code: Whether to run the code in the model's folder.

    Returns:
        Task → accuracy on its held-out texts.
    """
    from sklearn.linear_model import LogisticRegression

    encoder: Any = load_encoder(model, trust_remote_code=trust_remote_code)
    tasks, folder, network = encoder[0].config.available_tasks, Path(model), encoder[0].model
    if AUTO in tasks:
        raise ValueError(f"The router's own name is {AUTO!r}: rename that task (`mote set --help`) or pass it by name")
    train: dict[str, list[str]] = {}
    test: dict[str, list[str]] = {}
    for task, _, path in (word.partition("=") for word in data):
        require_known(task, tasks, "task")
        places = find_datasets(DatasetSource(path=path), Path.cwd())
        rows = (row for place in places for row in read_examples(place).rows)
        texts = sorted({text for row in rows for text in _texts_for(task, tasks, row)})
        texts = random.Random(0).sample(texts, min(len(texts), _TEXTS))
        count = max(1, int(_HELD_OUT * len(texts)))
        test[task], train[task] = texts[:count], texts[count:]
    labels = [task for task, texts in train.items() for _ in texts]
    means = mean_embeddings(network, token_ids(encoder.tokenizer, (text for texts in train.values() for text in texts)))
    linear = LogisticRegression(C=10, max_iter=1000).fit(means.numpy(), labels)
    found = torch.tensor([*zip(*linear.coef_.T, linear.intercept_, strict=True)], dtype=torch.float32)
    if len(found) == 1:  # of two tasks it knows the second's alone
        found = torch.cat([-found, found])
    weights = dict(zip(linear.classes_.tolist(), found, strict=True))
    router = Router(network, encoder.tokenizer, weights)
    right_of = {task: sum(name == task for name in router.tasks_of(texts)) / len(texts) for task, texts in test.items()}
    for task, share in right_of.items():
        logger.info("%s: %.1f %% of held-out texts are recognised", task, 100 * share)
    with replaced(folder / ROUTER_FILE) as file:
        save_file(weights, file, {"base": weight_ids(folder).get("base", "")})
    if record := read_json(folder / RECORD_FILE, missing_ok=True):  # `mote push` takes what it lists
        write_json(folder / RECORD_FILE, {**record, "files": sorted({*record["files"], ROUTER_FILE})})
    return right_of
