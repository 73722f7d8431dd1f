"""Queries for documents (`mote generate`), written by any sequence-to-sequence or causal model of transformers.

As docTTTTTquery (Nogueira and Lin, 2019) does, whose queries CoT-MoTE is pre-trained on: each token is drawn from the
ten likeliest. So a corpus without queries becomes a dataset of pairs.
"""

import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from mote.checkpoints.hashing import folder_hash
from mote.corpora.embed import read_texts
from mote.corpora.options import EmbedOptions, GenerateOptions
from mote.corpora.pairs import write_rows
from mote.corpora.record import open_record
from mote.corpora.runs import map_blocks
from mote.files import replaced
from mote.hub import commit_of

FILE = "train.jsonl.gz"
BLOCK = 256  # documents that are finished together, and survive a kill
PROMPT = "Document: {document}\n\nWrite one search query that this document answers, and nothing else.\n\nQuery:"

logger = logging.getLogger(__name__)


def generate_queries(
    files: Sequence[str], out: str | Path, model: str | Path, options: GenerateOptions | None = None, **settings: Any
) -> Path:
    """Write queries for the documents of a corpus: a dataset of pairs.

    The same call resumes an interrupted run. Texts and queries are in memory. Errors are those of `embed_corpus`.

    Args:
        files: Files, patterns, folders with files for the split, and `hub:user/name`, as for `embed_corpus`.
        out: Folder for `train.jsonl.gz`, with the columns `query` and `document`.
        model: A sequence-to-sequence or causal model of transformers: a folder, or an id on the Hub. If it has a chat
            template, the prompt is the user's message.
        options: What to generate, and how.
        **settings: Fields of `GenerateOptions`, which replace those of `options`.

    Returns:
        The folder. `record.json` holds the options, and the numbers of documents and queries.
    """
    chosen, folder = GenerateOptions(**{**dict(options or ()), **settings}), Path(out)
    commit = commit_of(str(model), chosen.revision)
    documents = [text.text for text in read_texts(files, EmbedOptions(split=chosen.split, subset=chosen.subset))]
    identity = {
        **{name: value for name, value in chosen.own().items() if name != "device"},
        "command": "generate",
        "model": [commit or folder_hash(Path(model)), chosen.model_dtype],
        "texts": hashlib.sha256(json.dumps(documents).encode()).hexdigest(),
    }
    write = partial(_write, documents, cache(partial(_load, str(model), commit, chosen)), chosen)
    with open_record(folder, "record.json") as record:
        record.start(identity, chosen.overwrite)
        record.update(source=str(model))
        if not record.is_finished(FILE):
            written = map_blocks(record.work, len(documents), write, "Generating", BLOCK)["queries"].tolist()
            pairs = [
                {"query": query, "document": document}
                for document, queries in zip(documents, written, strict=True)
                for query in dict.fromkeys(filter(None, queries))
            ]
            with replaced(record.folder / FILE) as unfinished:
                write_rows(unfinished, pairs)
            record.add(FILE, documents=len(documents), queries=len(pairs))
        logger.info("%s queries for %s documents", record.finished[FILE]["queries"], len(documents))
    return folder


def _load(source: str, commit: str | None, options: GenerateOptions) -> tuple[Any, Any]:
    """Load a model and its tokenizer."""
    from sentence_transformers.util import get_device_name
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

    settings: Any = {"revision": commit, "trust_remote_code": options.trust_remote_code}
    causal = not AutoConfig.from_pretrained(source, **settings).is_encoder_decoder
    kind: Any = AutoModelForCausalLM if causal else AutoModelForSeq2SeqLM
    model = kind.from_pretrained(source, dtype=options.model_dtype or "auto", **settings)
    # A causal model continues the end of a row.
    tokenizer = AutoTokenizer.from_pretrained(source, padding_side="left" if causal else "right", **settings)
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    return model.to(options.device or get_device_name()).eval(), tokenizer


def _write(
    documents: Sequence[str], load: Callable[[], tuple[Any, Any]], options: GenerateOptions, rows: np.ndarray
) -> dict[str, np.ndarray]:
    """Write the queries of some documents, [R, queries], in batches of similar length; some may be empty."""
    import torch

    (model, tokenizer), count = load(), options.queries
    causal, chat = not model.config.is_encoder_decoder, tokenizer.chat_template is not None
    cut: Any = {"truncation": True, "max_length": options.max_length, "add_special_tokens": False}
    read: Any = {"padding": True, "add_special_tokens": not chat, "return_token_type_ids": False}
    texts = [documents[row] for row in rows.tolist()]
    order = sorted(range(len(texts)), key=lambda place: len(texts[place]))
    queries = np.empty((len(rows), count), dtype=object)
    torch.manual_seed(options.seed + int(rows[0]))
    for start in range(0, len(rows), options.batch_size):
        places = order[start : start + options.batch_size]
        tokens = tokenizer([texts[place] for place in places], **cut)["input_ids"]
        template = options.prompt or (PROMPT if causal else "{document}")
        prompts = [template.replace("{document}", text) for text in tokenizer.batch_decode(tokens)]
        if chat:
            messages = [[{"role": "user", "content": prompt}] for prompt in prompts]
            prompts = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        inputs = tokenizer(prompts, return_tensors="pt", **read).to(model.device)
        drawn: Any = {"do_sample": True, "top_k": options.top_k, "num_return_sequences": count}
        length = {"max_new_tokens": options.max_new_tokens, "pad_token_id": tokenizer.pad_token_id}
        sequences = model.generate(**inputs, **drawn, **length)
        new = sequences[:, inputs["input_ids"].shape[1] if causal else 0 :]
        lines = (text.strip().splitlines() for text in tokenizer.batch_decode(new, skip_special_tokens=True))
        queries[places] = np.array([next(iter(each), "") for each in lines]).reshape(-1, count)
    return {"queries": queries.astype(str)}
