"""The model card."""

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import sentence_transformers
import torch
import transformers

from mote.reporting import markdown_table
from scripts.distill_small_encoder.student import (
    DIMENSIONS,
    FEED_FORWARD,
    HEADS,
    LAYERS,
    MAX_TOKENS,
    VOCABULARY_SIZE,
    folder_bytes,
)
from scripts.text_sets import ENCODER_SETS

CARD = """\
---
license: apache-2.0
language: en
library_name: sentence-transformers
pipeline_tag: sentence-similarity
base_model: sentence-transformers/all-MiniLM-L6-v2
tags:
- sentence-transformers
- sentence-similarity
- feature-extraction
- distillation
---

# A small sentence encoder

A dense English sentence encoder of {megabytes:.1f} MB, small enough to ship with the repository's code:
{parameters:.2f} M parameters, {layers} BERT layers of width {dimensions} ({heads} heads, feed-forward {feed_forward}),
{vocabulary:,} word pieces, texts up to {tokens} tokens. It is distilled from `all-MiniLM-L6-v2` and meant for trying
things out: when quality matters, use the teacher.

```python
from sentence_transformers import SentenceTransformer

model = SentenceTransformer("examples/small-encoder")
documents = ["The cat sleeps on the sofa.", "Interest rates rose again.", "Boil the pasta for ten minutes."]
print(model.similarity(model.encode("how do I cook noodles"), model.encode(documents)))
```

## Figures

{figures}

Measured with the evaluators of sentence-transformers on the fp16 file in this folder. Relevance in NFCorpus is treated
as binary, so its figures cannot be compared with published ones. The last column is the upper bound for distillation
into {dimensions} dimensions. Neither dataset was trained on, and nothing was chosen on a test split.

## How it was made

```
{command}
```

- **Texts**: {texts:,} distinct texts{limited}: all columns of the datasets below, train splits only, and runs of one to
  three sentences from the long texts. No labels were used.
- **Targets**: the teacher's embeddings projected onto their {dimensions} principal directions, which hold {kept:.1%} of
  the squared length, and scaled to length 1 again.
- **Student**: word, position and segment embeddings are initialised with the teacher's, projected by a PCA; the layers
  are initialised at random. The word pieces are the teacher's most useful {vocabulary:,}; the model is uncased.
- **Training**: `EmbedDistillLoss` (cosine), AdamW, {epochs} epochs, batches of {batch_size} texts of similar length,
  learning rate {learning_rate} with 5% warm-up and cosine decay, weight decay 0.01, no dropout, seed {seed}.
  {minutes:.1f} minutes on {device}, including the teacher's embeddings. transformers {transformers},
  sentence-transformers {sentence_transformers}, torch {torch}.
- **Format**: weights in fp16, loaded into fp32 (set in the config). BERT's pooler is not in the file, and not used.

## Texts and their licences

The texts themselves are not in this folder.

{sets}

## Licence

Apache-2.0, as is the teacher, [all-MiniLM-L6-v2](https://huggingface.co/sentence-transformers/all-MiniLM-L6-v2) by
the sentence-transformers authors.
"""


def shown_command(options: argparse.Namespace) -> str:
    """Write down the command, with the last part of each path only."""
    shown = [f"--teacher {options.teacher.name} --data {options.data.name} --out {options.out.name}"]
    shown += [f"--epochs {options.epochs} --batch-size {options.batch_size} --learning-rate {options.learning_rate}"]
    shown += [f"--seed {options.seed}" + (f" --limit {options.limit}" if options.limit else "")]
    return "python -m scripts.distill_small_encoder " + " \\\n    ".join(shown)


@dataclass(frozen=True)
class Facts:
    """What a run has found out.

    Attributes:
        texts: Number of texts.
        kept: Share of the teacher's squared length that the targets keep.
        minutes: Time of all but the evaluation.
        parameters: Number of parameters, in millions.
    """

    texts: int
    kept: float
    minutes: float
    parameters: float


def write_card(
    options: argparse.Namespace, measured: Sequence[dict[str, float]], counts: dict[str, int], facts: Facts
) -> None:
    """Write the model card.

    Args:
        options: Command line.
        measured: Figures of student, teacher and reduced teacher.
        counts: Set → number of its texts.
        facts: All other numbers.
    """
    models = ["this model", "teacher", f"teacher, {DIMENSIONS} dimensions"]
    figures = [[name, *(f"{figures[name]:.2f}" for figures in measured)] for name in measured[0]]
    sets = [[one.path, one.source, one.licence, f"{counts[one.path]:,}"] for one in ENCODER_SETS]
    card = CARD.format(
        megabytes=folder_bytes(options.out) / 1e6,
        layers=LAYERS,
        dimensions=DIMENSIONS,
        heads=HEADS,
        feed_forward=FEED_FORWARD,
        vocabulary=VOCABULARY_SIZE,
        tokens=MAX_TOKENS,
        figures=markdown_table(["x 100", *models], figures, align="llll"),
        sets=markdown_table(["set", "from", "licence", "texts"], sets, align="llll"),
        command=shown_command(options),
        limited=f" (a trial: of {sum(counts.values()):,})" if options.limit else "",
        epochs=options.epochs,
        batch_size=options.batch_size,
        learning_rate=options.learning_rate,
        seed=options.seed,
        device=torch.cuda.get_device_name() if torch.cuda.is_available() else "a CPU",
        transformers=transformers.__version__,
        sentence_transformers=sentence_transformers.__version__,
        torch=torch.__version__,
        **asdict(facts),
    )
    (options.out / "README.md").write_text(card, encoding="utf-8")
