"""The byte tokenizer: ids are bytes, for every string and every byte sequence."""

import random

import pytest
from transformers import AutoTokenizer, DataCollatorForLanguageModeling

from elman_core.model import byte_tokenizer

EDGES = [
    "", " ", "\n", "a b", "  lead", "trail  ", "\x00", "\x1e", "\x1e\x00\x1e", "Ğ", "ÿ", "Āā", "é", "日本語", "👩‍👩‍👧",
    "\uffff", "\u200d",
    "<|pad|>", "<0x1E>", "\ufdd0", "\xff\ufdd0",
    "\x7f\x80\x9f", "e\u0301", "İi̇", "\r\n\t",
]  # fmt: skip


@pytest.fixture(scope="module", params=["made", "loaded"])
def tokenizer(request, tmp_path_factory):
    if request.param == "made":
        return byte_tokenizer()
    folder = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer().save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def strings(count, seed):
    rng = random.Random(seed)
    for _ in range(count):
        top = rng.choice([0x80, 0x100, 0x800, 0x10000, 0x110000])
        points = (rng.randrange(top) for _ in range(rng.randrange(40)))
        yield "".join(chr(p) for p in points if not 0xD800 <= p < 0xE000)


def test_every_string_is_its_own_bytes(tokenizer):
    for text in [*EDGES, *strings(2000, seed=0)]:
        ids = tokenizer(text).input_ids
        assert ids == list(text.encode()), repr(text)
        assert tokenizer(text, split_special_tokens=True).input_ids == ids, repr(text)
        assert tokenizer.decode(ids) == text, repr(text)


def test_every_byte_sequence_decodes_as_python_does(tokenizer):
    rng = random.Random(1)
    for _ in range(2000):
        raw = rng.randbytes(rng.randrange(30))
        assert tokenizer.decode(list(raw)) == raw.decode("utf-8", "replace"), raw


def test_there_are_256_entries_and_the_special_ones_are_0x1e_and_0xff(tokenizer):
    assert len(tokenizer) == tokenizer.vocab_size == 256
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (30, 30, 255)
    assert sorted(tokenizer.convert_tokens_to_ids(tokenizer.convert_ids_to_tokens(list(range(256))))) == list(
        range(256)
    )


def test_batches_are_padded_on_the_left(tokenizer):
    batch = tokenizer(["abc", "é"], padding=True, return_tensors="pt")
    assert batch.input_ids.tolist() == [[97, 98, 99], [255, 0xC3, 0xA9]]
    assert batch.attention_mask.tolist() == [[1, 1, 1], [0, 1, 1]]


def test_padding_is_no_byte_of_a_text(tokenizer):
    labels = DataCollatorForLanguageModeling(tokenizer, mlm=False)([{"input_ids": [0, 66]}, {"input_ids": [65] * 3}])
    assert labels["labels"].tolist() == [[-100, 0, 66], [65] * 3]
    assert tokenizer.decode([0, 66, 30, 255], skip_special_tokens=True) == "\0B"
