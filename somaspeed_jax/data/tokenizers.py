"""Text to token ids: one small class over SentencePiece and tokenizer.json files, found by path or hub repo id."""

import dataclasses
import re
from pathlib import Path
from typing import Any, Literal

Kind = Literal["gemma", "qwen", "molmoact2"]


@dataclasses.dataclass(frozen=True)
class _Family:
    """What one model family asks of its tokenizer.

    bos: the piece put in front where upstream puts one (MolmoAct2: its end-of-turn piece), else None.
    pad: the piece that fills a row. repo: where upstream takes the files from.
    files: accepted names, first choice first.
    """

    bos: str | None
    pad: str
    repo: str
    files: tuple[str, ...]


_FAMILIES: dict[str, _Family] = {
    "gemma": _Family("<bos>", "<pad>", "google/paligemma-3b-pt-224", ("tokenizer.model", "tokenizer.json")),
    "qwen": _Family(None, "<|endoftext|>", "nvidia/Cosmos-Reason2-2B", ("tokenizer.json",)),
    "molmoact2": _Family("<|im_end|>", "<|endoftext|>", "allenai/MolmoAct2", ("tokenizer.json",)),
}


class Tokenizer:
    """A tokenizer held as the bytes of its file: cheap to pickle into workers and to save next to a checkpoint.

    The bytes are parsed at construction and again after unpickling. A text that spells a control piece ("<bos>") is
    read as that piece by a tokenizer.json and as plain characters by SentencePiece; on all other text the two forms of
    one vocabulary agree.

    Attributes: `kind`, `file_name` ("tokenizer.model" or "tokenizer.json"), `vocab_size`, `pad_id`, `bos_id` (or None).
    Raises ValueError when the bytes are not such a file, or lack the pieces that `kind` needs.
    """

    def __init__(self, data: bytes, file_name: str, kind: Kind, source: str):
        self.kind, self.file_name, self.source = kind, file_name, source
        self._data = data
        self._model = _parse(data, file_name, source)
        family = _FAMILIES[kind]
        self.vocab_size: int = self._model.get_piece_size() if self._sentencepiece else self._model.get_vocab_size()
        self.pad_id = self.id(family.pad)
        self.bos_id = None if family.bos is None else self.id(family.bos)

    @property
    def _sentencepiece(self) -> bool:
        return self.file_name.endswith(".model")

    def id(self, piece: str) -> int:
        """The id of one vocabulary piece, such as "<|image_pad|>". Raises ValueError when there is no such piece."""
        index = self._model.piece_to_id(piece) if self._sentencepiece else self._model.token_to_id(piece)
        # SentencePiece answers an unknown piece with the id of <unk>.
        if index is None or (self._sentencepiece and self._model.id_to_piece(index) != piece):
            raise ValueError(
                f"tokenizer {self.source}: no piece {piece!r} among its {self.vocab_size}; "
                f"a {self.kind} tokenizer has it (upstream's is {_FAMILIES[self.kind].repo})"
            )
        return index

    def encode(self, text: str, bos: bool) -> list[int]:
        """Ids of `text`, after the begin-of-sequence id if `bos`; never an end, never padding, never cut.

        Raises ValueError if `bos` is asked of a family that has none.
        """
        if bos and self.bos_id is None:
            raise ValueError(f"tokenizer {self.source}: a {self.kind} prompt has no begin-of-sequence piece")
        if self._sentencepiece:
            ids = self._model.encode(text)
        else:
            ids = self._model.encode(text, add_special_tokens=False).ids
        return [self.bos_id, *ids] if bos else list(ids)  # type: ignore[list-item]

    def save(self, directory: str | Path) -> Path:
        """Writes the file as it was read, so that `load_tokenizer(directory, kind)` gives this tokenizer back."""
        path = Path(directory) / self.file_name
        path.write_bytes(self._data)
        return path

    def __reduce__(self) -> tuple[Any, ...]:
        return Tokenizer, (self._data, self.file_name, self.kind, self.source)


def load_tokenizer(source: str | Path, kind: Kind) -> Tokenizer:
    """Reads a tokenizer from a file, a directory, or a hub repo id where no such path exists.

    A directory is searched for the file names of `kind`, in its order of preference. A local path never touches the
    network; for a repo id the hub's local cache is enough. Raises ValueError that names what was looked for and the
    command that fetches it.
    """
    if kind not in _FAMILIES:
        raise ValueError(f"tokenizer kind is {kind!r}; expected one of {', '.join(_FAMILIES)}")
    family, path = _FAMILIES[kind], Path(source)
    if path.is_dir():
        found = [path / name for name in family.files if (path / name).is_file()]
        if not found:
            raise ValueError(
                f"tokenizer directory {path} holds none of {', '.join(family.files)}; get it with\n"
                f"  {_fetch_command(family.repo, family, path)}"
            )
        path = found[0]
    elif not path.is_file():
        path = _from_hub(str(source), family)
    if path.suffix not in (".model", ".json"):
        raise ValueError(f"tokenizer file {path}: expected a SentencePiece .model or a tokenizers .json file")
    return Tokenizer(path.read_bytes(), f"tokenizer{path.suffix}", kind, str(source))


def _parse(data: bytes, file_name: str, source: str) -> Any:
    try:
        if file_name.endswith(".model"):
            import sentencepiece

            return sentencepiece.SentencePieceProcessor(model_proto=data)
        import tokenizers

        return tokenizers.Tokenizer.from_str(data.decode())
    except Exception as error:  # both libraries raise bare RuntimeError or Exception
        form = "SentencePiece model" if file_name.endswith(".model") else "tokenizers JSON file"
        raise ValueError(f"tokenizer {source}: {len(data)} bytes that are not a {form} ({error})") from error


def _from_hub(source: str, family: _Family) -> Path:
    """The file of a hub repo, from the local cache, else from the network."""
    if not re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", source):
        raise ValueError(
            f"tokenizer {source}: no such file or directory, and not a hub repo id (owner/name); get it with\n"
            f"  {_fetch_command(family.repo, family, Path('tokenizer'))}\nand name that directory"
        )
    import huggingface_hub
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError, LocalEntryNotFoundError

    for name in family.files:
        if isinstance(cached := huggingface_hub.try_to_load_from_cache(source, name), str):
            return Path(cached)
    reason: Exception | None = None
    for name in family.files:
        try:
            return Path(huggingface_hub.hf_hub_download(source, name))
        except LocalEntryNotFoundError as error:  # the hub cannot be reached
            reason = error
            break
        except EntryNotFoundError as error:  # the repo has no file of that name: try the next
            reason = error
        except (HfHubHTTPError, OSError) as error:  # gated, private or absent
            reason = error
            break
    raise ValueError(
        f"tokenizer {source}: not a local path, and not to be had from the hub ({type(reason).__name__}); get it with\n"
        f"  {_fetch_command(source, family, Path('tokenizer'))}\n"
        "(after `hf auth login`, if its licence has to be accepted first) and name that directory"
    ) from reason


def _fetch_command(repo: str, family: _Family, directory: Path) -> str:
    return f"hf download {repo} {family.files[0]} --local-dir {directory}"
