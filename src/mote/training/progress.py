"""Progress of a run: counts for each task, progress bar, log, and checkpoints with a file that marks them complete."""

import json
import math
import time
from collections import defaultdict
from collections.abc import Iterable
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import reduce
from sentence_transformers.sparse_encoder.callbacks.splade_callbacks import SpladeRegularizerWeightSchedulerCallback
from sentence_transformers.sparse_encoder.losses import SpladeLoss
from torch import Tensor, nn
from transformers import ProgressCallback, TrainerCallback

from mote.files import write_json
from mote.training.model_settings import RetrievalSettings
from mote.training.processes import processes, summed
from mote.training.run_folder import CHECKPOINT_FILE

LOG_FILE = "log.jsonl"
LOSS_FILE = "loss.pt"


class NonFiniteError(ValueError):
    """The loss, a gradient or a weight became non-finite."""


class Tracker:
    """Counts of a run so far, over all processes.

    Attributes:
        step: Completed steps.
        training_sets: Training set → steps, rows, and the sum of its losses.
        tasks: Task of the model → texts and tokens of it.
        seconds: Duration up to the last checkpoint or the end, without steps lost by an interruption.
        last: Training set, task, loss and rows of the current step.
    """

    def __init__(self) -> None:
        self.step = 0
        self.training_sets: dict[str, dict[str, float]] = {}
        self.tasks: dict[str, dict[str, int]] = {}
        self.seconds = 0.0
        self.last: dict[str, Any] = {}

    def record(
        self,
        name: str,
        task: str,
        column_tasks: list[list[str]],
        features: list[dict[str, Any]],
        loss: Tensor,
        parts: Tensor | None = None,
    ) -> None:
        """Add one batch.

        Args:
            name: Training set.
            task: Task of the recipe.
            column_tasks: For each part of the training set, the model's tasks of its columns.
            features: Tokenized texts of each column, this process's share of the batch.
            loss: Loss of this share; raises `NonFiniteError` if that of any process is non-finite.
            parts: Part of each row, [B]. Default: there is only one part.
        """
        tokens = [
            column["cu_seq_lens_q"].diff() if "cu_seq_lens_q" in column else column["attention_mask"].sum(dim=1)
            for column in features
        ]  # of each row, [B]
        counts = []
        for number, tasks in enumerate(column_tasks):
            of_part = torch.ones_like(tokens[0]) if parts is None else (parts == number).to(tokens[0])
            counts += [of_part.sum(), *((of_part * column).sum() for column in tokens[: len(tasks)])]
        values = torch.stack([loss.detach().cpu().double(), *(count.cpu().double() for count in counts)])
        total, *seen_counts = summed(values).tolist()
        mean = total / processes().num_processes
        rows = count_texts(features[0]) * processes().num_processes
        self.add_step(name, rows, mean)
        numbers = iter(map(int, seen_counts))
        for tasks in column_tasks:
            texts = next(numbers)
            for column_task in tasks:
                self.add_texts(column_task, texts, next(numbers))
        self.last = {"training_set": name, "task": task, "loss": mean, "rows": rows}

    def add_step(self, name: str, rows: int, loss: float) -> None:
        """Add a step to the counts of a training set; raise `NonFiniteError` if its loss is non-finite."""
        if not math.isfinite(loss):
            raise NonFiniteError(f"The loss is {loss} at step {self.step + 1}, in a batch of {rows} rows of {name}")
        seen = self.training_sets.setdefault(name, {"steps": 0, "rows": 0, "loss": 0.0})
        for key, value in (("steps", 1), ("rows", rows), ("loss", loss)):
            seen[key] += value

    def add_texts(self, task: str, texts: int, tokens: int) -> None:
        """Add to the counts of a task."""
        if texts:
            seen = self.tasks.setdefault(task, {"texts": 0, "tokens": 0})
            seen["texts"] += texts
            seen["tokens"] += tokens

    def state(self) -> dict[str, Any]:
        """Return the state to save in a checkpoint."""
        return {name: getattr(self, name) for name in ("step", "training_sets", "tasks", "seconds")}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the state of a checkpoint."""
        for name, value in state.items():
            setattr(self, name, value)


def count_texts(column: dict[str, Any]) -> int:
    """Count the texts of a column; with flash attention they are concatenated in one row."""
    return len(column["cu_seq_lens_q"]) - 1 if "cu_seq_lens_q" in column else len(column["attention_mask"])


class TrackedLoss(nn.Module):
    """The loss of one training set, recorded by the tracker.

    Args:
        model: Model that is trained.
        loss: Loss of the training set.
        tracker: Tracker of the run.
        name: Training set.
        task: Task of the recipe.
        column_tasks: For each part of the training set, text column → task of the model. If there are several parts,
            the last number of a label is that of the row's part.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: nn.Module,
        tracker: Tracker,
        name: str,
        task: str,
        column_tasks: list[dict[str, str]],
    ) -> None:
        super().__init__()
        self.model, self.loss, self.tracker = model, loss, tracker  # the trainer replaces `model` by its wrapped one
        self.name, self.task, self.column_tasks = name, task, [list(part.values()) for part in column_tasks]

    def forward(self, sentence_features: Iterable[dict[str, Any]], labels: Tensor | None) -> Tensor:
        """Compute the loss of a batch, and record it."""
        features = list(sentence_features)
        loss = self.loss(features, labels)
        total = torch.stack([*loss.values()]).sum() if isinstance(loss, dict) else loss
        parts = labels[:, -1] if labels is not None and len(self.column_tasks) > 1 else None
        self.tracker.record(self.name, self.task, self.column_tasks, features, total, parts)
        return total

    def own_parameters(self) -> dict[str, nn.Parameter]:
        """Return the loss's own weights, those that are not the model's (of a projection, for example)."""
        of_model = {id(parameter) for parameter in self.model.parameters()}
        return {name: value for name, value in self.named_parameters() if id(value) not in of_model}


class AverageLossGradients(TrainerCallback):
    """Averages the gradients of the losses' own weights over the processes; DDP does so for the model's only."""

    def __init__(self, losses: dict[str, TrackedLoss]) -> None:
        self.losses = losses

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Average the gradients."""
        for loss in self.losses.values() if processes().num_processes > 1 else ():
            for weight in loss.own_parameters().values():
                if weight.grad is not None:
                    weight.grad = reduce(weight.grad, "mean")


class SparsitySchedule(TrainerCallback):
    """Raises the weights of the losses that keep vectors sparse: Sentence-Transformers' scheduler, for each of them.

    The weights depend on the step alone, so that a resumed run has the same.
    """

    def __init__(self, settings: RetrievalSettings, losses: dict[str, TrackedLoss]) -> None:
        found = [module for loss in losses.values() for module in loss.modules() if isinstance(module, SpladeLoss)]
        how: Any = {"scheduler_type": settings.scheduler_type, "warmup_ratio": settings.warmup_ratio}
        self.schedulers = [SpladeRegularizerWeightSchedulerCallback(loss, **how) for loss in found]

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """Set the first weights."""
        for scheduler in self.schedulers:
            scheduler.on_train_begin(*args, **kwargs)

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """Set the weights of a step."""
        for scheduler in self.schedulers:
            scheduler.on_step_begin(*args, **kwargs)


class TaskProgress(ProgressCallback):
    """The trainer's progress bar, with the smoothed loss of each task instead of a line for each log."""

    def __init__(self, tracker: Tracker) -> None:
        super().__init__()
        self.tracker = tracker
        self.losses: dict[str, float] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Advance the bar."""
        super().on_step_end(args, state, control, **kwargs)
        last = self.tracker.last
        self.losses[last["task"]] = 0.9 * self.losses.get(last["task"], last["loss"]) + 0.1 * last["loss"]

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        """Show the losses in the bar."""
        if self.training_bar is not None and "learning_rate" in (logs or {}):
            losses = {task: f"{loss:.3f}" for task, loss in self.losses.items()}
            self.training_bar.set_postfix({**losses, "lr": f"{logs['learning_rate']:.1e}"})

    def on_prediction_step(self, *args: Any, **kwargs: Any) -> None:
        """Show no bar for held-out texts."""

    def close(self) -> None:
        """Close the bar, even if the run was stopped."""
        if self.training_bar is not None:
            self.training_bar.close()


class RunCallback(TrainerCallback):
    """Writes the trainer's log with the counts of each step, stops on non-finite values, completes the checkpoints.

    Args:
        tracker: Tracker of the run.
        folder: Folder of the run.
        losses: Training set → its loss.
        scaled: Whether gradients are scaled and may occasionally overflow, as in fp16.
    """

    def __init__(self, tracker: Tracker, folder: Path, losses: dict[str, TrackedLoss], scaled: bool) -> None:
        self.tracker, self.file, self.losses, self.scaled = tracker, folder / LOG_FILE, losses, scaled
        self.training = False  # otherwise losses are from before or after the run, and in its record
        self.started, self.rows = 0.0, 0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Cut the log back to the step from which the run resumes, and take the intervals that are set now."""
        state.compute_steps(args, state.max_steps)  # a checkpoint's state has those of its own run
        self.tracker.step = state.global_step
        if state.is_world_process_zero:
            self.file.write_text("".join(map(_json_line, state.log_history)), encoding="utf-8")
        self.training = True
        self.started, self.rows = time.perf_counter() - self.tracker.seconds, 0
        self.resumed = time.perf_counter()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Count the step."""
        self.tracker.step = state.global_step
        self.rows += self.tracker.last["rows"]

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        """Write a line of the log; raise `NonFiniteError` on a non-finite gradient."""
        logs = logs or {}
        if "train_runtime" in logs:  # the trainer's summary of the run, which has a record of its own
            return
        if not math.isfinite(logs.get("grad_norm", 0.0)) and not self.scaled:
            raise NonFiniteError(
                f"The gradient is {logs['grad_norm']} at step {state.global_step}, after a batch of "
                f"{self.tracker.last['training_set']}"
            )
        if "grad_norm" in logs:
            rate = self.rows / (time.perf_counter() - self.resumed)
            state.log_history[-1] |= {**self.tracker.last, "rows_per_second": round(rate, 1)}
        if self.training and state.is_world_process_zero:
            with self.file.open("a", encoding="utf-8") as file:
                file.write(_json_line(state.log_history[-1]))

    def on_save(self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **_: Any) -> None:
        """Complete the checkpoint, after all processes have written their parts."""
        check_finite(model, state.global_step)
        self.tracker.seconds = time.perf_counter() - self.started
        processes().wait_for_everyone()
        if state.is_world_process_zero:
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            own = {name: loss.own_parameters() for name, loss in self.losses.items()}
            torch.save({name: weights for name, weights in own.items() if weights}, folder / LOSS_FILE)
            write_json(folder / CHECKPOINT_FILE, self.tracker.state())

    def on_train_end(self, args: Any, state: Any, control: Any, model: nn.Module | None = None, **_: Any) -> None:
        """Record the total duration, and check the trained weights."""
        self.training = False
        self.tracker.seconds = time.perf_counter() - self.started
        check_finite(model, state.global_step)


def _json_line(line: dict[str, Any]) -> str:
    return json.dumps(line) + "\n"


def check_finite(model: nn.Module | None, step: int) -> None:
    """Raise `NonFiniteError` if a weight is non-finite in any process; all processes call this."""
    names = [] if model is None else [name for name, weight in model.named_parameters() if not _is_finite(weight)]
    if total := int(summed(torch.tensor(float(len(names)))).item()):
        shown = ", ".join(names[:3]) or "in another process"
        raise NonFiniteError(f"{total} weights are non-finite at step {step} ({shown})")


def _is_finite(weight: Tensor) -> bool:
    local = weight.to_local() if hasattr(weight, "to_local") else weight  # sharded by FSDP2
    return bool(torch.isfinite(local).all())


def draw_curves(log: list[dict[str, Any]], path: Path, title: str) -> None:
    """Draw the loss of each task, and losses and scores on held-out texts, from the trainer's log."""
    from matplotlib.figure import Figure  # pyplot selects a GUI backend

    curves: dict[str, list[tuple[int, float]]] = defaultdict(list)
    scores = []
    for line in log:
        for key, value in line.items():
            if key == "eval_validation_mean":
                scores.append((line["step"], value))
            elif key.startswith("eval_") and key.endswith("_loss"):
                curves[f"{key[5:-5]}, held out"].append((line["step"], value))
            elif key in ("encoder_loss", "decoder_loss") or (key == "loss" and "task" in line):
                curves[line["task"] if key == "loss" else key].append((line["step"], value))
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, points in curves.items():
        steps, values = zip(*points, strict=True)
        smoothed = accumulate(values, lambda mean, value: 0.9 * mean + 0.1 * value)
        held_out = name.endswith("held out")
        axes.plot(steps, values if held_out else [*smoothed], "--o" if held_out else "-", markersize=3, label=name)
    axes.set(xlabel="step", ylabel="loss (of training: smoothed)", title=title)
    if scores:
        right = axes.twinx()
        right.plot(*zip(*scores, strict=True), "k--o", markersize=3)
        right.set_ylabel("mean validation score, x 100 (dashed)")
    axes.legend(loc="upper right")
    figure.savefig(path, dpi=110)
