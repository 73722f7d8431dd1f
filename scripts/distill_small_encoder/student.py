"""The student: a small BERT whose embeddings start as the teacher's, and its folder."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
from transformers import AutoModel, BertConfig, BertModel, BertTokenizer

from scripts.distill_small_encoder.targets import principal_directions
from scripts.distill_small_encoder.vocabulary import choose_pieces

# 3 layers of width 256 with feed-forward 512 and 8,192 pieces are 3.7 M parameters: 7.5 MB in fp16, 7.7 MB with the
# tokenizer. Two layers with feed-forward 1024 would be as large; three let a word see its neighbours once more.
VOCABULARY_SIZE = 8192
DIMENSIONS = 256
LAYERS = 3
HEADS = 4
FEED_FORWARD = 512
# The student's positions end here, so training goes as far: an untrained position would be noise in long texts.
MAX_TOKENS = 256


def copy_embeddings(student: BertModel, teacher: BertModel, teacher_ids: Sequence[int]) -> None:
    """Start the student's word, position and segment embeddings as the teacher's, projected by one PCA.

    Args:
        student: Model whose embeddings are overwritten.
        teacher: Model whose embeddings are read.
        teacher_ids: The teacher's id of each of the student's pieces.
    """
    words = teacher.embeddings.word_embeddings.weight.detach()[list(teacher_ids)]
    projection = torch.from_numpy(principal_directions(words.numpy(), student.config.hidden_size)[0]).T
    with torch.no_grad():
        student.embeddings.word_embeddings.weight.copy_(words @ projection)
        for name in ("position_embeddings", "token_type_embeddings"):
            target = getattr(student.embeddings, name).weight
            target.copy_(getattr(teacher.embeddings, name).weight[: len(target)] @ projection)


def build_student(teacher_folder: Path, texts: Sequence[str], folder: Path) -> SentenceTransformer:
    """Build the untrained student, through a folder from which sentence-transformers loads its first module."""
    teacher_tokenizer = BertTokenizer.from_pretrained(teacher_folder)
    pieces = choose_pieces(teacher_tokenizer, texts, VOCABULARY_SIZE)
    tokenizer = BertTokenizer(
        vocab={piece: index for index, piece in enumerate(pieces)},
        do_lower_case=True,
        model_max_length=MAX_TOKENS,
    )
    config = BertConfig(
        vocab_size=len(pieces),
        hidden_size=DIMENSIONS,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        intermediate_size=FEED_FORWARD,
        max_position_embeddings=MAX_TOKENS,
        pad_token_id=tokenizer.pad_token_id,
        # So small a student does not learn its texts by heart: dropout would only take capacity away.
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = BertModel(config, add_pooling_layer=False)
    ids = teacher_tokenizer.get_vocab()
    copy_embeddings(model, AutoModel.from_pretrained(teacher_folder), [ids[piece] for piece in pieces])
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    transformer = Transformer(str(folder), model_kwargs={"add_pooling_layer": False}, max_seq_length=MAX_TOKENS)
    return SentenceTransformer(modules=[transformer, Pooling(DIMENSIONS, "mean"), Normalize()])


def save_student(student: SentenceTransformer, untrained: Path, folder: Path) -> None:
    """Write the student's folder.

    The weights are stored in fp16, while the config says float32, so that they load into fp32. The tokenizer's files
    are those of the untrained student: one that has been used stores its last truncation and padding.
    """
    student.save_pretrained(str(folder), create_model_card=False)
    weights = folder / "model.safetensors"
    halved = {name: tensor.half().contiguous() for name, tensor in load_file(weights).items()}
    save_file(halved, weights, metadata={"format": "pt"})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(untrained / name, folder / name)


def folder_bytes(folder: Path) -> int:
    """Add up the sizes of a folder's files."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def check_folder(folder: Path, student: SentenceTransformer, texts: Sequence[str]) -> SentenceTransformer:
    """Load the folder as its users will, and compare it with the student that it was written from.

    Raises:
        RuntimeError: weights are missing, or left over, or the embeddings differ by more than fp16 explains.
    """
    _, loading = AutoModel.from_pretrained(folder, output_loading_info=True)
    missing = set(loading["missing_keys"]) - {"pooler.dense.weight", "pooler.dense.bias"}
    if missing or loading["unexpected_keys"]:
        raise RuntimeError(f"{folder}: missing {sorted(missing)}, unexpected {sorted(loading['unexpected_keys'])}")
    loaded = SentenceTransformer(str(folder))
    cosines = (loaded.encode(list(texts)) * student.encode(list(texts))).sum(axis=1)
    if cosines.min() < 0.9999:
        raise RuntimeError(f"{folder}: loaded and trained student differ: smallest cosine {cosines.min():.6f}")
    return loaded
