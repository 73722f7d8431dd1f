"""What a run shows and writes down: a progress bar, a log of every step, checkpoints that are known to be whole."""

import json
import math
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import reduce
from torch import Tensor, nn
from tqdm.auto import tqdm
from transformers import TrainerCallback

from mote.training.processes import processes

LOG_FILE = "log.jsonl"
CHECKPOINT_FILE = "checkpoint.json"  # written last: a checkpoint without it was cut short
LOSS_FILE = "loss.pt"


class NonFiniteError(ValueError):
    """The loss or a gradient is no number any more."""


class Tracker:
    """What a run has seen so far, over all processes.

    Attributes:
        step: Steps done.
        sets: Training set → steps, rows, and the sum of its losses.
        tasks: Task of the model → texts and tokens that went through it.
        seconds: That they took, until the last checkpoint or the end; what a kill has undone is not in it.
        last: Of the step at hand: set, task, loss, rows.
    """

    def __init__(self) -> None:
        """Begin at nothing."""
        self.step = 0
        self.sets: dict[str, dict[str, float]] = {}
        self.tasks: dict[str, dict[str, int]] = {}
        self.seconds = 0.0
        self.last: dict[str, Any] = {}

    def record(self, name: str, task: str, column_tasks: list[str], features: list[dict], loss: Tensor) -> None:
        """Add one batch.

        Args:
            name: Of its training set.
            task: Of the recipe.
            column_tasks: Task of the model of each column.
            features: Of each column: what the tokenizer made of this process's part of the batch.
            loss: Of this process's part, a scalar.

        Raises:
            NonFiniteError: If the loss is not finite in some process.
        """
        state = processes()
        counts = [_tokens(column) for column in features]
        values = torch.stack([loss.detach().cpu().double(), *(count.cpu().double() for count in counts)])
        if state.num_processes > 1:
            values = reduce(values.to(state.device), "sum")
        mean, *tokens = values.tolist()
        mean /= state.num_processes
        rows = _texts(features[0]) * state.num_processes
        if not math.isfinite(mean):
            raise NonFiniteError(f"The loss is {mean} at step {self.step + 1}, in a batch of {rows} rows of {name}")
        of_set = self.sets.setdefault(name, {"steps": 0, "rows": 0, "loss": 0.0})
        of_set["steps"] += 1
        of_set["rows"] += rows
        of_set["loss"] += mean
        for column_task, count in zip(column_tasks, tokens, strict=True):
            of_task = self.tasks.setdefault(column_task, {"texts": 0, "tokens": 0})
            of_task["texts"] += rows
            of_task["tokens"] += int(count)
        self.last = {"set": name, "task": task, "loss": mean, "rows": rows}

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint keeps."""
        return {"step": self.step, "sets": self.sets, "tasks": self.tasks, "seconds": self.seconds}

    def restore(self, state: dict[str, Any]) -> None:
        """Take over what a checkpoint kept."""
        self.step, self.sets, self.tasks = state["step"], state["sets"], state["tasks"]
        self.seconds = state["seconds"]


def _texts(column: dict[str, Any]) -> int:
    """Count the texts of a column; flash attention has them end to end in one row."""
    return len(column["cu_seq_lens_q"]) - 1 if "cu_seq_lens_q" in column else len(column["attention_mask"])


def _tokens(column: dict[str, Any]) -> Tensor:
    return column["cu_seq_lens_q"][-1] if "cu_seq_lens_q" in column else column["attention_mask"].sum()


class TrackedLoss(nn.Module):
    """The loss of one training set, which tells the tracker what it sees.

    Args:
        model: What is trained.
        loss: Of the set.
        tracker: Of the run.
        name: Of the set.
        task: Of the recipe.
        column_tasks: Text column → task of the model.
    """

    def __init__(
        self, model: nn.Module, loss: nn.Module, tracker: Tracker, name: str, task: str, column_tasks: dict[str, str]
    ) -> None:
        """Wrap the loss."""
        super().__init__()
        self.model = model  # where the trainer puts its wrapped model
        self.loss = loss
        self.tracker = tracker
        self.name, self.task, self.column_tasks = name, task, list(column_tasks.values())

    def forward(self, sentence_features: Iterable[dict[str, Any]], labels: Tensor | None) -> Tensor:
        """Compute the loss of a batch."""
        features = list(sentence_features)
        rows = sum(_texts(column) for column in features)
        for column in features:  # of a step's load-balancing loss each forward pass has its share (token routing)
            column["balance_share"] = 1 / rows
        loss = self.loss(features, labels)
        total = torch.stack([*loss.values()]).sum() if isinstance(loss, dict) else loss
        self.tracker.record(self.name, self.task, self.column_tasks, features, total)
        return total

    def own_parameters(self) -> dict[str, nn.Parameter]:
        """Return the weights that belong to the loss and not to the model (of a projection, say)."""
        of_model = {id(parameter) for parameter in self.model.parameters()}
        return {name: value for name, value in self.named_parameters() if id(value) not in of_model}


class RunCallback(TrainerCallback):
    """Shows and logs the run, stops it when a number is none, and seals its checkpoints.

    Args:
        tracker: Of the run.
        folder: Of the run.
        losses: Of the training sets.
        seal: What every checkpoint is to say of the run that made it.
        log_every: Steps between lines of the log.
        scaled: Whether gradients may overflow now and then, as they do in fp16.
    """

    def __init__(
        self,
        tracker: Tracker,
        folder: Path,
        losses: dict[str, TrackedLoss],
        seal: dict[str, Any],
        log_every: int,
        scaled: bool,
    ) -> None:
        """Keep the arguments; nothing is written yet."""
        self.tracker, self.folder, self.losses, self.seal = tracker, folder, losses, seal
        self.log_every, self.scaled = log_every, scaled
        self.bar: Any = None
        self.recent: dict[str, float] = {}
        self.timed: dict[str, float] = defaultdict(float)
        self.started = self.begun = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Cut the log back to the step at which the run goes on, and open the bar."""
        self.tracker.step = state.global_step
        if state.is_world_process_zero:
            kept = [line for line in read_log(self.folder) if line.get("step", 0) <= state.global_step]
            text = "".join(json.dumps(line) + "\n" for line in kept)
            (self.folder / LOG_FILE).write_text(text, encoding="utf-8")
            self.bar = tqdm(total=state.max_steps, initial=state.global_step, unit="step", dynamic_ncols=True)
        self.begun = time.perf_counter()
        self.started = self.begun - self.tracker.seconds

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Average the gradients of losses' own weights: what wraps the model does it for the model's alone."""
        for loss in self.losses.values() if processes().num_processes > 1 else ():
            for weight in loss.own_parameters().values():
                if weight.grad is not None:
                    weight.grad = reduce(weight.grad, "mean")

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Take the time of the step, in which its texts were also tokenized."""
        self.tracker.step = state.global_step
        last = self.tracker.last
        now = time.perf_counter()
        self.timed["seconds"] += now - self.begun
        self.begun = now
        self.timed["rows"] += last["rows"]
        before = self.recent.get(last["task"], last["loss"])
        self.recent[last["task"]] = 0.9 * before + 0.1 * last["loss"]  # smoothed, for the eye

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        """Write a line of the log; refuse to go on with a gradient that is no number."""
        logs = logs or {}
        if not math.isfinite(logs.get("grad_norm", 0.0)) and not self.scaled:
            raise NonFiniteError(
                f"The gradient is {logs['grad_norm']} at step {state.global_step}, after a batch of "
                f"{self.tracker.last['set']}"
            )
        if not state.is_world_process_zero:
            return
        line: dict[str, Any] = {"step": state.global_step}
        if "grad_norm" in logs:
            rate = self.timed["rows"] / self.timed["seconds"]
            line |= {**self.tracker.last, "learning_rate": logs["learning_rate"], "grad_norm": logs["grad_norm"]}
            line |= {"pairs_per_second": round(rate, 1)}
            if self.bar is not None:
                shown = {task: f"{loss:.3f}" for task, loss in self.recent.items()}
                self.bar.set_postfix({**shown, "lr": f"{logs['learning_rate']:.1e}", "pairs/s": f"{rate:.0f}"})
                self.bar.update(state.global_step - self.bar.n)
            if state.global_step % self.log_every:
                return
        else:
            scores = {key: value for key, value in logs.items() if key.startswith("eval_validation")}
            if not scores:
                return
            line |= scores
        with (self.folder / LOG_FILE).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Leave the evaluation out of the time of the next step."""
        self.begun = time.perf_counter()

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Say that the checkpoint is whole."""
        self.tracker.seconds = time.perf_counter() - self.started
        processes().wait_for_everyone()  # each process has its own part of it to write
        if state.is_world_process_zero:
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            own = {name: loss.own_parameters() for name, loss in self.losses.items()}
            torch.save(
                {
                    name: {key: weight.detach() for key, weight in weights.items()}
                    for name, weights in own.items()
                    if weights
                },
                folder / LOSS_FILE,
            )
            content = json.dumps({**self.seal, "tracker": self.tracker.state()})
            unsealed = folder / (CHECKPOINT_FILE + ".part")
            unsealed.write_text(content, encoding="utf-8")
            unsealed.replace(folder / CHECKPOINT_FILE)
        self.begun = time.perf_counter()

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Take the time of the whole."""
        self.tracker.seconds = time.perf_counter() - self.started

    def close(self) -> None:
        """Close the bar, also of a run that was stopped."""
        if self.bar is not None:
            self.bar.close()


def read_log(folder: Path) -> list[dict[str, Any]]:
    """Read a run's log; a last line that a kill cut short is left out."""
    path = folder / LOG_FILE
    lines = []
    for text in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
        try:
            lines.append(json.loads(text))
        except ValueError:
            break
    return lines


def draw_curves(log: list[dict[str, Any]], path: Path, title: str) -> None:
    """Draw the loss of each task, and the validation scores where there are several, over the steps."""
    from matplotlib.figure import Figure  # not pyplot, which would look for a screen

    by_task: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for line in log:
        if "loss" in line:
            by_task[line["task"]].append((line["step"], line["loss"]))
    scores = [(line["step"], line["eval_validation_mean"]) for line in log if "eval_validation_mean" in line]
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for task, points in by_task.items():
        steps, losses = zip(*points, strict=True)
        (drawn,) = axes.plot(steps, losses, alpha=0.3, linewidth=1)
        axes.plot(steps, _smoothed(losses), label=task, color=drawn.get_color())
    axes.set(xlabel="step", ylabel="loss (thin: each batch; thick: smoothed)", title=title)
    if len(scores) > 1:
        right = axes.twinx()
        right.plot(*zip(*scores, strict=True), "k--o", markersize=3, label="validation (right)")
        right.set_ylabel("mean validation score, x 100")
        axes.plot([], [], "k--o", markersize=3, label="validation (right)")
    axes.legend(loc="upper right")
    figure.savefig(path, dpi=110)


def _smoothed(values: Iterable[float], keep: float = 0.9) -> list[float]:
    """Smooth exponentially, without the pull of the first value."""
    total, weight, result = 0.0, 0.0, []
    for value in values:
        total, weight = keep * total + (1 - keep) * value, keep * weight + (1 - keep)
        result.append(total / weight)
    return result
