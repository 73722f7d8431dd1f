"""One LoRA per task on a frozen dense model, compared with MoTE and with one dense model with instructions.

    python -m benchmarks.task_loras --data DATA --out RUNS [--source MODEL] [--seeds 42 43]

All variants are trained on the same data in the same number of steps. With the first seed, the learning rate is raised
until the score on held-out training texts falls. At the best rate, each variant is also trained with the other seeds,
and scored on the seven task types. Existing results are reused, and an interrupted command resumes; several commands
can share the work. Prints the tables; writes `scores.json`.
"""

import argparse
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from benchmarks.paper.beyond import validation_scores
from benchmarks.paper.claims import Claim, Table
from benchmarks.paper.experiments import SCALES, START
from benchmarks.paper.runs import Runs, Scores
from benchmarks.paper.tables import claims_of, sweep_table, table_of
from mote.reporting import console_logging

VARIANTS = ("ic", "mote", "task-lora")
RATES = (1.5e-4, 5e-4, 1.5e-3, 5e-3, 1.5e-2)
CHANGES = (
    "training.mini_batch_size=null",
)  # texts this short fit; a second forward pass would cost a third of the time
TABLE = Table(
    "Dense with instructions, MoTE, task LoRAs",
    (START, *VARIANTS),
    "ic",
    claims=(Claim("mote", "ic"), Claim("task-lora", "ic"), Claim("mote", "task-lora")),
)


@dataclass(frozen=True)
class Comparison:
    """Models of the comparison, and their scores.

    Attributes:
        source: Dense model that all variants start from.
        data: Data folder.
        out: Folder for models and scores.
        seeds: Seeds at the chosen rates.
    """

    source: str
    data: str
    out: Path
    seeds: tuple[int, ...]

    def runs(self, rate: float, seeds: tuple[int, ...]) -> Runs:
        """Return the runs at one learning rate."""
        scale = replace(SCALES["small"], learning_rates={"": rate}, seeds=seeds)
        return Runs(scale, self.source, self.data, self.out / f"rate-{rate:g}", CHANGES)

    def validation(self) -> dict[str, dict[float, float]]:
        """Score the first seed of all variants on held-out training texts: variant → rate → mean over the tasks."""
        found: dict[str, dict[float, float]] = {name: {} for name in VARIANTS}
        for name, of_rates in found.items():
            for rate in RATES:
                before = max(of_rates.values(), default=0)
                of_rates[rate] = validation_scores(self.runs(rate, self.seeds[:1]), name)["validation_mean"]
                if of_rates[rate] < before:
                    break
        return found

    def scores(self, validation: dict[str, dict[float, float]]) -> Scores:
        """Score each variant at its best rate with all seeds, and the dense model before training."""
        found = self.runs(RATES[0], self.seeds).scores([START])
        for name, of_rates in validation.items():
            of_variant = self.runs(max(of_rates, key=of_rates.__getitem__), self.seeds).scores([name])
            found = Scores({**found.every, **of_variant.every}, {**found.types, **of_variant.types})
        return found


def report(validation: dict[str, dict[float, float]], scores: Scores) -> str:
    """Format the scores on held-out training texts at each rate, and on the test datasets at the best rate."""
    return "\n\n".join([sweep_table(validation), table_of(TABLE, scores), claims_of(TABLE, scores)])


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", default=SCALES["small"].source)
    parser.add_argument("--data", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 43])
    given = parser.parse_args()
    console_logging()
    comparison = Comparison(given.source, given.data, given.out, tuple(given.seeds))
    validation = comparison.validation()
    scores = comparison.scores(validation)
    kept = {"validation": validation, **asdict(scores)}
    (given.out / "scores.json").write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    print(report(validation, scores))


if __name__ == "__main__":
    main()
