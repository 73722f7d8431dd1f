"""What MTEB wants to know about a model: `mteb.ModelMeta`, read from the model's own files."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from mteb.models import ModelMeta, SentenceTransformerEncoderWrapper, SparseEncoderWrapper
from mteb.models.model_meta import ScoringFunction
from mteb.models.models_protocols import MTEBModels
from transformers import PreTrainedModel

from mote.checkpoints.hashing import folder_hash
from mote.checkpoints.models import dense_without_weights
from mote.checkpoints.reading import Checkpoint, is_mote, mote_class, open_checkpoint
from mote.checkpoints.sentence_transformers import embedding_dimension, max_seq_length, source_prompts
from mote.checkpoints.st_settings import retrieval_in
from mote.checkpoints.tensors import parameter_counts
from mote.inference.loading import is_sparse_encoder
from mote.remote.configuration_mote import MTEB_PROMPTS, ROLE_HINTS


def model_meta(source: str | Path, revision: str | None = None) -> ModelMeta:
    """Describe a model to MTEB: `meta.load_model()` loads it, `mteb.evaluate(meta, …)` scores it.

    `mteb.get_model` loads only ids on the Hub, does not find a MoTE's dimension and active parameters, and lets
    Transformers ask whether to run the model's code, whatever its arguments say. This function reads files and does not
    ask: loading a MoTE through the result runs the code in its repository.

    Args:
        source: A MoTE or a dense model: a folder, or an id on the Hub.
        revision: Branch, tag or commit on the Hub.

    Returns:
        The name (`local/NAME` for a folder), the revision (the commit, or a hash of the folder's files), dimension,
        maximum number of tokens, parameters in total and in the token embeddings, size of the weights in MiB,
        similarity, and the prompts of MTEB's task types (in `loader_kwargs`). Active parameters are those that a text
        (in a token-routed model, a token) passes through, without the token embeddings, as MTEB counts.

    Raises:
        FileNotFoundError: If the source does not exist or has no weights.
        ValueError: If it is damaged, or of an architecture that is not supported.
    """
    checkpoint = open_checkpoint(str(source), revision)
    routed = is_mote(checkpoint.config)
    if routed:
        with torch.device("meta"):
            model = mote_class(checkpoint.config.model_type, "model")(checkpoint.config)
    else:
        model, _ = dense_without_weights(checkpoint)
    parameters = model.num_parameters()
    embeddings = model.get_input_embeddings().weight.numel()
    settings = checkpoint.read_json("config_sentence_transformers.json")
    names = (*MTEB_PROMPTS, *ROLE_HINTS)  # MTEB warns about all others
    prompts = {key: text for key, text in source_prompts(checkpoint).items() if key in names}
    path = str(Path(source).resolve()) if checkpoint.is_local else checkpoint.name
    kind = retrieval_in(checkpoint.folder).kind
    if kind == "dense":
        dimension = embedding_dimension(checkpoint)
    else:
        dimension = checkpoint.config.vocab_size + (checkpoint.config.hidden_size if kind == "hybrid" else 0)
    return ModelMeta.create_empty(
        {
            "loader": partial(load_encoder_wrapper, path),
            "loader_kwargs": {
                **({"trust_remote_code": True} if routed else {}),
                **({"model_prompts": prompts} if any(prompts.values()) else {}),
            },
            "name": mteb_name(source),
            "revision": checkpoint.revision or folder_hash(checkpoint.folder),
            "n_parameters": parameters,
            "n_active_parameters_override": parameter_counts(model)["active"] - embeddings if routed else None,
            "n_embedding_parameters": embeddings,
            "memory_usage_mb": round(sum(path.stat().st_size for path in checkpoint.weights) / 1024**2),
            "max_tokens": _max_tokens(model, checkpoint),
            "embed_dim": dimension,
            **({"model_type": ["sparse"]} if kind != "dense" else {}),
            "framework": ["Sentence Transformers", "PyTorch", "Transformers", "safetensors"],
            "reference": None if checkpoint.is_local else f"https://huggingface.co/{checkpoint.name}",
            "similarity_fn_name": ScoringFunction.from_str(settings.get("similarity_fn_name") or "cosine"),
            "use_instructions": any(source_prompts(checkpoint).values()),
        }
    )


def mteb_name(source: str | Path) -> str:
    """Name a model for MTEB: `local/NAME` for a folder, the full id on the Hub otherwise."""
    if Path(source).is_dir():
        return f"local/{Path(source).resolve().name}"
    return str(source) if "/" in str(source) else f"sentence-transformers/{source}"


def load_encoder_wrapper(path: str, name: str, revision: str | None = None, **kwargs: Any) -> MTEBModels:
    """Load a model for mteb, which also gives its name, and as revision of a folder its hash."""
    revision = None if Path(path).is_dir() else revision
    wrapper = SparseEncoderWrapper if is_sparse_encoder(path, revision) else SentenceTransformerEncoderWrapper
    return wrapper(path, revision=revision, **kwargs)


def _max_tokens(model: PreTrainedModel, checkpoint: Checkpoint) -> int | None:
    """Return the number of tokens at which Sentence-Transformers truncates texts."""
    of_tokenizer = checkpoint.read_json("tokenizer_config.json").get("model_max_length")
    return max_seq_length(model, checkpoint) or (of_tokenizer if of_tokenizer and of_tokenizer < 10**9 else None)
