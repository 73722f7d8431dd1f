"""Load the models and tokenizers of checkpoints.

A dense model always uses transformers' own class for the architecture, so that the library converts published key
names. What the library would only report (weights that stay random) is an error here.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import RLock
from typing import Any

import torch
from transformers import AutoModel, AutoModelForMaskedLM, AutoTokenizer, PreTrainedModel
from transformers.utils import is_sentencepiece_available
from transformers.utils import logging as transformers_logging

from mote.checkpoints import nomic
from mote.checkpoints.plain import learned_positions
from mote.checkpoints.reading import Checkpoint, has_head, is_mote, mote_class
from mote.checkpoints.tensors import HEAD, read_on_meta, read_shapes
from mote.files import refuse_pointer
from mote.remote.modeling_mote import MoTEModel

logger = logging.getLogger(__name__)

_LOADING = RLock()

# Tokens that a tokenizer itself puts into texts.
_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

# Heads of pre-training and fine-tuning, which a checkpoint may hold beside the encoder. They are dropped; any other
# key that the encoder does not have is an error.
HEADS = (
    *("cls", "lm_head", "head", "decoder", "vocab_layer_norm", "vocab_projector", "vocab_transform"),
    *("discriminator_predictions", "generator_lm_head", "generator_predictions"),
    *("classifier", "pre_classifier", "pooler", "qa_outputs", "score"),
)


def load_mote(checkpoint: Checkpoint, experts: list[str] | None = None, *, with_head: bool = False) -> MoTEModel:
    """Load a MoTE in its stored dtype: all or some of its experts, with or without the head that it may have."""
    read_on_meta(checkpoint.weights)  # its errors name the file
    with quiet_transformers():
        kind: Any = "masked_lm" if with_head and has_head(checkpoint.config) else "model"
        model = mote_class(checkpoint.config.model_type, kind).from_pretrained(
            checkpoint.folder, dtype="auto", experts=experts
        )
    model.config._name_or_path = checkpoint.public_name  # no local path
    return model.eval()


def load_dense(
    checkpoint: Checkpoint, dtype: str | torch.dtype = "auto", *, with_head: bool = False
) -> tuple[PreTrainedModel, list[str]]:
    """Load the native dense model, or a token-routed one, with every weight, and the keys of heads, which it lacks."""
    read_on_meta(checkpoint.weights)  # its errors name the file
    return _loaded(checkpoint, with_head, checkpoint.transformer, dtype=dtype)


def dense_without_weights(
    checkpoint: Checkpoint, dtype: str | torch.dtype = "auto", *, with_head: bool = False
) -> tuple[PreTrainedModel, list[str]]:
    """Build what `load_dense` returns, after the same checks, on the meta device."""
    weights = read_on_meta(checkpoint.weights)
    return _loaded(checkpoint, with_head, None, dtype=dtype, state_dict=weights, device_map="meta")


def positions_of(checkpoint: Checkpoint) -> int | None:
    """Return the number of tokens that have a learned position in a model, from its config; as `learned_positions`."""
    config = checkpoint.config
    new = mote_class(config.model_type, "model") if is_mote(config) else AutoModel.from_config
    with quiet_transformers(), torch.device("meta"):
        return learned_positions(new(config))


def _loaded(
    checkpoint: Checkpoint, with_head: bool, place: Path | None, **settings: Any
) -> tuple[PreTrainedModel, list[str]]:
    """Load by the native class, and check that all weights fit."""
    config = checkpoint.config
    settings |= {"config": config, "key_mapping": checkpoint.key_mapping or None}
    settings |= {"ignore_mismatched_sizes": True, "output_loading_info": True}  # the check reports and names them
    with quiet_transformers():
        if is_mote(config):
            native = mote_class(config.model_type, "model")
        else:
            with torch.device("meta"):
                native = type((AutoModelForMaskedLM if with_head else AutoModel).from_config(config))
        model, info = native.from_pretrained(place, **settings)
    return _checked(checkpoint, model, info)


def _checked(checkpoint: Checkpoint, model: PreTrainedModel, info: dict[str, Any]) -> tuple[PreTrainedModel, list[str]]:
    """Return the model, and the keys of heads that it lacks; raise `ValueError` unless all weights fit."""
    prefix, headless = f"{model.base_model_prefix}.", ""
    missing = [key for key in info["missing_keys"] if not key.startswith("pooler.")]  # a MoTE pools by itself
    if model.base_model is not model:
        lost = sorted(key for key in missing if not key.startswith(prefix))
        if checkpoint.format == "nomic" and all(key.endswith("bias") for key in lost):
            missing = [key for key in missing if key not in lost]  # not published: the native head's start as zeros
        elif lost:
            headless = " Without a head in the files, leave out `--with-head`, or pre-train with model.new_head=true."
    dropped = sorted(key for key in info["unexpected_keys"] if key.removeprefix(prefix).split(".")[0] in HEADS)
    pooling = {*checkpoint.pooling_weights.values()}
    missing += pooling - {*info["unexpected_keys"]}
    unexpected = sorted(set(info["unexpected_keys"]) - {*dropped, *pooling})
    if is_mote(checkpoint.config):  # its class drops the head silently
        dropped = sorted(key for key in read_shapes(checkpoint.weights) if key.startswith(HEAD))
    for problem, keys in (("lack", missing), ("hold unknown", unexpected), ("misshape", info["mismatched_keys"])):
        if keys:
            shown = ", ".join(sorted(map(str, keys))[:5]) + (" …" if len(keys) > 5 else "")
            inner = f".{min(missing)}" if missing else ""
            wrapped = next((key.removesuffix(inner) for key in unexpected if inner and key.endswith(inner)), None)
            unwrap = f" They are those of a model wrapped as {wrapped!r}: save the model itself." if wrapped else ""
            raise ValueError(
                f"The weights of {checkpoint.name} {problem} {len(keys)} keys of {type(model).__name__}: "
                f"{shown}. Known heads are dropped ({', '.join(HEADS)}); anything else must match.{headless}{unwrap}"
            )
    model.config._name_or_path = checkpoint.public_name  # no local path
    return model.eval(), dropped


def load_tokenizer(checkpoint: Checkpoint, tokenizer: str | None = None) -> Any:
    """Load the tokenizer of a checkpoint, or another one for it.

    Some published tokenizers have added tokens without embeddings (Gemma 3's for images); texts do not contain them.
    """
    folder, files = checkpoint.transformer, ("tokenizer.json", "tokenizer_config.json", "vocab.txt")
    has_own = any((folder / name).is_file() for name in files) or any(folder.glob("*.model"))
    name: str | Path
    if tokenizer is not None:
        name = tokenizer
    elif has_own:
        name = folder
    elif checkpoint.format == "nomic":
        name = nomic.TOKENIZER
    else:
        raise ValueError(
            f"{checkpoint.name} has no tokenizer: name one with `--tokenizer`, a folder or an id on the Hub"
        )
    # with the config given, the library does not ask whether to run the code of a MoTE or NV-Embed
    own = name == folder and checkpoint.format in ("mote", "nv_embed")
    given = {"config": checkpoint.config} if own else {}
    try:
        loaded = AutoTokenizer.from_pretrained(name, **given)
        added = loaded.get_added_vocab()
    except Exception as error:  # damaged files raise any kind of error, also tokenizers' own
        for file in Path(name).glob("*.*"):
            refuse_pointer(file)
        needs = not is_sentencepiece_available() and any(Path(name).glob("*.model"))
        message = f"{type(error).__name__}: {error}" if not isinstance(error, OSError | ValueError) else error
        remedy = ". It may need: pip install sentencepiece" if needs else ""
        raise ValueError(f"The tokenizer {name} for {checkpoint.name} cannot be loaded: {message}{remedy}") from error
    size = checkpoint.config.vocab_size
    without = [token for token, number in added.items() if number >= size]
    invented = lacks_vocabulary(loaded)
    if invented or loaded.vocab_size > size or any(getattr(loaded, role) in without for role in _ROLES):
        more = f"has {len(loaded)} tokens, but {checkpoint.name} has embeddings for {size} only"
        raise ValueError(
            f"The tokenizer {name} " + ("has no vocabulary: its tokenizer.json is missing" if invented else more)
        )
    if without:
        logger.warning("%s has no embeddings for %s: texts must not contain them", checkpoint.name, ", ".join(without))
    for name in ("auto_map", "is_local", "local_files_only"):  # code of the source, and where it was
        loaded.init_kwargs.pop(name, None)
    return loaded


def lacks_vocabulary(tokenizer: Any) -> bool:
    """Whether a tokenizer has only special tokens, which the library makes up where the files have no vocabulary."""
    return bool(tokenizer.get_vocab().keys() <= tokenizer.get_added_vocab().keys())


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence the library while it loads (only errors are logged, no progress bars), and load in one thread at a time.

    Both these settings and the library's loading change state of the whole process. Two threads that load at once can
    leave `PreTrainedModel.tie_weights` replaced by a function that does nothing (5.23), for all later models.
    """
    with _LOADING:
        verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()
        try:
            yield
        finally:
            transformers_logging.set_verbosity(verbosity)
            if bars:
                transformers_logging.enable_progress_bar()
