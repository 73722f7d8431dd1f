"""Write a model repository: the only way in which this package writes models to disk and the Hub."""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel
from transformers.utils import ADAPTER_CONFIG_NAME

from mote import hub
from mote.checkpoints.cards import new_card, rewritten_card, write_card
from mote.checkpoints.models import quiet_transformers
from mote.checkpoints.options import WriteOptions
from mote.checkpoints.plain import write_plainly
from mote.checkpoints.provenance import recorded_files, write_steps
from mote.checkpoints.reading import Checkpoint, MoTECheckpoint, is_mote, open_checkpoint
from mote.checkpoints.sentence_transformers import max_seq_length, write_sentence_transformer
from mote.checkpoints.st_settings import Pipeline, Retrieval
from mote.checkpoints.staging import WEIGHTS, ModelStaging, refuse_occupied, refuse_source
from mote.files import link
from mote.remote.configuration_mote import MoTEConfig
from mote.remote.weights_mote import read_index
from mote.reporting import megabytes

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer, SparseEncoder

logger = logging.getLogger(__name__)


def require_writable(out: Path, options: WriteOptions, source: Path | None = None) -> str:
    """Make sure, before any work, that a result can be written and pushed; return the name under which it will load."""
    refuse_occupied(out, options.overwrite)
    if source is not None:
        refuse_source(out, source)
    name = out.resolve().name
    return hub.check_before_push(options.repo_id or name) if options.push else name


@dataclass
class Repository:
    """A model with weights, config, code, tokenizer, Sentence-Transformers' files, model card and `mote.json`."""

    # A `SentenceTransformer` brings its modules, prompts and tokenizer; another model takes those of the source.
    model: "PreTrainedModel | SentenceTransformer | SparseEncoder"
    source: Checkpoint  # that became this model; if it is in the folder to write, its other files are kept
    steps: list[dict[str, Any]]  # as from `new_step`; the last one gets the sources' hashes, and what `after` returns
    others: Sequence[Any] = ()  # what else it was made from: experts or checkpoints, which have a `provenance()`
    tokenizer: Any = None
    expert: str | None = None  # if it is a single one of the source; its instruction becomes the default prompt
    names: MoTEConfig | None = None  # tasks, instructions and pooling of a dense model made from a dense source
    retrieval: Retrieval | None = None  # the vectors that it gives, if not the source's
    write_weights: Callable[[Path], None] | None = None  # if the model has none, on the meta device
    after: Callable[[Path], dict[str, Any]] | None = None  # adds files before the folder is moved into place
    training: dict[str, Any] | None = None  # values for the card's section on training
    keep_card: bool = False  # keep the rest of the source's card: it is the same model with other settings

    def write(self, out: Path, options: WriteOptions, repo_id: str) -> Path:
        """Write the repository atomically, and push it if requested; before any work, call `require_writable`.

        After an error nothing is left behind; if only the push fails, the folder is kept.
        """
        in_place = out.resolve() == self.source.folder.resolve()
        size = sum(tensor.nbytes for tensor in self.model.state_dict().values())
        changed = self.source.steps if in_place else None
        with ThreadPoolExecutor(1) as thread, ModelStaging(out, options.overwrite, changed) as folder:
            same = self.source.weights if in_place and read_index(self.source.folder) else []
            for file in same:  # until it turns out that they do not stay the same
                link(file, folder / file.name)
            described = thread.submit(_provenance_of, [self.source, *self.others])  # reads them completely
            logger.info("Writing %s …", megabytes(size))
            self._write_model(folder, options.max_shard_size)
            details = self.after(folder) if self.after else {}
            *first, last = self.steps
            last = {**last, "sources": described.result(), **details}
            steps = [*self.source.steps, *first, last]
            self._write_card(folder, steps, repo_id)
            write_steps(steps, folder)
        logger.info("Wrote %s", out)
        if options.push:
            parent = self.source.revision if repo_id == self.source.name else None
            hub.push(out, repo_id, recorded_files(out), WEIGHTS, options.private, parent)
        if isinstance(self.model, PreTrainedModel):
            place = repo_id if options.push else str(out)
            logger.info("%s", how_to_load(place, self.model.config, Pipeline.read(out), self.source))
        return out

    def _write_model(self, folder: Path, max_shard_size: str) -> None:
        """Write weights, config, code, tokenizer and Sentence-Transformers' files."""
        if isinstance(self.model, PreTrainedModel):
            self._write_network(self.model, folder, max_shard_size)
        else:
            self.model.save(str(folder), create_model_card=False)
            Pipeline.read(folder).write(folder)  # our classes by names that exist without this package
        network: Any = self.model if isinstance(self.model, PreTrainedModel) else self.model[0].auto_model
        if not is_mote(network.config) and not (folder / ADAPTER_CONFIG_NAME).is_file():
            write_plainly(folder, network)

    def _write_network(self, model: Any, folder: Path, max_shard_size: str) -> None:
        with model.replacing(None) if is_mote(model.config) else nullcontext():  # the other files follow
            if self.write_weights is None:
                model.save_pretrained(folder, max_shard_size=max_shard_size)
            else:
                with quiet_transformers():  # no progress bar for no weights
                    model.save_pretrained(folder, state_dict={})  # config and code
                self.write_weights(folder)
        # It truncates where Sentence-Transformers does.
        self.tokenizer.model_max_length = max_seq_length(model, self.source) or self.tokenizer.model_max_length
        self.tokenizer.save_pretrained(folder)
        made_dense = isinstance(self.source, MoTECheckpoint) and not is_mote(model.config)
        names: Any = self.source.config if made_dense else self.names
        write_sentence_transformer(model, self.source, folder, names, self.expert, self.retrieval)

    def _write_card(self, folder: Path, steps: list[dict[str, Any]], name: str) -> None:
        adapters = (folder / ADAPTER_CONFIG_NAME).is_file()
        written = replace(self.source, folder=folder) if adapters else open_checkpoint(str(folder))
        if self.keep_card:
            card = rewritten_card(written, steps, name, self.source.folder)
        else:
            card = new_card(written, steps, name, self.source, self.training)
        (folder / "README.md").write_text(card, encoding="utf-8")


def push(src: str | Path, repo_id: str, *, private: bool = False) -> None:
    """Push a model to the Hub: the files that have changed, and a card that names its repository.

    Args:
        src: Folder of a MoTE, or of a dense model that this package made from one.
        repo_id: Repository: `user/name`, or a name under the user of the token.
        private: Make a new repository private.
    """
    repo_id, folder = hub.check_before_push(repo_id), Path(src)
    write_card(folder, repo_id=repo_id)
    # The record does not know the weights that other programs have trained since.
    hub.push(folder, repo_id, [*(recorded_files(folder) or "*"), *WEIGHTS], WEIGHTS, private)


def _provenance_of(sources: Sequence[Any]) -> list[dict[str, Any]]:
    """Describe sources for `mote.json`, and warn of weights that make embeddings useless."""
    for source in sources:
        if isinstance(source, Checkpoint) and (names := source.non_finite_weights()):
            shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            logger.warning("Weights of %s hold NaN or infinite values: %s", source.name, shown)
    return [source.provenance() for source in sources]


def how_to_load(path: str, config: Any, pipeline: Pipeline, source: Checkpoint) -> str:
    """Return a line of Python that embeds texts with Sentence-Transformers, for a task that the source lacks."""
    if pipeline.retrieval.kind != "dense":
        return f'SparseEncoder("{path}", trust_remote_code=True).encode_query(texts)  # or encode_document'
    if not is_mote(config):
        return f'{pipeline.encoder}("{path}").encode(texts)'
    tasks = [*config.available_tasks]
    new = [task for task in tasks if task not in getattr(source.config, "tasks", tasks)]
    task = new[-1] if new else "search_query" if "search_query" in tasks else config.available_experts[0]
    return f'{pipeline.encoder}("{path}", trust_remote_code=True).encode(texts, prompt_name="{task}")'
