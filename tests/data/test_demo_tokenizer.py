"""The demo's tokenizers: the published file formats, the ids that the models rely on, any text at all."""

import pytest
import sentencepiece
import tokenizers

from somaspeed_jax.data import tabletop
from somaspeed_jax.data.demo_tokenizer import ensure_demo_tokenizer

ANY_TEXT = "Öffne\tdie 2 Schubladen, s'il vous plaît 打开 🤖"


@pytest.fixture(scope="module")
def gemma_like(tmp_path_factory):
    folder = ensure_demo_tokenizer(tmp_path_factory.mktemp("t"), "sentencepiece")
    return sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))


@pytest.fixture(scope="module", params=["qwen", "molmoact2"])
def qwen_like(request, tmp_path_factory):
    folder = ensure_demo_tokenizer(tmp_path_factory.mktemp("t"), request.param)
    return request.param, tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))


def test_sentencepiece_has_gemma_s_ids(gemma_like):
    t = gemma_like
    assert (t.pad_id(), t.eos_id(), t.bos_id(), t.unk_id()) == (0, 1, 2, 3)
    assert 300 <= t.get_piece_size() <= 512


def test_sentencepiece_cuts_digits_and_keeps_lines(gemma_like):
    pieces = gemma_like.encode("State: -1 128 37;\nAction: ", out_type=str)
    assert "\n" in pieces
    assert "".join(p.strip("▁") for p in pieces if p.strip("▁").isdigit()) == "112837"
    assert all(len(p.strip("▁")) == 1 for p in pieces if p.strip("▁").isdigit())


def test_every_colour_is_a_piece_of_its_own(gemma_like, qwen_like):
    """So that the word by which prompts differ is one token."""
    for colour in tabletop.COLOUR_NAMES:
        assert f"▁{colour}" in gemma_like.encode(f"reach the {colour} block", out_type=str)
        assert f"Ġ{colour}" in qwen_like[1].encode(f"reach the {colour} block").tokens


def test_any_text_goes_there_and_back(gemma_like, qwen_like):
    assert gemma_like.decode(gemma_like.encode(ANY_TEXT)) == ANY_TEXT
    assert 3 not in gemma_like.encode(ANY_TEXT)
    assert qwen_like[1].decode(qwen_like[1].encode(ANY_TEXT).ids) == ANY_TEXT


def test_special_tokens_are_single_ids_in_order(qwen_like):
    kind, t = qwen_like
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    if kind == "qwen":
        special += ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>"]
    else:
        special += ["<setup_start>", "<control_end>", "<state_start>", "<state_0>", "<state_255>", "<action_output>"]
        special += ["<im_start>", "<im_end>", "<im_patch>", "<|image|>"]
    ids = t.encode("".join(special)).ids
    assert [t.id_to_token(i) for i in ids] == special
    assert ids == sorted(ids)
    if kind == "molmoact2":
        assert t.token_to_id("<state_255>") - t.token_to_id("<state_0>") == 255
        pictures = {
            t.token_to_id(s) for s in ("<im_start>", "<im_end>", "<im_patch>", "<im_col>", "<low_res_im_start>")
        }
        assert pictures == set(range(t.token_to_id("<im_start>"), t.token_to_id("<im_start>") + 5))


def test_two_trainings_agree(tmp_path):
    for kind, name in (("sentencepiece", "tokenizer.model"), ("qwen", "tokenizer.json")):
        a, b = (ensure_demo_tokenizer(tmp_path / n, kind) / name for n in "ab")
        assert a.read_bytes() == b.read_bytes()


def test_an_unknown_kind_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"kind 'bert', expected one of \['molmoact2', 'qwen', 'sentencepiece'\]"):
        ensure_demo_tokenizer(tmp_path, "bert")
