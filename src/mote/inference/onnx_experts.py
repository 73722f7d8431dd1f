"""All experts of a MoTE in ONNX Runtime: a graph for each expert, and one file of weights that all graphs read.

The graphs are plain ONNX, `onnx/EXPERT.onnx`. What experts share is in the file once: equal weights have equal bytes.
"""

import hashlib
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from sentence_transformers import SentenceTransformer
from torch import nn
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

import mote.auto  # noqa: F401  # the config's class is the installed one
from mote import hub
from mote.checkpoints.reading import ONNX_WEIGHTS
from mote.checkpoints.st_settings import MODULES, OUR_TRANSFORMER
from mote.checkpoints.transform import Verb
from mote.experts.exporting import export
from mote.files import read_json, write_json
from mote.inference import runtimes
from mote.inference.loading import load_encoder, task_arguments
from mote.remote.configuration_mote import require_known
from mote.remote.modeling_mote import MoTEModel
from mote.remote.sentence_transformer_mote import MoTETransformer
from mote.remote.weights_mote import FILES

_SMALLEST_SHARED = 1024  # bytes: smaller ones stay in their graph
_ALIGNMENT = 4096  # bytes, so that files can be mapped


class OnnxExperts:
    """Runs each expert in a session of its own, which its first call opens; may be called from several threads."""

    def __init__(self, folder: Path, config: Any) -> None:
        self.folder, self.config = folder, config
        self.sessions: dict[str, runtimes.RuntimeEncoder] = {}
        self.lock = threading.Lock()

    def run(self, _: nn.Module, *, expert: str, **inputs: Any) -> Any:
        """Compute the hidden states of an expert, as `Offloading.run` does."""
        with self.lock:
            if expert not in self.sessions:
                files = (self.folder / "onnx" / f"{expert}{suffix}.onnx" for suffix in ("", "_quantized"))
                self.sessions[expert] = runtimes.onnx_encoder(next(filter(Path.is_file, files)), self.config)
        return self.sessions[expert](**inputs)


class OnnxMoTE(MoTEModel):
    """A MoTE without weights, whose backbone runs in ONNX Runtime: routing, mixed batches and pooling stay its own."""

    device, dtype = torch.device("cpu"), torch.float32  # which the library asks the weights for

    def __init__(self, config: Any, folder: Path) -> None:
        with torch.device("meta"):
            super().__init__(config)
        self.backbone = nn.Identity()  # type: ignore[assignment]
        self.offloading = OnnxExperts(folder, config)


class OnnxTransformer(MoTETransformer):
    """The first module of a MoTE whose experts were all exported; Sentence-Transformers loads it."""

    def _load_model(self, model_name_or_path: str, transformer_task: Any, config: Any, *_: Any, **kwargs: Any) -> Any:
        place, revision = model_name_or_path, kwargs.get("revision")
        return OnnxMoTE(config, hub.local_folder(place, revision) or hub.fetch(place, revision, ["onnx/*"])).eval()


@Verb("export", "all experts, in ONNX, of")
def whole(model: MoTEModel) -> MoTEModel:
    """Return the model, so that a copy of it is written, which `convert_experts` converts: never the source itself."""
    return model


def convert_experts(folder: Path, *, quantize: str | None = None, texts: Sequence[str]) -> dict[str, Any]:
    """Replace the weights of a MoTE in a folder by ONNX graphs of all its experts, and compare the two.

    Arguments and result as of `convert`; in int8, there are only the quantized graphs. The cosines are over the texts
    with the instruction of each expert's first task.
    """
    encoder: Any = load_encoder(folder, device="cpu", dtype="float32", trust_remote_code=True)
    model, expected = encoder[0].model, {}
    require_known(model.config.model_type, ["mote"], "kind of MoTE to export as a whole:")
    modules = read_json(folder / MODULES, list)
    if not modules[0]["type"].endswith(OUR_TRANSFORMER):
        raise ValueError("Experts of a model that leaves instructions out of the pooling are exported one by one")
    (folder / "onnx").mkdir()
    suffix = "_quantized" if quantize else ""  # by which transformers.js finds them
    places: dict[bytes, int] = {}
    with (
        runtimes.explained("onnx"),
        (folder / ONNX_WEIGHTS).open("wb") as weights,
        tempfile.TemporaryDirectory() as temporary,
    ):
        for name, task in {expert: task for task, expert in reversed(model.config.available_tasks.items())}.items():
            expected[task] = encoder.encode(list(texts), convert_to_tensor=True, **task_arguments(encoder, task))
            features = encoder[0].preprocess(list(texts[:4]), task=task)
            inputs = {key: features[key] for key in encoder.tokenizer.model_input_names if key in features}
            file = Path(temporary, f"model{suffix}.onnx")
            runtimes.write_onnx(runtimes.traced(export(model, name), inputs), file, quantize, [inputs])
            _share_weights(file, folder / "onnx" / f"{name}{suffix}.onnx", weights, places)
    for pattern in (*FILES, SAFE_WEIGHTS_INDEX_NAME):
        for file in folder.glob(pattern):
            file.unlink()
    modules[0]["type"] = f"{OnnxTransformer.__module__}.{OnnxTransformer.__name__}"
    write_json(folder / MODULES, modules)
    converted = SentenceTransformer(str(folder), device="cpu", trust_remote_code=True)
    cosines = torch.cat(
        [
            nn.functional.cosine_similarity(
                converted.encode(list(texts), convert_to_tensor=True, **task_arguments(converted, task)), vectors
            )
            for task, vectors in expected.items()
        ]
    )
    return runtimes.comparison(cosines, backend="onnx", file="onnx/*.onnx", quantize=quantize, texts=len(texts))


def _share_weights(whole: Path, graph: Path, weights: Any, places: dict[bytes, int]) -> None:
    """Write a graph whose large weights are in a common file; `places` says where each content is in it."""
    import onnx
    from onnx.external_data_helper import set_external_data

    model = onnx.load(whole)
    for tensor in model.graph.initializer:
        content = tensor.raw_data
        if len(content) < _SMALLEST_SHARED:
            continue
        key = hashlib.sha256(content).digest()
        if key not in places:
            weights.seek(-(-weights.tell() // _ALIGNMENT) * _ALIGNMENT)
            places[key] = weights.tell()
            weights.write(content)
        set_external_data(tensor, Path(ONNX_WEIGHTS).name, places[key], len(content))
        tensor.ClearField("raw_data")
    for node in model.graph.node:
        del node.metadata_props[:]  # stack traces of the conversion
    onnx.save(model, graph)
