"""MoTE with a head for masked language modelling: `AutoModelForMaskedLM.from_pretrained(path, trust_remote_code=True)`.

The head is that of the backbone's family. Transformers' own class for the family, such as `BertForMaskedLM`, is built
whole; its encoder becomes the MoTE's backbone, and a stand-in takes its place. So the head's modules, forward and loss
are the library's, and all experts share the head.

This file is only copied into saved models that have a head. For these, `AutoModel` loads the same weights without the
head.
"""

from typing import Any

import torch
from torch import nn
from transformers import AutoModelForMaskedLM, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput, BaseModelOutputWithPooling, MaskedLMOutput
from transformers.utils import can_return_tuple

from .configuration_mote import MoTEConfig
from .modeling_mote import MoTEModel


class HiddenStates(nn.Module):
    """Replaces the encoder of a native model: returns the hidden states that it is given as `inputs_embeds`."""

    def forward(self, *args: Any, inputs_embeds: torch.Tensor, **kwargs: Any) -> BaseModelOutput:
        """[B, L, H] → the same as `last_hidden_state`."""
        return BaseModelOutput(last_hidden_state=inputs_embeds)

    def get_input_embeddings(self) -> None:
        """Return None: the native model calls this before it returns its output embeddings."""


class MoTEForMaskedLM(MoTEModel):
    """A `MoTEModel` with the masked-language-model head of its backbone's family.

    `dense` is a native model with its head to take over ("upcycle"), such as a `BertForMaskedLM`.
    """

    accepts_loss_kwargs = False  # most families' losses are means over a batch, which a Trainer must know
    _tied_with_head: dict[str, str] = {}  # none until there is a head

    def __init__(self, config: MoTEConfig, dense: PreTrainedModel | None = None) -> None:
        native: Any = AutoModelForMaskedLM.from_config(config.backbone_config) if dense is None else dense
        prefix, encoder, tied = native.base_model_prefix, native.base_model, native.all_tied_weights_keys
        setattr(native, prefix, HiddenStates())
        native.all_tied_weights_keys = {}  # this model ties them now
        super().__init__(config, encoder)
        self.head = native
        self._tied_with_head = {f"head.{name}": _name_here(source, prefix) for name, source in tied.items()}
        self.post_init()

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """Name the tied weights: those of the native model."""
        return dict(self._tied_with_head)

    def get_output_embeddings(self) -> Any:
        """Return the projection to the vocabulary."""
        return self.head.get_output_embeddings()

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Replace the projection to the vocabulary."""
        self.head.set_output_embeddings(new_embeddings)

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        task: str | list[str] | None = None,
        task_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> MaskedLMOutput:
        """Predict the tokens of a batch, each sequence through the expert of its task.

        Arguments and errors are those of `MoTEModel.forward`, and `labels` [B, L], the tokens to predict, and -100
        elsewhere. Further ones are passed to the backbone and the family's loss.

        Returns:
            `logits` [B, L, V], and the family's `loss` if there are `labels`; `hidden_states` and `attentions` if
            requested.
        """
        inputs = (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, task, task_ids)
        encoded = super().forward(*inputs, **kwargs, return_dict=True)
        out = self.head(inputs_embeds=encoded.last_hidden_state, labels=labels, **kwargs, return_dict=True)
        return MaskedLMOutput(
            loss=out.loss, logits=out.logits, hidden_states=encoded.hidden_states, attentions=encoded.attentions
        )

    def embed(
        self,
        input_ids: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        token_type_ids: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        task: str | list[str] | None = None,
        task_ids: torch.Tensor | None = None,
        balance_share: float | None = None,
    ) -> BaseModelOutputWithPooling:
        """Run only the encoder, as in `MoTEModel.forward`: hybrid encoders pool its output before calling the head.

        `balance_share`, of token-routed models, is named here since Sentence-Transformers only passes what is.
        """
        inputs = (input_ids, attention_mask, token_type_ids, position_ids, inputs_embeds, task, task_ids)
        share = {} if balance_share is None else {"balance_share": balance_share}
        return super().forward(*inputs, **share, return_dict=True)

    def save_pretrained(self, *args: Any, **kwargs: Any) -> None:
        """As in the base class; also lets `AutoModel` find the model without its head."""
        headless = next(each for each in type(self).__mro__ if vars(each).get("_auto_class") == "AutoModel")
        where = f"{headless.__module__.rpartition('.')[2]}.{headless.__name__}"
        self.config.auto_map = {**(getattr(self.config, "auto_map", None) or {}), "AutoModel": where}
        super().save_pretrained(*args, **kwargs)


def _name_here(key: str, prefix: str) -> str:
    """Rename a weight of the native model, whose encoder is at `prefix`."""
    return f"backbone.{key.removeprefix(prefix + '.')}" if key.startswith(prefix + ".") else f"head.{key}"


MoTEForMaskedLM.register_for_auto_class("AutoModelForMaskedLM")
AutoModelForMaskedLM.register(MoTEConfig, MoTEForMaskedLM, exist_ok=True)
