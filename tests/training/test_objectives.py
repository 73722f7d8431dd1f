"""The objectives of pre-training: losses, the decoder, and whose weights they train."""

from typing import Any

import pytest
import torch
from helpers.families import dense_model
from transformers import AutoModelForMaskedLM

from mote.remote.configuration_mote import MoTEConfig
from mote.remote.masked_lm_mote import MoTEForMaskedLM
from mote.training.objectives import Decoder, Pretraining
from mote.training.pretraining_recipe import DecoderSettings


def masked_lm() -> MoTEForMaskedLM:
    """A MoTE with a head; without dropout."""
    still: Any = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    native = AutoModelForMaskedLM.from_config(dense_model("bert", **still).config)
    return MoTEForMaskedLM(MoTEConfig(backbone_config=native.config, pooling="cls", experts=["a", "b"]), native)


def test_an_autoregressive_decoder_sees_the_vector_and_a_window() -> None:
    backbone = dense_model("bert").config
    decoder = Decoder(backbone, DecoderSettings(kind="autoregressive", layers=1, attention_window=3)).eval()
    hidden = torch.randn(1, 8, backbone.hidden_size, requires_grad=True)
    decoded = decoder(hidden, torch.ones(1, 8, dtype=torch.long))
    for position in range(8):
        (gradient,) = torch.autograd.grad(decoded[0, position, 0], hidden, retain_graph=True)
        seen = (gradient[0].abs().sum(-1) > 1e-9).nonzero().flatten().tolist()
        assert seen == sorted({0, *range(max(0, position - 2), position + 1)})


def test_the_decoder_trains_the_encoder_through_the_vector() -> None:
    torch.manual_seed(0)
    model = Pretraining(masked_lm(), DecoderSettings(layers=1))
    ids = torch.randint(5, 50, (4, 6))
    labels = torch.full_like(ids, -100)
    labels[:, 2] = ids[:, 2]
    out = model(ids, torch.ones_like(ids), labels, None, torch.tensor([1, 1, 1, 1]), ids, torch.ones_like(ids), labels)
    out.decoder_loss.backward()
    trained = {name for name, weight in model.model.named_parameters() if weight.grad is not None and weight.grad.any()}
    blocks = {name for name, _ in model.model.named_parameters() if ".layer." in name}
    key_bias = {name for name in blocks if name.endswith("key.bias")}  # changes nothing
    assert {name for name in blocks if ".experts.a." not in name} - key_bias <= trained
    assert not {name for name in trained if ".experts.a." in name}
    assert out.loss.item() == pytest.approx(out.encoder_loss.item() + out.decoder_loss.item())


def test_the_losses_of_mini_batches_add_up() -> None:
    """Whatever share of the tokens to predict a mini-batch has."""
    torch.manual_seed(0)
    model = Pretraining(masked_lm()).eval()
    ids = torch.randint(5, 50, (6, 8))
    labels = ids.masked_fill(torch.rand(6, 8) < torch.linspace(0.2, 1, 6)[:, None], -100)
    tasks = torch.tensor([0, 1, 0, 1, 0, 1])
    count = (labels != -100).sum()

    def gradients(*parts: slice) -> tuple[float, torch.Tensor]:
        model.zero_grad()
        total = 0.0
        for part in parts:
            loss = model(
                ids[part], torch.ones_like(ids[part]), labels[part], None, tasks[part], num_items_in_batch=count
            )
            loss.loss.backward()
            total += loss.loss.item()
        return total, torch.cat([weight.grad.flatten() for weight in model.parameters() if weight.grad is not None])

    loss, gradient = gradients(slice(None))
    assert loss == pytest.approx(model(ids, torch.ones_like(ids), labels, None, tasks).loss.item())
    for parts in ((slice(0, 2), slice(2, 6)), (slice(0, 3), slice(3, 6))):
        in_parts = gradients(*parts)
        assert in_parts[0] == pytest.approx(loss)
        assert torch.allclose(in_parts[1], gradient, atol=1e-6)


def test_a_batch_without_masked_tokens() -> None:
    """As the last batch of an epoch, of a single short text, may be: its loss is 0, not the mean over nothing."""
    model = Pretraining(masked_lm())
    ids = torch.randint(5, 50, (2, 4))
    output = model(ids, torch.ones_like(ids), torch.full_like(ids, -100), None, torch.tensor([0, 1]))
    output.loss.backward()
    assert output.loss.item() == 0
    assert not any(weight.grad.any() for weight in model.parameters() if weight.grad is not None)
