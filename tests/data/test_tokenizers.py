"""Tokenizers: two file formats of one vocabulary agree, and a missing one is refused with what fetches it."""

import pickle
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
from hypothesis import given
from hypothesis import strategies as st

from somaspeed_jax.data.tokenizers import load_tokenizer

GEMMA = Path(__file__).parents[1] / "fixtures" / "gemma_tiny"
PIECES = load_tokenizer(GEMMA / "tokenizer.model", "gemma")
JSON = load_tokenizer(GEMMA / "tokenizer.json", "gemma")


@given(st.text(st.characters(exclude_categories=("Cs",), exclude_characters="<"), max_size=40), st.booleans())
def test_sentencepiece_and_json_give_equal_ids(text, bos):
    assert PIECES.encode(text, bos) == JSON.encode(text, bos)


def test_special_ids_and_sizes_agree():
    for tokenizer in (PIECES, JSON):
        assert (tokenizer.pad_id, tokenizer.bos_id, tokenizer.vocab_size) == (0, 2, 448)
        assert tokenizer.encode("pick", bos=True) == [2, *tokenizer.encode("pick", bos=False)]


@pytest.mark.parametrize("tokenizer", [PIECES, JSON], ids=["sentencepiece", "json"])
def test_pickles_and_saves(tokenizer, tmp_path):
    text = "Task: pick up the red cube;\nAction: "
    assert pickle.loads(pickle.dumps(tokenizer)).encode(text, True) == tokenizer.encode(text, True)
    saved = tokenizer.save(tmp_path)
    assert saved.read_bytes() == (GEMMA / saved.name).read_bytes()
    assert load_tokenizer(tmp_path, "gemma").encode(text, True) == tokenizer.encode(text, True)


def test_directory_prefers_sentencepiece_for_gemma():
    assert load_tokenizer(GEMMA, "gemma").file_name == "tokenizer.model"


def test_empty_directory_names_the_command(tmp_path):
    with pytest.raises(ValueError, match=r"hf download google/paligemma-3b-pt-224 tokenizer.model --local-dir"):
        load_tokenizer(tmp_path, "gemma")


def test_absent_path_names_the_command(tmp_path):
    with pytest.raises(ValueError, match=r"no such file or directory.*\n *hf download google/paligemma-3b-pt-224"):
        load_tokenizer(tmp_path / "gone", "gemma")


def test_unreachable_repo_names_the_command(monkeypatch):
    def offline(repo, name):
        raise LocalEntryNotFoundError(f"{repo} {name}")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", offline)
    with pytest.raises(
        ValueError, match=r"LocalEntryNotFoundError.*\n *hf download some/tokens tokenizer.model --local-dir"
    ):
        load_tokenizer("some/tokens", "gemma")


def test_repo_without_the_first_choice_takes_the_next(monkeypatch):
    def download(repo, name):
        if name == "tokenizer.model":
            raise EntryNotFoundError(name)
        return str(GEMMA / name)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    assert load_tokenizer("some/tokens", "gemma").file_name == "tokenizer.json"


def test_cached_repo_never_asks_the_hub(monkeypatch):
    def cached(repo, name):
        return str(GEMMA / name) if (repo, name) == ("some/tokens", "tokenizer.json") else None

    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", cached)
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *_: pytest.fail("asked the hub"))
    assert load_tokenizer("some/tokens", "gemma").file_name == "tokenizer.json"


def test_local_directory_never_asks_the_hub(monkeypatch):
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", lambda *_: pytest.fail("asked the hub"))
    load_tokenizer(GEMMA, "gemma")


def test_broken_file_is_named(tmp_path):
    for name, form in (("tokenizer.model", "SentencePiece model"), ("tokenizer.json", "tokenizers JSON file")):
        (tmp_path / name).write_bytes(b"version https://git-lfs.github.com/spec/v1")
        with pytest.raises(ValueError, match=f"{name}: 42 bytes that are not a {form}"):
            load_tokenizer(tmp_path / name, "gemma")


def test_other_extension_is_refused(tmp_path):
    (tmp_path / "tokens.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"expected a SentencePiece .model or a tokenizers .json"):
        load_tokenizer(tmp_path / "tokens.bin", "gemma")


def test_tokenizer_of_another_family_is_refused():
    with pytest.raises(ValueError, match=r"no piece '<\|endoftext\|>' among its 448; a qwen tokenizer has it"):
        load_tokenizer(GEMMA / "tokenizer.json", "qwen")


def test_unknown_piece_and_kind_are_refused():
    for tokenizer in (PIECES, JSON):
        with pytest.raises(ValueError, match="no piece '<nothing>'"):
            tokenizer.id("<nothing>")
    with pytest.raises(ValueError, match="kind is 'bert'; expected one of gemma, qwen, molmoact2"):
        load_tokenizer(GEMMA, "bert")  # type: ignore[arg-type]
