"""Dense models in OpenVINO and ONNX Runtime: converted, quantised, and under Sentence-Transformers.

Files are where Sentence-Transformers' own backends look for them. Those backends need optimum, which does not support
every version of transformers that MoTE does; so the conversion is torch's own export, and the runtimes are called
directly.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.modeling_outputs import BaseModelOutput

from mote import hub
from mote.checkpoints.reading import ONNX_WEIGHTS
from mote.checkpoints.st_settings import instruction_pooling_in
from mote.inference.loading import first_line, load_encoder
from mote.remote.configuration_mote import require_known

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer

BACKENDS = ("torch", "onnx", "openvino")
FILES = {"onnx": "onnx/model.onnx", "openvino": "openvino/openvino_model.xml"}
# Readers pick a precision by the file's name (transformers.js: "q8"), and take the first file by default.
INT8 = {**FILES, "onnx": "onnx/model_quantized.onnx"}

_PACKAGES = {"onnx": ("onnx", "onnxscript", "onnxruntime"), "openvino": ("openvino", "nncf")}
_LARGEST_ONNX = 1.9e9  # bytes: a single ONNX file is limited to 2 GiB
_BATCH = 4  # texts per calibration step
# Lower cosines mean a wrong conversion; rounding alone stays above them.
_LEAST_COSINES = {None: 0.9999, "int8": 0.9}

logger = logging.getLogger(__name__)


def require(backend: str) -> None:
    """Check that the packages of a backend are installed."""
    missing = [package for package in _PACKAGES.get(backend, ()) if find_spec(package) is None]
    if missing:
        raise OSError(
            f"The backend {backend} needs packages that are not installed ({', '.join(missing)}): "
            f'pip install "mote-embeddings[{backend}]", or in a clone pip install ".[{backend}]"'
        )


def convert(folder: Path, *, backend: str, quantize: str | None = None, texts: Sequence[str]) -> dict[str, Any]:
    """Add a dense Sentence-Transformers model in the format of a runtime to its folder, and compare the two.

    With `quantize="int8"`, matrices are 8-bit integers. ONNX Runtime computes the scales of activations as it runs
    (dynamic quantization; the file in float32 stays beside it), OpenVINO from the texts (static). Returned are details
    for `mote.json`: settings, and the cosines between the embeddings of the runtime (in float32) and of the model in
    torch, with the default prompt.
    """
    name = (INT8 if quantize else FILES)[backend]
    logger.info("Converting to %s …", name)
    trusted = instruction_pooling_in(folder) != "included"  # its code was written by this package
    file = folder / name
    file.parent.mkdir()
    with explained(backend):
        encoder: Any = load_encoder(folder, device="cpu", dtype="float32", trust_remote_code=trusted)
        expected = encoder.encode(list(texts), convert_to_tensor=True)
        features = list(_batches(encoder, texts))
        program = traced(encoder[0].model, features[0])
        write = {"onnx": write_onnx, "openvino": _write_openvino}[backend]
        write(program, file, quantize, features)
    precise = {"INFERENCE_PRECISION_HINT": "f32"} if backend == "openvino" else None
    converted = load_exported(folder, backend, ov_config=precise, trust_remote_code=trusted)
    found = converted.encode(list(texts), convert_to_tensor=True)
    cosines = nn.functional.cosine_similarity(found, expected)
    return comparison(cosines, backend=backend, file=name, quantize=quantize, texts=len(texts))


@contextmanager
def explained(backend: str) -> Iterator[None]:
    """Explain anything that a converter raises."""
    try:
        yield
    except Exception as error:
        raise ValueError(
            f"This architecture could not be converted to {backend} ({first_line(error)}): export the expert for "
            "torch, without `--backend`"
        ) from error


def comparison(cosines: torch.Tensor, *, quantize: str | None, texts: int, **settings: Any) -> dict[str, Any]:
    """Describe a conversion for `mote.json`; raise `ValueError` if it changes the embeddings."""
    mean, least = float(cosines.mean()), float(cosines.min())
    logger.info("Cosine to the model in torch, over %d texts: mean %.4f, minimum %.4f", texts, mean, least)
    if not mean >= _LEAST_COSINES[quantize]:
        raise ValueError(
            f"The embeddings of the converted model differ from those in torch: mean cosine {mean:.4f}, expected at "
            f"least {_LEAST_COSINES[quantize]:g}. Export it "
            + ("without `--quantize`" if quantize else "for torch, without `--backend`")
        )
    return {"converted": {**settings, "quantize": quantize, "texts": texts, "cosine": {"mean": mean, "least": least}}}


class _Encoder(nn.Module):
    """The part that is converted: computes a model's last hidden state from inputs in a fixed order."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, token_type_ids: torch.Tensor | None = None
    ) -> torch.Tensor:
        segments = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
        return self.model(input_ids=input_ids, attention_mask=attention_mask, **segments).last_hidden_state


def _batches(encoder: "SentenceTransformer", texts: Sequence[str]) -> Iterator[dict[str, torch.Tensor]]:
    """Tokenize as `encode` does; keep the inputs of the model."""
    transformer: Any = encoder[0]
    prompt = encoder.prompts.get(encoder.default_prompt_name or "")
    for start in range(0, len(texts), _BATCH):
        features = transformer.preprocess(list(texts[start : start + _BATCH]), prompt=prompt)
        yield {name: features[name] for name in transformer.tokenizer.model_input_names if name in features}


def traced(model: nn.Module, example: dict[str, torch.Tensor]) -> torch.export.ExportedProgram:
    """Trace a model with dynamic batch size and length."""
    if getattr(model, "pooler", None) is not None:
        model.pooler = None  # type: ignore[assignment]  # has random weights, and is not used
    if hasattr(model.config, "use_cache"):
        model.config.use_cache = False
    dynamic = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    # a size of 1 would become a constant
    example = {name: ids.repeat([2 if size == 1 else 1 for size in ids.shape]) for name, ids in example.items()}
    return torch.export.export(
        _Encoder(model), (), example, dynamic_shapes=dict.fromkeys(example, dynamic), strict=False
    )


def write_onnx(program: Any, file: Path, quantize: str | None, features: list[dict[str, torch.Tensor]]) -> None:
    """Write a traced model; in int8, the file in float32 is written beside it."""
    size = sum(tensor.nbytes for tensor in program.state_dict.values())
    whole = file.with_name(Path(FILES["onnx"]).name) if quantize else file  # stays, for readers that know no int8
    torch.onnx.export(
        program,
        (),
        str(whole),
        input_names=list(features[0]),
        output_names=["last_hidden_state"],
        dynamo=True,
        external_data=size > _LARGEST_ONNX,
        verbose=False,
    )
    if quantize:
        from onnxruntime.quantization import QuantType, quantize_dynamic

        root, null = logging.getLogger(), logging.NullHandler()
        root.addHandler(null)  # or their `logging.warning` adds one that prints our lines again
        try:
            large = size > 4 * _LARGEST_ONNX
            quantize_dynamic(whole, file, weight_type=QuantType.QInt8, per_channel=True, use_external_data_format=large)
        finally:
            root.removeHandler(null)


def _write_openvino(program: Any, file: Path, quantize: str | None, features: list[dict[str, torch.Tensor]]) -> None:
    import openvino

    model = openvino.convert_model(program)
    model.outputs[0].tensor.set_names({"last_hidden_state"})
    if quantize:
        import nncf

        arrays = [{name: tensor.numpy() for name, tensor in batch.items()} for batch in features]
        transformer = nncf.ModelType.TRANSFORMER
        model = nncf.quantize(model, nncf.Dataset(arrays), model_type=transformer, subset_size=len(arrays))
    openvino.save_model(model, file, compress_to_fp16=False)


def load_exported(
    path: str | Path,
    backend: str = "torch",
    *,
    revision: str | None = None,
    ov_config: dict[str, Any] | None = None,
    trust_remote_code: bool = False,
) -> "SentenceTransformer":
    """Load an exported expert, or all of a MoTE's, as a SentenceTransformer whose encoder runs in a runtime.

    It runs on the CPU, with as many threads as torch, and may be called from several threads. It cannot be trained or
    saved: the folder is the model.

    Args:
        path: Folder written by `mote export`, or the id of such a model on the Hub.
        backend: `"openvino"`, `"onnx"`, or `"torch"` for the same model without a runtime.
        revision: Branch, tag or commit on the Hub. Default: the newest.
        ov_config: Settings of OpenVINO. On CPUs that support bfloat16 it computes in bfloat16, unless set to
            `{"INFERENCE_PRECISION_HINT": "f32"}`.
        trust_remote_code: Whether to run the code in the folder; only models of all experts, and those that leave
            instructions out of the pooling, have any.
    """
    require_known(backend, BACKENDS, "backend")
    folder = Path(path) if Path(path).is_dir() else hub.fetch(str(path), revision, ["*"])
    if backend == "torch" or (folder / ONNX_WEIGHTS).is_file():
        return load_encoder(folder, trust_remote_code=trust_remote_code)
    file = folder / INT8[backend]
    file = file if file.is_file() else folder / FILES[backend]
    encoder: Any = load_encoder(folder, device="cpu", trust_remote_code=trust_remote_code)
    config = encoder[0].model.config
    encoder[0].model = onnx_encoder(file, config) if backend == "onnx" else openvino_encoder(file, config, ov_config)
    return encoder


class RuntimeEncoder(nn.Module):
    """A model in a runtime, in place of the one that Sentence-Transformers loads: `run` computes its hidden state."""

    def __init__(self, config: PreTrainedConfig, inputs: list[str], run: Callable[[dict[str, Any]], Any]) -> None:
        super().__init__()
        self.config = config
        self.device = torch.device("cpu")
        self.inputs = inputs
        self.run = run

    def forward(self, input_ids: torch.Tensor, **others: Any) -> BaseModelOutput:
        """Run the model; inputs are [B, L], as of the model in torch, the `last_hidden_state` is [B, L, H]."""
        given = {"input_ids": input_ids, **others}
        hidden = self.run({name: given[name].numpy(force=True) for name in self.inputs})
        return BaseModelOutput(last_hidden_state=torch.from_numpy(hidden).to(input_ids.device))


def openvino_encoder(file: Path, config: PreTrainedConfig, ov_config: dict[str, Any] | None = None) -> RuntimeEncoder:
    """Open a model in OpenVINO."""
    import openvino

    settings = {"INFERENCE_NUM_THREADS": torch.get_num_threads(), **(ov_config or {})}
    compiled = openvino.Core().compile_model(file, "CPU", settings)

    def run(inputs: dict[str, Any]) -> Any:
        # A request for each call, because requests are not thread-safe.
        return compiled.create_infer_request().infer(inputs, share_inputs=True)[0]

    return RuntimeEncoder(config, [port.any_name for port in compiled.inputs], run)


def onnx_encoder(file: Path, config: PreTrainedConfig) -> RuntimeEncoder:
    """Open a model in ONNX Runtime."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    names = [port.name for port in session.get_inputs()]
    return RuntimeEncoder(config, names, lambda inputs: session.run(["last_hidden_state"], inputs)[0])
