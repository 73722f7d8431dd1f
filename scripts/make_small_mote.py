"""Make the MoTE in `examples/small-mote`, two experts for tasks of our own, and compare it with its dense twin.

    python -m scripts.make_small_mote [--work-dir RUNS]          # at the root of a clone: half an hour on one core

The recipe is `examples/small_mote.yaml`, the data are in `examples/data/requests`. The dense twin is one model with the
same texts, losses, batches, steps and rate. The MoTE is stored in float16, in which its source is, so its expert
`general` stays the source, bit for bit. Its card gets the scores of both on the test rows.
"""

import argparse
import logging
import runpy
from pathlib import Path
from typing import Any

import numpy as np
from sentence_transformers import SentenceTransformer

import mote
from mote.checkpoints.transform import Verb
from mote.remote.modeling_mote import MoTEModel
from mote.reporting import console_logging, table
from mote.training.recipe import load_recipe
from scripts.train_small_mote import halve

logger = logging.getLogger("mote.make_small_mote")  # `console_logging` prints what is logged below `mote`
RECIPE, OUT = "examples/small_mote.yaml", Path("examples/small-mote")
DENSE = ("model={source: examples/small-encoder, kind: dense, experts: [general, topic, intent], max_length: 256}",)
QUICKSTART = runpy.run_path("examples/00_quickstart.py")
SECTION = """## Scores

{table}

In percent, over the {tests:,} test rows of `examples/data/requests`; one run each. "Accuracy": the label of the nearest
of the {rows:,} training rows is right; "unseen": only over the {unseen} test rows with a pair of topic and intent that
no training row has. "Nearest": of the other test rows, without those that share both, the nearest one shares this. The
dense twin is one model, trained on the same rows in the same batches, steps and rate.
`python -m scripts.make_small_mote` repeats it. Seed 43, "nearest": right experts 71.3 and 78.0, twin 64.8 and 28.4.

The texts are from CLINC150 (CC BY 3.0) and HWU64 (CC BY 4.0), with labels of our own: see examples/data/README.md. They
are not in this folder.

"""


@Verb("set", "made by changing settings of", same_model=True)
def keep(model: MoTEModel, default_task: str) -> None:
    """Keep a model as it is; what is written is rounded afterwards."""


def scores(embed: Any) -> list[str]:
    """Return the cells of a model's row."""
    train, test = (QUICKSTART["read_requests"](split) for split in ("train", "test"))
    known, asked = (embed([row["text"] for row in rows]) for rows in (train, test))
    nearest = [train[number] for number in (asked @ known.T).argmax(axis=1)]
    cells = []
    for kind in QUICKSTART["KINDS"]:
        right = np.array([row[kind] == other[kind] for row, other in zip(test, nearest, strict=True)])
        share = QUICKSTART["share_of_nearest"](asked, test, kind)
        cells += [right.mean() * 100, right[unseen(train, test)].mean() * 100, share]
    return [f"{cell:.1f}" for cell in cells]


def unseen(train: list[dict[str, str]], test: list[dict[str, str]]) -> list[int]:
    """Return the test rows whose topic and intent no training row has together."""
    seen = {(row["topic"], row["intent"]) for row in train}
    return [number for number, row in enumerate(test) if (row["topic"], row["intent"]) not in seen]


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work-dir", type=Path, default=Path("runs/own-tasks"), help="folder for models")
    work = parser.parse_args().work_dir
    console_logging()
    for name, changes in {"small-mote": (), "dense": (*DENSE, "training.only_experts=null")}.items():
        if not (work / name / "model").exists():
            mote.train(load_recipe(RECIPE, [*changes, f"output={work / name}"]))
    trained, options = work / "small-mote/model", mote.WriteOptions(overwrite=True)
    mote.transform(trained, OUT, keep, default_task="general", options=options, after=halve)
    mote.write_card(OUT)
    source, twin = (SentenceTransformer(str(path)) for path in ("examples/small-encoder", work / "dense/model"))
    model = SentenceTransformer(str(OUT), trust_remote_code=True)
    rows = [["dense source", *scores(source.encode)], ["dense twin", *scores(twin.encode)]]
    config: Any = model[0].config
    for expert in config.experts:
        rows.append([f"expert `{expert}`", *scores(lambda texts, task=expert: model.encode(texts, task=task))])
    head = ["", *(f"{kind}: {what}" for kind in QUICKSTART["KINDS"] for what in ("accuracy", "unseen", "nearest"))]
    train, test = (QUICKSTART["read_requests"](split) for split in ("train", "test"))
    counts = {"tests": len(test), "rows": len(train), "unseen": len(unseen(train, test))}
    card = OUT / "README.md"
    before, made, after = card.read_text(encoding="utf-8").partition("<!-- mote:made")
    section = SECTION.format(table=table(head, rows), **counts)
    card.write_text(before.partition("## Scores\n")[0] + section + made + after, encoding="utf-8")
    logger.info("%s", section)


if __name__ == "__main__":
    main()
