"""CoT-MAE against the losses and gradients of its authors' code, on recorded batches."""

import json
from typing import Any

import pytest
import torch
from helpers.paths import ROOT
from safetensors.torch import load_file
from transformers import BertConfig, BertForMaskedLM

from mote.checkpoints.tensors import weight_name
from mote.remote.configuration_mote import MoTEConfig
from mote.remote.masked_lm_mote import MoTEForMaskedLM
from mote.training.objectives import Pretraining
from mote.training.pretraining_recipe import DecoderSettings

REFERENCE = ROOT.parent / "shared" / "fixtures" / "cot-mae-reference"

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not REFERENCE.is_dir(), reason="the reference values are not here")]


def objective(weights: dict[str, torch.Tensor], settings: DecoderSettings) -> tuple[Pretraining, dict[str, str]]:
    """Build the model of the reference, and its names of weights → ours."""
    config = BertConfig.from_json_file(REFERENCE / "config.json")
    native = BertForMaskedLM(config)
    native.load_state_dict(
        {name: weight for name, weight in weights.items() if name.startswith(("bert", "cls"))}, False
    )
    native.tie_weights()
    tasks = MoTEConfig(backbone_config=config, experts=["text"], default_task="text", pooling="cls")
    found = Pretraining(MoTEForMaskedLM(tasks, native), settings)
    assert found.decoder is not None
    layer_prefix = "c_head." if settings.kind == "bidirectional" else "d_head."
    layers = {"c_head.": found.decoder.layers, "d_head.": found.decoder.layers, "d_head_ln_f.": found.decoder.after}
    for prefix, module in layers.items():
        part = {name.removeprefix(prefix): weight for name, weight in weights.items() if name.startswith(prefix)}
        if part:
            module.load_state_dict(part)
    names = {}
    for ours, _ in found.named_parameters():
        part, _, path = ours.partition(".")
        place, _, rest = path.partition(".")
        if part == "decoder":
            original = {"after": "d_head_ln_f.", "layers": layer_prefix}[place] + rest
        else:
            original = rest if place == "head" else f"bert.{weight_name(path, tasks).dense}"
        names[original] = ours
    return found.eval(), names


@pytest.mark.parametrize("window", ["bidirectional", -1, 3])
def test_losses_and_gradients(window: Any) -> None:
    two_layers = window == "bidirectional"
    prefix = "" if two_layers else "lm."
    name = "cotmae" if two_layers else "cotmae_qc"
    found = load_file(REFERENCE / f"{name}.safetensors")
    settings = DecoderSettings()
    if not two_layers:
        settings = DecoderSettings(kind="autoregressive", layers=1, attention_window=None if window < 0 else window)
    model, names = objective({key.removeprefix(prefix): weight for key, weight in found.items()}, settings)
    expected = json.loads((REFERENCE / "expected.json").read_text())[name]
    batch = load_file(REFERENCE / f"{name}_expected.safetensors")
    inputs = {key: batch[key] for key in ("input_ids", "attention_mask", "labels")}
    if two_layers:
        inputs |= {key: value for key, value in batch.items() if key.startswith("decoder_") and "hidden" not in key}
    else:
        expected = expected[f"attn_window_{window}"]
        ids, mask = batch["dec_head_input_ids"], batch["dec_head_attention_mask"]
        inputs |= {"decoder_input_ids": ids, "decoder_attention_mask": mask}
        inputs["decoder_labels"] = ids.masked_fill(mask == 0, -100)
    seen = {}
    assert model.decoder is not None
    model.decoder.register_forward_hook(lambda *args: seen.update(hidden=args[-1]))
    out = model(**inputs)
    encoder = expected["encoder_mlm_loss" if two_layers else "bert_mlm_loss"]
    decoder = expected["head_mlm_loss" if two_layers else "dec_head_casual_loss"]
    assert out.encoder_loss.item() == pytest.approx(encoder, abs=1e-4)
    assert out.decoder_loss.item() == pytest.approx(decoder, abs=1e-4)
    assert out.loss.item() == pytest.approx(expected["loss"], abs=1e-4)
    real = inputs["decoder_attention_mask"].bool()
    hidden = batch["decoder_last_hidden" if two_layers else f"attn_window_{window}.decoder_last_hidden"]
    assert (seen["hidden"][real] - hidden[real]).abs().max().item() < 1e-5
    out.loss.backward()
    gradients = {key: parameter.grad for key, parameter in model.named_parameters()}
    compared = 0
    for key, norm in expected["gradient_norms"].items():
        ours = names.get(key.removeprefix(prefix))
        if ours is None:  # tied
            assert "decoder" in key, key
            continue
        gradient = gradients[ours]
        assert gradient is not None
        assert gradient.norm().item() == pytest.approx(norm, rel=1e-4, abs=1e-5), key
        compared += 1
    assert compared == len(names)
