"""Writes the MoTE of a plan, from the files of its source where possible."""

import logging
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

from mote.checkpoints import nomic_moe, nv_embed
from mote.checkpoints.cards import UPCYCLED
from mote.checkpoints.models import dense_without_weights, load_dense, load_tokenizer, quiet_transformers
from mote.checkpoints.provenance import RECORD_FILE, command_line, new_step
from mote.checkpoints.reading import Checkpoint, mote_class
from mote.checkpoints.st_settings import write_instruction_pooling
from mote.checkpoints.streaming import DenseWeights, can_stream, write_weights
from mote.checkpoints.tensors import MappedFiles
from mote.checkpoints.tokens import EOS, apply_end_token, ends_texts, with_padding_token
from mote.checkpoints.writing import Repository, require_writable
from mote.remote.modeling_mote import MoTEModel
from mote.upcycling.options import UpcyclingOptions
from mote.upcycling.plan import UpcyclingPlan, plan_upcycling

logger = logging.getLogger(__name__)


def upcycle(
    src: str | Path | Checkpoint,
    out: str | Path | None = None,
    options: UpcyclingOptions | None = None,
    **settings: Any,
) -> Path:
    """Turn a dense checkpoint into a complete MoTE model repository.

    Args:
        src: A folder or an id on the Hub, with safetensors or `.bin` files, or an opened checkpoint: a dense model, or
            a token-routed one in our format, whose task experts are then token-routed themselves. Nomic Embed v2
            (`nomic-ai/nomic-embed-text-v2-moe`), token-routed as published, is converted with all of its weights.
        out: Folder to write. Default: the source's name with `-mote`, in the current folder.
        options: Settings.
        **settings: The same as keyword arguments: `upcycle(src, experts=["a", "b"], overwrite=True)`.

    Returns:
        The folder.
    """
    options = (options or UpcyclingOptions()).updated(**settings)
    plan = plan_upcycling(src, out, options)
    source, pooled = plan.source, options.instruction_pooling
    repo_id = require_writable(plan.out, options, source.folder)
    logger.info("%s", plan)
    tokenizer = with_padding_token(load_tokenizer(source, options.tokenizer))
    end_token = options.end_token
    if source.format == "nv_embed":
        tokenizer, end_token, pooled = nv_embed.padded(tokenizer), end_token or EOS, pooled or "excluded"
    if options.tokenizer is None or end_token is not None:
        tokenizer = apply_end_token(tokenizer, source, end_token)
    if plan.config.pooling == "last_token" and not ends_texts(tokenizer):
        logger.warning(
            "The last token of a text is pooled, but the tokenizer appends no end token: long texts end where they are "
            "truncated. Add one with `--end-token eos`"
        )
    model, dropped, write = _model_and_its_writer(plan, options.max_shard_size)
    changed = options.changed()
    if options.tokenizer is not None and Path(options.tokenizer).is_dir():
        changed["tokenizer"] = Path(options.tokenizer)  # without its parents
    listed = {"layers": ",".join(map(str, options.layers))} if isinstance(options.layers, list) else {}
    published = source.format == "nomic_moe" or (source.format == "nv_embed" and options.experts is None)
    place = {} if out is None else {"out": plan.out.resolve()}
    command = command_line("upcycle", src=source.public_name, **{**place, **changed, **listed})
    if dropped:
        logger.info("Dropping %d weights of pre-training heads (listed in %s)", len(dropped), RECORD_FILE)
    step = new_step(
        "upcycle",
        command=command,
        settings=changed,
        made="converted from" if published else UPCYCLED,
        dropped=dropped,
        parameters=plan.counts,
    )
    repository = Repository(
        model,
        source,
        [step],
        tokenizer=tokenizer,
        write_weights=write,
        retrieval=plan.retrieval,
        after=None if pooled is None else partial(write_instruction_pooling, value=pooled),
    )
    return repository.write(plan.out, options, repo_id)


def _model_and_its_writer(
    plan: UpcyclingPlan, max_shard_size: str
) -> tuple[MoTEModel, list[str], Callable[[Path], None] | None]:
    """Make sure that the source's weights fit; return the MoTE and the keys of heads that are dropped.

    If the weights can be streamed from the source's files, the model holds none, and a function writes them.
    """
    dtype = plan.config.dtype or "auto"
    if plan.source.format == "nomic_moe":
        logger.info("Reading the published model …")
        files = MappedFiles(plan.source.weights)
        with quiet_transformers():
            published = {key: files[key] for key in files.stored}
            return nomic_moe.load(plan.config, published, dtype), [], None  # type: ignore[arg-type]
    logger.info("Reading the source …")
    with_head = plan.with_head
    new_model = mote_class(plan.config.model_type, "masked_lm" if with_head else "model")
    dense, dropped = dense_without_weights(plan.source, dtype, with_head=with_head)
    if not with_head:  # a head's weights are not named as the encoder's, and most are tied
        weights = DenseWeights(plan.source, dense)
        in_files = bool(plan.source.pooling_weights)
        with torch.device("meta") if in_files else nullcontext():  # in NV-Embed they take gigabytes
            model = new_model(plan.config, dense)
        new = _new_weights(model)
        weights.add({} if in_files else new)
        if can_stream(model, weights):
            logger.info("Copying its blocks into %d experts …", len(plan.config.experts))
            return model, dropped, partial(write_weights, model, weights, max_shard_size=max_shard_size)
        if in_files:
            raise ValueError(f"{plan.source.public_name}: the weights of its pooling can only be copied file by file")
    dense, dropped = load_dense(plan.source, dtype, with_head=with_head)
    logger.info("Copying its blocks into %d experts, in memory …", len(plan.config.experts))
    model = new_model(plan.config, dense)
    _new_weights(model)
    return model, dropped, None


def _new_weights(model: MoTEModel) -> dict[str, torch.Tensor]:
    """Give pooling by attention the dtype of the other weights, and return its random weights by name."""
    pooling: Any = getattr(model, "pooling", None)
    if pooling is None:
        return {}
    return {f"pooling.{name}": weight for name, weight in pooling.to(model.config.dtype).state_dict().items()}
