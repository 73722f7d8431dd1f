"""The model families that MoTE supports. This file is copied into every saved model and loaded from there."""

from typing import Any, NamedTuple

from transformers import MPNetModel
from transformers.masking_utils import create_bidirectional_mask

from .configuration_mote import MoTEConfig, alternatives


class Architecture(NamedTuple):
    """What differs between model families."""

    layer_path: str  # of the list of layers in the model
    shared_modules: tuple[str, ...]  # paths, in a layer, of the modules that all experts share: attention and its norms


_BERT = Architecture("encoder.layer", ("attention.self", "attention.output.dense"))
_PRE_NORM = Architecture("layers", ("self_attn", "input_layernorm"))
_SANDWICH_NORM = Architecture("layers", ("self_attn", "input_layernorm", "post_attention_layernorm"))

ARCHITECTURES = {
    **dict.fromkeys(["nomic_bert", "jina_embeddings_v3", "gte"], Architecture("layers", ("self_attn",))),
    **dict.fromkeys(["bert", "roberta", "xlm-roberta", "camembert", "electra", "ernie"], _BERT),
    "mpnet": Architecture("encoder.layer", ("attention.attn",)),
    "distilbert": Architecture("transformer.layer", ("attention",)),
    "modernbert": Architecture("layers", ("attn", "attn_norm")),
    **dict.fromkeys(["eurobert", "mistral", "qwen2", "qwen3", "llama"], _PRE_NORM),
    **dict.fromkeys(["gemma2", "gemma3_text"], _SANDWICH_NORM),
}

REFUSED_ARCHITECTURES = {
    "albert": "it uses one layer again and again, so its blocks cannot have experts of their own",
    "deberta": "it does not pass keyword arguments down to its layers, so they cannot be told the expert",
    "deberta-v2": "it does not pass keyword arguments down to its layers, so they cannot be told the expert",
}


def architecture_of(config: MoTEConfig) -> Architecture:
    """Look up the row of the config's backbone; raise a `ValueError` that says what to do if there is none."""
    model_type = config.backbone_config.model_type
    reason = REFUSED_ARCHITECTURES.get(model_type)
    if config.layer_path is not None and reason is None:
        return Architecture(config.layer_path, tuple(config.shared_modules or ()))
    if model_type not in ARCHITECTURES:
        unknown = (
            "describe it by its layer_path (of the list of layers, as in 'encoder.layer') and shared_modules (of the "
            f"attention, in a layer), or `--layer-path … --shared-module …`.{alternatives(model_type, ARCHITECTURES)}"
        )
        raise ValueError(f"MoTE does not support {model_type!r}: {reason or unknown}")
    return ARCHITECTURES[model_type]


class MPNetBackbone(MPNetModel):
    """MPNet with a forward that passes keyword arguments on to the encoder; the original drops them."""

    def forward(self, input_ids: Any = None, attention_mask: Any = None, **kwargs: Any) -> Any:
        """Embed, mask and encode, as in the base class."""
        others = {name: kwargs.pop(name, None) for name in ("position_ids", "inputs_embeds")}
        embedded = self.embeddings(input_ids=input_ids, **others)
        mask = create_bidirectional_mask(config=self.config, inputs_embeds=embedded, attention_mask=attention_mask)
        return self.encoder(embedded, attention_mask=mask, **{**kwargs, "return_dict": True})
