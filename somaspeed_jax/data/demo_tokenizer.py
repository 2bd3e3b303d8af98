"""Small tokenizers for the demo, trained on first use from the demo's own prompts, in the published file formats.

The code that loads a published tokenizer loads these: a SentencePiece `tokenizer.model` with Gemma's settings for
π0.5, a byte-level BPE `tokenizer.json` with Qwen's pre-tokenizer for GR00T and MolmoAct2. Every byte has a token, so
prompts of other datasets work too; they only take more tokens.
"""

import io
from collections.abc import Callable, Iterator
from pathlib import Path

import sentencepiece
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from somaspeed_jax.data import tabletop
from somaspeed_jax.data.once import make_once

VERSION = 2  # raise it when a vocabulary changes: it is part of the folder's name

_SENTENCEPIECE_SIZE = 384
_QWEN_SIZE = 384
_CHAT = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
_STATES = 256
_ACTIONS = 16  # of the published 2048: only tokenized actions would use them
_MOLMO = (
    *(f"<{part}_{end}>" for part in ("setup", "control", "state") for end in ("start", "end")),
    *(f"<state_{i}>" for i in range(_STATES)),
    "<action_output>",
    "<action_start>",
    "<action_end>",
    *(f"<action_{i}>" for i in range(_ACTIONS)),
    # pictures: these come last, from the language model's vocabulary size on
    *("<im_start>", "<im_end>", "<im_patch>", "<im_col>", "<low_res_im_start>", "<|image|>", "<im_low>"),
    *("<frame_start>", "<frame_end>", "<|video|>"),
)
# How Qwen2 cuts text before its byte pairs: contractions, words, single digits, punctuation, line ends, blanks.
_QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def ensure_demo_tokenizer(directory: str | Path, kind: str) -> Path:
    """The folder of a small tokenizer under `directory`, trained now if it is not there yet.

    kind `sentencepiece` holds `tokenizer.model` (pad 0, eos 1, bos 2, unknown 3), `qwen` a `tokenizer.json` with the
    chat and vision tokens of Qwen3-VL, `molmoact2` one with the chat, setup, control, state, action and picture
    tokens of MolmoAct2. Raises ValueError for another kind.
    """
    if kind not in _MAKERS:
        raise ValueError(f"demo tokenizer: kind {kind!r}, expected one of {sorted(_MAKERS)}")
    return make_once(Path(directory) / f"tokenizer-{kind}-v{VERSION}", _MAKERS[kind])


def _make_sentencepiece(folder: Path) -> None:
    """Gemma's settings: bytes as a fallback, single digits, no normalisation, no blank in front, a newline piece."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=(line for text in _texts() for line in text.split("\n")),
        model_writer=model,
        model_type="bpe",
        vocab_size=_SENTENCEPIECE_SIZE,
        hard_vocab_limit=False,
        byte_fallback=True,
        split_digits=True,
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        character_coverage=1.0,
        pad_id=0,
        eos_id=1,
        bos_id=2,
        unk_id=3,
        pad_piece="<pad>",
        eos_piece="<eos>",
        bos_piece="<bos>",
        unk_piece="<unk>",
        user_defined_symbols=["\n"],
        num_threads=1,
        minloglevel=2,
    )
    (folder / "tokenizer.model").write_bytes(model.getvalue())


def _make_qwen(folder: Path) -> None:
    _train_byte_level((*_CHAT, *_VISION)).save(str(folder / "tokenizer.json"))


def _make_molmoact2(folder: Path) -> None:
    _train_byte_level((*_CHAT, *_MOLMO)).save(str(folder / "tokenizer.json"))


def _train_byte_level(special: tuple[str, ...]) -> Tokenizer:
    """Byte pairs over Qwen's split; the special tokens get the ids after them, in the order given."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_QWEN_SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_QWEN_SIZE,
        min_frequency=2,
        show_progress=False,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    tokenizer.train_from_iterator(_texts(), trainer)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    return tokenizer


def _texts() -> Iterator[str]:
    """Prompts as the three models write them, with all the state bins that can occur in them."""
    for number, (phrase, colour) in enumerate((p, c) for p in tabletop.PHRASES for c in tabletop.COLOUR_NAMES):
        task = phrase.format(colour)
        for first in range(-1, 256, 16):
            yield f"Task: {task}, State: {first} {(first * 7 + number) % 256};\nAction: "
        yield f"user\n{task}\nassistant\n"
        yield (
            f"user\nThe task is to {task}. The setup is tabletop. The current state of the robot is . The expected "
            "control mode is position. Given these, what action should the robot take to complete the task?\n"
        )
        yield f"Image {number} {task}"


_MAKERS: dict[str, Callable[[Path], None]] = {
    "sentencepiece": _make_sentencepiece,
    "qwen": _make_qwen,
    "molmoact2": _make_molmoact2,
}
