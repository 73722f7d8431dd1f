"""Write a model repository: the only way in which this package writes models to disk and the Hub."""

import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel
from transformers.utils import ADAPTER_CONFIG_NAME

from mote import hub
from mote.checkpoints.cards import new_card, rewritten_card
from mote.checkpoints.models import quiet_transformers
from mote.checkpoints.options import WriteOptions
from mote.checkpoints.plain import write_plainly
from mote.checkpoints.provenance import Described, read_steps, recorded_files, write_steps
from mote.checkpoints.reading import Checkpoint, MoTECheckpoint, has_head, is_mote, open_checkpoint
from mote.checkpoints.sentence_transformers import max_seq_length, write_sentence_transformer
from mote.checkpoints.st_settings import Pipeline, Retrieval, retrieval_in
from mote.checkpoints.staging import ModelStaging, refuse_occupied, refuse_source, require_shard_size
from mote.files import require_space
from mote.remote.configuration_mote import MoTEConfig
from mote.reporting import megabytes

if TYPE_CHECKING:
    from sentence_transformers import SentenceTransformer, SparseEncoder

logger = logging.getLogger(__name__)


def require_writable(out: Path, options: WriteOptions, source: Path | None = None) -> str:
    """Make sure, before any work is done, that a result can be written to `out`, and pushed if requested.

    Returns:
        The name under which readers will load the result: the repository on the Hub, or the name of `out`.
    """
    require_shard_size(options.max_shard_size)
    if options.private and not options.push:
        raise ValueError("`--private` is for a repository on the Hub: add `--push`")
    refuse_occupied(out, options.overwrite)
    if source is not None:
        refuse_source(out, source)
    name = out.resolve().name
    return hub.check_before_push(options.repo_id or name) if options.push else name


def write_repository(  # noqa: PLR0913
    out: Path,
    model: "PreTrainedModel | SentenceTransformer | SparseEncoder",
    *,
    step: dict[str, Any],
    sources: Sequence[Described],
    write_card: Callable[[Path, dict[str, Any]], None] | None = None,
    keep_card: bool = False,
    tokenizer: Any = None,
    expert: str | None = None,
    names: MoTEConfig | None = None,
    earlier: Sequence[dict[str, Any]] | None = None,
    write_weights: Callable[[Path], None] | None = None,
    retrieval: Retrieval | None = None,
    after: Callable[[Path], dict[str, Any]] | None = None,
    options: WriteOptions | None = None,
    repo_id: str | None = None,
) -> Path:
    """Write a model with everything that belongs to a model repository, atomically, and push it if requested.

    That is weights, config, code, tokenizer, Sentence-Transformers' files, model card and `mote.json`. After an error
    nothing is left behind; if only the push fails, the folder is kept.

    Args:
        out: Folder to write; check it with `require_writable` before any work.
        model: A `SentenceTransformer`, which brings its modules, prompts and tokenizer; or a MoTE or dense model,
            which takes them from `sources[0]` and `tokenizer`.
        step: How the model was made, as from `new_step`. Hashes of `sources` are added, and what `after` returns.
        sources: What the model was made from, first the checkpoint that became this model. If that is in `out` itself,
            its other files are kept.
        write_card: Writes README.md into the folder, given the finished step. Default: from the files and steps.
        keep_card: Keep text and metadata of the source's card, since the result is the same model with other settings.
        tokenizer: Its tokenizer.
        expert: If the model is a single expert of the source: its name. Its instruction becomes the default prompt.
        names: If a dense model was made from a dense source: its tasks, instructions and pooling.
        earlier: Steps by which the first source was made. Default: those in its `mote.json`.
        write_weights: If the model has no weights (on the meta device): writes them into a folder.
        retrieval: The vectors that it gives. Default: as `sources[0]`; not needed for a `SentenceTransformer`.
        after: Runs on the folder before it is moved into place: adds files, returns details for the step.
        options: How the model is written.
        repo_id: Name under which readers load the model, as from `require_writable`. Default: the name of `out`.
    """
    options = options or WriteOptions()
    source = next((one for one in sources if isinstance(one, Checkpoint)), None)
    in_place = source is not None and out.resolve() == source.folder.resolve()
    if earlier is None:
        earlier = read_steps(source.folder) if source else []
    size = sum(tensor.nbytes for tensor in model.state_dict().values())
    require_space(out, size)
    with ThreadPoolExecutor(1) as thread, ModelStaging(out, options.overwrite, in_place) as folder:
        described = thread.submit(_provenance_of, sources)  # reads them completely
        logger.info("Writing %s …", megabytes(size))
        if isinstance(model, PreTrainedModel):
            assert source is not None
            write_model(model, tokenizer, source, folder, options.max_shard_size, write_weights)
            if isinstance(source, MoTECheckpoint) and not is_mote(model.config):
                names = source.config
            write_sentence_transformer(model, source, folder, names, expert, retrieval)
        else:
            model.save(str(folder), create_model_card=False)
            Pipeline.read(folder).write(folder)  # our classes by names that exist without this package
        transformer: Any = model if isinstance(model, PreTrainedModel) else model[0].auto_model
        if not is_mote(transformer.config) and not (folder / ADAPTER_CONFIG_NAME).is_file():
            write_plainly(folder, transformer)
        details = after(folder) if after else {}
        step = {**step, "sources": described.result(), **details}
        steps = [*earlier, step]
        if write_card is not None:
            write_card(folder, step)
        else:
            assert source is not None
            written, name = open_checkpoint(str(folder)), repo_id or out.resolve().name
            card = (
                rewritten_card(written, steps, name, source.folder)
                if keep_card
                else new_card(written, steps, name, source)
            )
            (folder / "README.md").unlink(missing_ok=True)
            (folder / "README.md").write_text(card, encoding="utf-8")
        write_steps(steps, folder)
    logger.info("Wrote %s", out)
    place = str(out)
    if options.push:
        place = repo_id or hub.check_before_push(options.repo_id or out.resolve().name)
        logger.info("Pushing to %s …", place)
        logger.info("Pushed: %s", hub.push(out, place, recorded_files(out), options.private))
    if isinstance(model, PreTrainedModel):
        logger.info("%s", how_to_load(place, model.config, retrieval_in(out)))
    return out


def _provenance_of(sources: Sequence[Described]) -> list[dict[str, Any]]:
    """Describe sources for `mote.json`, and warn of weights that make embeddings useless."""
    for source in sources:
        if isinstance(source, Checkpoint) and (names := source.non_finite_weights()):
            shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
            logger.warning("Weights of %s hold NaN or infinite values: %s", source.name, shown)
    return [source.provenance() for source in sources]


def how_to_load(path: str, config: Any, retrieval: Retrieval | None = None) -> str:
    """Return lines of Python that use a model with Transformers (including its head) and Sentence-Transformers."""
    if retrieval is not None and retrieval.kind != "dense":
        return f'SparseEncoder("{path}", trust_remote_code=True).encode_query(texts)  # or encode_document'
    if not is_mote(config):
        return f'AutoModel.from_pretrained("{path}")\nSentenceTransformer("{path}").encode(texts)'
    task = "search_query" if "search_query" in config.available_tasks else config.available_experts[0]
    argument = "prompt_name" if config.instruction_of(task) else "task"  # an empty prompt selects no task
    routed = f', task="{task}"' if config.routes_by_task else ""
    if has_head(config):
        head = f'AutoModelForMaskedLM.from_pretrained("{path}", trust_remote_code=True)(**batch{routed}).logits\n'
    else:
        head = ""
    return head + (
        f'AutoModel.from_pretrained("{path}", trust_remote_code=True)(**batch{routed}).pooler_output\n'
        f'SentenceTransformer("{path}", trust_remote_code=True).encode(texts, {argument}="{task}")'
    )


def write_model(
    model: PreTrainedModel,
    tokenizer: Any,
    source: Checkpoint,
    folder: Path,
    max_shard_size: str,
    write_weights: Callable[[Path], None] | None = None,
) -> None:
    """Write weights, config, code and tokenizer, which truncates where Sentence-Transformers does."""
    require_shard_size(max_shard_size)
    if write_weights is None:
        model.save_pretrained(folder, max_shard_size=max_shard_size)
    else:
        with quiet_transformers():  # no progress bar for no weights
            model.save_pretrained(folder, state_dict={})  # config and code
        write_weights(folder)
    tokenizer.model_max_length = max_seq_length(model, source) or tokenizer.model_max_length
    tokenizer.save_pretrained(folder)
