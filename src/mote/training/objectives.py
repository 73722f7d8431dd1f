"""Objectives of pre-training: masked language modelling, alone or with a decoder that is discarded at the end.

CoT-MAE (Wu et al., "ConTextual Masked Auto-Encoder for Dense Passage Retrieval", AAAI 2023): a weak decoder rebuilds a
text's context from the single vector that the encoder makes from the text, so that the vector has to hold what the
context needs. CoT-MoTE (Ma et al., arXiv:2304.10195) does this with query and passage experts.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel, GPT2Config, GPT2Model
from transformers.masking_utils import create_bidirectional_mask, create_causal_mask
from transformers.utils import ModelOutput

from mote.remote.masked_lm_mote import MoTEForMaskedLM
from mote.training.pretraining_recipe import DecoderSettings

IGNORED = -100  # a token that is not predicted
# Settings of a backbone that its decoder takes over.
SIZES = ("hidden_size", "num_attention_heads", "intermediate_size")
LAYERS = ("hidden_act", "hidden_dropout_prob", "attention_probs_dropout_prob", "layer_norm_eps")


@dataclass
class PretrainingOutput(ModelOutput):
    """The training loss, and the means over the encoder's and the decoder's predicted tokens.

    In a mini-batch they are multiplied by its share of the batch's tokens to predict, so that those of a batch add up.
    """

    loss: Tensor | None = None
    encoder_loss: Tensor | None = None
    decoder_loss: Tensor | None = None


class Pretraining(nn.Module):
    """A model with its objective: what the trainer trains; with decoder settings, for `cot-mae`.

    It is not a `PreTrainedModel`, so that checkpoints use the names of the modules, and include the decoder.
    """

    accepts_loss_kwargs = True  # the trainer passes `num_items_in_batch`

    def __init__(self, model: MoTEForMaskedLM, decoder: DecoderSettings | None = None) -> None:
        super().__init__()
        self.model = model
        # As in a `PreTrainedModel`: safetensors stores tied weights only once.
        self._keys_to_ignore_on_save = {f"model.{name}" for name in model.all_tied_weights_keys}
        self.settings = decoder
        self.decoder: Decoder | None = None
        if decoder is not None:
            backbone: Any = model.backbone
            positions = getattr(getattr(backbone, "embeddings", None), "position_embeddings", None)
            if positions is None or positions.weight.shape[1] != backbone.config.hidden_size:
                raise ValueError(
                    "objective: cot-mae needs embeddings with absolute positions and of the hidden size, as in BERT, "
                    f"RoBERTa, XLM-R, DistilBERT and MPNet: {backbone.config.model_type!r} does not have them"
                )
            self.decoder = Decoder(model.config.backbone_config, decoder)

    def tie_weights(self) -> None:
        """Tie the model's weights; the trainer calls this."""
        self.model.tie_weights()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        labels: Tensor,
        token_type_ids: Tensor | None = None,
        task_ids: Tensor | None = None,
        decoder_input_ids: Tensor | None = None,
        decoder_attention_mask: Tensor | None = None,
        decoder_labels: Tensor | None = None,
        num_items_in_batch: Tensor | None = None,
    ) -> PretrainingOutput:
        """Compute the losses of a batch of masked texts [B, L] and contexts [B, C]; tasks are [B].

        Labels are the tokens to predict, -100 elsewhere. The decoder reads the vector in place of a context's first
        token. `num_items_in_batch` is the number of labels in a batch of which this is a mini-batch.
        """
        share = 1.0 if num_items_in_batch is None else (labels != IGNORED).sum() / num_items_in_batch.clamp(min=1)
        # Encoded without the head, which then gets only the tokens to predict: at a small width it costs the most.
        encoded: Any = self.model.embed(input_ids, attention_mask, token_type_ids, task_ids=task_ids)
        encoder_loss = share * self._loss(encoded.last_hidden_state, labels)
        if self.decoder is None or decoder_input_ids is None or decoder_labels is None:
            return PretrainingOutput(loss=encoder_loss)
        settings: Any = self.settings
        embeddings: Any = self.model.backbone.embeddings
        context = torch.cat([encoded.pooler_output[:, None], embeddings(input_ids=decoder_input_ids)[:, 1:]], dim=1)
        decoded = self.decoder(context, decoder_attention_mask)
        if settings.kind == "autoregressive":  # each position predicts the next token
            decoded, decoder_labels = decoded[:, :-1], decoder_labels[:, 1:]
        decoder_loss = share * self._loss(decoded, decoder_labels)
        loss = encoder_loss + settings.weight * decoder_loss
        return PretrainingOutput(loss=loss, encoder_loss=encoder_loss, decoder_loss=decoder_loss)

    def _loss(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Return the head's loss, a mean over the labelled tokens; 0 if a batch of short texts has none."""
        labelled = labels != IGNORED
        if not labelled.any():
            return 0 * hidden.sum()
        return self.model.head(inputs_embeds=hidden[labelled][None], labels=labels[labelled][None]).loss


class Decoder(nn.Module):
    """A few layers of BERT's or GPT-2's, of the backbone's size; GPT-2's are followed by a normalisation."""

    def __init__(self, backbone: Any, settings: DecoderSettings) -> None:
        super().__init__()
        own = {name: getattr(backbone, name) for name in SIZES + LAYERS if hasattr(backbone, name)}
        own = {"intermediate_size": 4 * backbone.hidden_size, **own}
        bert = BertConfig(**own, num_hidden_layers=settings.layers, vocab_size=1, max_position_embeddings=1)
        self.config: Any = bert
        self.window = settings.attention_window
        if settings.kind == "bidirectional":
            self.layers = BertModel(bert, add_pooling_layer=False).encoder.layer
            self.before, self.after = nn.Identity(), nn.Identity()
        else:
            self.config = GPT2Config(
                vocab_size=1,
                n_embd=bert.hidden_size,
                n_head=bert.num_attention_heads,
                n_layer=settings.layers,
                n_positions=backbone.max_position_embeddings,
                resid_pdrop=bert.hidden_dropout_prob,
                embd_pdrop=bert.hidden_dropout_prob,
                attn_pdrop=bert.attention_probs_dropout_prob,
                activation_function=bert.hidden_act,
                layer_norm_epsilon=bert.layer_norm_eps,
                bos_token_id=None,
                eos_token_id=None,
            )
            gpt2: Any = GPT2Model(self.config)
            self.before, self.layers, self.after = gpt2.drop, gpt2.h, gpt2.ln_f

    def forward(self, hidden: Tensor, attention_mask: Tensor | None) -> Tensor:
        """Decode embedded contexts [B, C, H], the vector first."""
        if self.config.model_type == "bert":
            mask = create_bidirectional_mask(self.config, hidden, attention_mask)
        else:
            window = None if self.window is None else self._in_window
            mask = create_causal_mask(self.config, hidden, attention_mask, None, and_mask_function=window)
        hidden = self.before(hidden)
        for layer in self.layers:
            hidden = layer(hidden, attention_mask=mask)
        return self.after(hidden)

    def _in_window(self, batch: Any, head: Any, query: Any, key: Any) -> Any:
        """A position sees the vector, itself, and the tokens just before it."""
        return (key == 0) | (query - key < self.window)
