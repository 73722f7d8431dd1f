"""Progress of a run: counts for each task, and checkpoints with a file that marks them complete."""

import logging
import math
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import reduce
from sentence_transformers.sparse_encoder.callbacks.splade_callbacks import SpladeRegularizerWeightSchedulerCallback
from sentence_transformers.sparse_encoder.losses import SpladeLoss
from torch import Tensor, nn
from transformers import TrainerCallback

from mote.files import write_json
from mote.training.processes import processes, summed
from mote.training.recipe import RetrievalSettings
from mote.training.run_folder import CHECKPOINT_FILE, hashes_of

LOSS_FILE = "loss.pt"
LINES = 20  # about the progress, where there is no bar

logger = logging.getLogger(__name__)


class NonFiniteError(ValueError):
    """The loss or a weight became non-finite."""

    def __init__(self, problem: str) -> None:
        super().__init__(f"{problem}. This step was not saved: try a lower training.learning_rate")


@dataclass
class Tracker:
    """Counts of a run so far, over all processes."""

    step: int = 0  # the last completed one
    training_sets: dict[str, dict[str, int]] = field(default_factory=dict)  # training set → steps and rows
    seconds: float = 0.0  # up to the last checkpoint or the end, without steps lost by an interruption
    last: dict[str, Any] = field(default_factory=dict)  # training set, task, losses and rows of the last batch

    def record(self, name: str, task: str, losses: dict[str, Tensor], rows: int) -> None:
        """Add a batch of a training set, of which this process has a share; the sum of its losses is `loss`."""
        found = torch.stack([*losses.values()]).detach().cpu().double()
        *sums, total = summed(torch.cat([found, torch.tensor([rows])])).tolist()
        means = {key: value / processes().num_processes for key, value in zip(losses, sums, strict=True)}
        if not math.isfinite(means["loss"]):
            raise NonFiniteError(
                f"The loss is {means['loss']} at step {self.step + 1}, in a batch of {total:.0f} rows of {name}"
            )
        seen = self.training_sets.setdefault(name, {"steps": 0, "rows": 0})
        seen["steps"] += 1
        seen["rows"] += int(total)
        self.last = {"training_set": name, "task": task, **means, "rows": int(total)}


def count_texts(column: dict[str, Any]) -> int:
    """Count the texts of a column; with flash attention they are concatenated in one row."""
    return len(column["cu_seq_lens_q"]) - 1 if "cu_seq_lens_q" in column else len(column["attention_mask"])


class TrackedLoss(nn.Module):
    """The loss of one training set, of a task of the recipe, recorded by the tracker."""

    def __init__(self, model: nn.Module, loss: nn.Module, tracker: Tracker, name: str, task: str) -> None:
        super().__init__()
        self.model, self.loss, self.tracker = model, loss, tracker  # the trainer replaces `model` by its wrapped one
        self.name, self.task = name, task

    def forward(self, sentence_features: Iterable[dict[str, Any]], labels: Tensor | None) -> Tensor:
        """Compute the loss of a batch, and record it."""
        features = list(sentence_features)
        loss = self.loss(features, labels)
        total = torch.stack([*loss.values()]).sum() if isinstance(loss, dict) else loss
        self.tracker.record(self.name, self.task, {"loss": total}, count_texts(features[0]))
        return total

    def own_parameters(self) -> dict[str, nn.Parameter]:
        """Return the loss's own weights, those that are not the model's (of a projection, for example)."""
        of_model = {id(parameter) for parameter in self.model.parameters()}
        return {name: value for name, value in self.named_parameters() if id(value) not in of_model}


class SparsitySchedule(TrainerCallback):
    """Raises the weights of the losses that keep vectors sparse: Sentence-Transformers' scheduler, for each of them.

    The weights depend on the step alone, so that a resumed run has the same.
    """

    def __init__(self, settings: RetrievalSettings, losses: dict[str, TrackedLoss]) -> None:
        found = [module for loss in losses.values() for module in loss.modules() if isinstance(module, SpladeLoss)]
        ratio = settings.warmup_ratio
        self.schedulers = [SpladeRegularizerWeightSchedulerCallback(loss, warmup_ratio=ratio) for loss in found]

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """Set the first weights."""
        for scheduler in self.schedulers:
            scheduler.on_train_begin(*args, **kwargs)

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """Set the weights of a step."""
        for scheduler in self.schedulers:
            scheduler.on_step_begin(*args, **kwargs)


class RunCallback(TrainerCallback):
    """Adds the counts of each step to the trainer's log, and completes the checkpoints.

    It also sees to the weights that losses have of their own: of a projection, for example.
    """

    def __init__(self, tracker: Tracker, losses: dict[str, TrackedLoss]) -> None:
        self.tracker, self.losses = tracker, losses
        self.started = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Take the step from which the run resumes, and the intervals that are set now."""
        state.compute_steps(args, state.max_steps)  # a checkpoint's state has those of its own run
        self.tracker.step = state.global_step
        self.started = time.perf_counter() - self.tracker.seconds

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Average the gradients of the losses' own weights over the processes; DDP does so for the model's only."""
        for loss in self.losses.values() if processes().num_processes > 1 else ():
            for weight in loss.own_parameters().values():
                if weight.grad is not None:
                    weight.grad = reduce(weight.grad, "mean")

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Count the step."""
        self.tracker.step = state.global_step

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Add the last batch to the log of a step."""
        if "grad_norm" in logs:
            logs |= self.tracker.last  # for the progress bar, which comes later
            state.log_history[-1] |= self.tracker.last
            if args.disable_tqdm and state.global_step % max(1, state.max_steps // LINES) == 0:
                logger.info("step %d of %d, loss %.4g", state.global_step, state.max_steps, logs["loss"])

    def on_save(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Complete the checkpoint, after all processes have written their parts."""
        check_finite(model, state.global_step)
        self.tracker.seconds = time.perf_counter() - self.started
        processes().wait_for_everyone()
        if state.is_world_process_zero:
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            own = {name: loss.own_parameters() for name, loss in self.losses.items()}
            torch.save({name: weights for name, weights in own.items() if weights}, folder / LOSS_FILE)
            write_json(folder / CHECKPOINT_FILE, {**asdict(self.tracker), "files": hashes_of(folder)})

    def on_train_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Record the total duration, and check the trained weights."""
        self.tracker.seconds = time.perf_counter() - self.started
        check_finite(model, state.global_step)


def check_finite(model: nn.Module, step: int) -> None:
    """Raise `NonFiniteError` if a weight is non-finite in any process; all processes call this."""
    names = []
    for name, weight in model.named_parameters():
        local = weight.to_local() if hasattr(weight, "to_local") else weight  # sharded by FSDP2
        if not torch.isfinite(local).all():
            names.append(name)
    if total := int(summed(torch.tensor(float(len(names)))).item()):
        shown = ", ".join(names[:3]) or "in another process"
        raise NonFiniteError(f"{total} weights are non-finite at step {step} ({shown})")


def draw_curves(log: list[dict[str, Any]], path: Path, title: str) -> None:
    """Draw the loss of each task, and losses on held-out texts, from the trainer's log."""
    from matplotlib.figure import Figure  # pyplot selects a GUI backend

    curves: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for line in log:
        for key in line:
            if key == "loss" or (key.startswith("eval_") and key.endswith("_loss")):
                curves[line.get("task", key) if key == "loss" else key].append((line["step"], line[key]))
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.set(xlabel="step", ylabel="loss", title=title)
    for name, points in curves.items():
        axes.plot(*zip(*points, strict=True), "--o" if name.startswith("eval_") else "-", markersize=3, label=name)
    axes.legend(loc="upper right")
    figure.savefig(path, dpi=110)
