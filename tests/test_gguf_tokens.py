"""The tokenizer in a .gguf file: as the same vocabulary's own files are read, and as transformers converts it."""

import json
import random
from pathlib import Path

import pytest
import regex
from gguf import GGUFWriter, TokenType
from hypothesis import given, settings
from hypothesis import strategies as st

from gptcli.checkpoint.gguf import read_header
from gptcli.errors import GptcliError
from gptcli.families.splits import SPLITS, UNNAMED
from gptcli.tokens import Rule, from_files, from_gguf
from gptcli.tokens.chat import chat_text
from gptcli.tokens.files import byte_letters
from tests.toys import gpt2_vocabulary
from tests.trained import gemma3, smollm2

TEXTS = [
    "The cat sat on the mat.", "  two  blanks,\n\nlines\r\n\tand tabs  ", "I'm, you'RE, they'll: don't!",
    "12345 and 3.14159, ½ of ٣٤٥ or Ⅷ", "Grüße aus Köln, na\u00efve cafe\u0301 — “quoted”…",
    "数据很好 日本語のテキスト 한국어", "🙂👍🏽 x² ∑ a\u200db \ufeff",
    "def f(x):\n    return x + 1  # done\n", "<|im_start|>user <s> </s> <unk> <0x41>",
    "", " ", "\n", "a" * 70, "camelCaseHTTPServer2Go", "\N{GREEK SMALL LETTER ALPHA}\N{COMBINING TILDE}", "▁ ▁▁ Ġ Ċ",
]  # fmt: skip
LETTERS = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


def write(path: Path, keys: dict[str, object], arch: str = "llama") -> Path:
    """A file of metadata alone; keys without the tokenizer.ggml. before them."""
    writer = GGUFWriter(path, arch)
    for key, value in keys.items():
        name = key if "." in key else f"tokenizer.ggml.{key}"
        kinds = {bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string, list: writer.add_array}
        kinds[type(value)](name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def opened(path: Path):
    return from_gguf(read_header(path))


# Byte pairs


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory) -> dict[str, object]:
    """GPT-2's vocabulary as metadata, and what its own files give."""
    folder = gpt2_vocabulary(tmp_path_factory.mktemp("gpt2"))
    words = json.loads((folder / "vocab.json").read_text())
    merges = (folder / "merges.txt").read_text(encoding="utf-8").split("\n")
    tokens = sorted(words, key=words.get)
    types = [TokenType.NORMAL] * len(tokens)
    types[words["<|endoftext|>"]] = TokenType.CONTROL
    return {
        "model": "gpt2",
        "tokens": tokens,
        "token_type": [int(kind) for kind in types],
        "merges": [line for line in merges if line and not line.startswith("#version")],
        "bos_token_id": 50256,
        "eos_token_id": 50256,
        "own": from_files(folder),
    }


def metadata(gpt2: dict[str, object], **others: object) -> dict[str, object]:
    return {key: value for key, value in (gpt2 | others).items() if key != "own" and value is not None}


@pytest.fixture(scope="module")
def as_gpt2(gpt2, tmp_path_factory):
    return opened(write(tmp_path_factory.mktemp("one") / "m.gguf", metadata(gpt2, pre="gpt-2"), "gpt2"))


@pytest.mark.parametrize("special", [False, True])
def test_a_vocabulary_gives_what_its_own_files_give(gpt2, as_gpt2, special):
    own = gpt2["own"]
    assert as_gpt2.size == own.size == 50257
    for text in [*TEXTS, "a<|endoftext|>b"]:
        assert as_gpt2.encode(text, Rule(special=special)) == own.encode(text, Rule(special=special)), text
    for id_ in range(50257):
        assert as_gpt2.piece(id_) == own.piece(id_), id_
    assert as_gpt2.piece(50257) is None and as_gpt2.piece(-1) is None
    assert as_gpt2.encode("x", Rule(bos=True)) == [50256, 87]


@given(LETTERS)
@settings(deadline=None, max_examples=150)
def test_any_text_as_its_own_files_have_it(gpt2, as_gpt2, text):
    ids = as_gpt2.encode(text)
    assert ids == gpt2["own"].encode(text)
    assert b"".join(map(as_gpt2.piece, ids)).decode() == text


# How the models' own tokenizer.json split a text, as their pre_tokenizers write it, in a library of its own.
CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
PATTERNS = {
    "llama-bpe": CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+",
    "qwen2": CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "gpt-2": r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    "gpt-4o": rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+{CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*{CONTRACTIONS}?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "tekken": rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}*{LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{UPPER}+{LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    "smollm": r"\p{N}|'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+(?=\p{N})|\s+(?!\S)|\s+",
}
PATTERNS |= {"dbrx": PATTERNS["llama-bpe"], "starcoder": PATTERNS["smollm"], "olmo": PATTERNS["gpt-2"]}


@pytest.mark.parametrize("pre", PATTERNS)
def test_a_text_is_split_as_the_vocabulary_s_own_file_splits_it(gpt2, pre, tmp_path):
    """By the published pattern, with the regex package."""
    ours = opened(write(tmp_path / "m.gguf", metadata(gpt2, pre=pre, add_bos_token=False)))
    letters = {byte: letter for letter, byte in byte_letters().items()}
    for text in TEXTS:
        found = [word for word, _ in ours.run.pre_tokenizer.pre_tokenize_str(text)]
        expected = ["".join(letters[byte] for byte in part.encode()) for part in regex.findall(PATTERNS[pre], text)]
        assert found == expected, text


def test_letters_and_their_marks_are_joined_where_the_model_s_own_tokenizer_does(gpt2, tmp_path):
    ours = opened(write(tmp_path / "m.gguf", metadata(gpt2, pre="qwen2")))
    assert ours.encode("cafe\u0301") == ours.encode("caf\u00e9")
    other = opened(write(tmp_path / "n.gguf", metadata(gpt2, pre="megrez")))
    assert other.encode("cafe\u0301") != other.encode("caf\u00e9")


def test_every_named_split_can_be_run(gpt2, tmp_path):
    for pre in SPLITS:
        assert opened(write(tmp_path / "m.gguf", metadata(gpt2, pre=pre))).encode("Hi 12", Rule(bos=False))
    assert set(UNNAMED.values()) <= set(SPLITS)


def test_a_word_of_the_vocabulary_may_be_taken_whole(tmp_path):
    """In Llama 3's, a word that no merge makes is still found whole."""
    keys = {"model": "gpt2", "tokens": ["a", "b", "c", "ab", "abc", "<s>"], "merges": ["a b"], "bos_token_id": 5,
            "token_type": [1, 1, 1, 1, 1, 3]}  # fmt: skip
    assert opened(write(tmp_path / "m.gguf", keys | {"pre": "llama-bpe"})).encode("abc") == [5, 4]
    assert opened(write(tmp_path / "m.gguf", keys | {"pre": "dbrx"})).encode("abc") == [3, 2]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"pre": "gpt-2"}, [87]),
        ({"pre": "gpt-2", "add_bos_token": True}, [50256, 87]),
        ({"pre": "gpt-2", "add_eos_token": True}, [87, 50256]),
        ({"pre": "llama-bpe"}, [50256, 87]),
        ({"pre": "llama-bpe", "add_bos_token": False}, [87]),
        ({"pre": "tekken", "bos_token_id": 0}, [0, 87]),
    ],
)
def test_what_is_added_to_a_text(gpt2, tmp_path, keys, expected):
    tokenizer = opened(write(tmp_path / "m.gguf", metadata(gpt2, **keys)))
    assert tokenizer.encode("x") == expected
    assert tokenizer.marked("x").added == [id_ != 87 for id_ in expected]
    assert tokenizer.encode("x", Rule(bos=False)) == [87]


def test_words_that_are_always_tokens_and_words_that_are_if_asked(gpt2, tmp_path):
    tokens, types = [*gpt2["tokens"], "<think>", "<|im_start|>"], [*gpt2["token_type"], 4, 3]
    ours = opened(write(tmp_path / "m.gguf", metadata(gpt2, pre="gpt-2", tokens=tokens, token_type=types)))
    assert ours.encode("<think>") == [50257] and ours.piece(50257) == b"<think>"
    assert 50258 not in ours.encode("a<|im_start|>") and ours.encode("<|im_start|>", Rule(special=True)) == [50258]


def test_names_of_padding_rows_are_no_tokens(gpt2, tmp_path):
    tokens, types = [*gpt2["tokens"], "[PAD50257]", "[PAD50258]"], [*gpt2["token_type"], 5, 5]
    ours = opened(write(tmp_path / "m.gguf", metadata(gpt2, pre="gpt-2", tokens=tokens, token_type=types)))
    assert ours.size == 50257 and ours.piece(50257) is None
    others = [*gpt2["tokens"], "[PAD50257]", "[word]"], [*gpt2["token_type"], 5, 1]
    ours = opened(write(tmp_path / "m.gguf", metadata(gpt2, pre="gpt-2", tokens=others[0], token_type=others[1])))
    assert ours.size == 50259


FAULTS = {
    "a kind": ({"model": "t5"}, r"tokenizer.ggml.model: 't5' is not implemented \(known: gpt2, llama\)"),
    "a split": ({"pre": "lama-bpe"}, 'pre: \'lama-bpe\' is not implemented; did you mean "llama-bpe"'),
    "no split": ({"pre": None}, "tokenizer.ggml.pre: missing, and with it how a text is split"),
    "the default": ({"pre": "default"}, "pre: 'default' is not implemented"),
    "no merges": ({"merges": None}, "tokenizer.ggml.merges: missing; give --ids"),
    "no tokens": ({"tokens": None}, "tokenizer.ggml.tokens: missing"),
    "half a merge": ({"merges": ["Ġt"]}, "tokenizer.ggml.merges: 'Ġt' is not two words"),
    "a merge of strangers": ({"merges": ["Ġ zzzq"]}, "m.gguf: Token `zzzq` out of vocabulary"),
    "tokens as numbers": ({"tokens": [1, 2]}, "tokenizer.ggml.tokens: not an array of str"),
    "tokens as text": ({"tokens": "a"}, "tokenizer.ggml.tokens: not an array"),
    "types": ({"token_type": [1, 1]}, "tokenizer.ggml.token_type: 2 for 50,257 tokens"),
    "a BOS beyond": ({"bos_token_id": 50257}, "bos_token_id: 50257 is no token of 50,257"),
    "a BOS without an id": ({"bos_token_id": None, "add_bos_token": True}, "add_bos_token: true, but"),
    "a flag": ({"add_bos_token": 1}, "tokenizer.ggml.add_bos_token: 1 is not true or false"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_told(gpt2, tmp_path, fault):
    changes, expected = FAULTS[fault]
    with pytest.raises(GptcliError, match=expected) as caught:
        opened(write(tmp_path / "m.gguf", metadata(gpt2, **({"pre": "gpt-2"} | changes))))
    assert "\n" not in str(caught.value) and caught.value.code == "tokenizer"


def test_a_token_that_stands_twice_is_told(gpt2, tmp_path):
    tokens = [*gpt2["tokens"][:-1], "!"]
    with pytest.raises(GptcliError, match=r"tokenizer.ggml.tokens: '!' stands twice"):
        opened(write(tmp_path / "m.gguf", metadata(gpt2, pre="gpt-2", tokens=tokens)))


def test_files_of_the_first_months_name_no_split(gpt2, tmp_path):
    for arch, name in UNNAMED.items():
        ours = opened(write(tmp_path / "m.gguf", metadata(gpt2), arch))
        named = opened(write(tmp_path / "n.gguf", metadata(gpt2, pre=name), arch))
        assert [ours.encode(text) for text in TEXTS] == [named.encode(text) for text in TEXTS]


def test_a_file_without_a_tokenizer(tmp_path):
    assert opened(write(tmp_path / "m.gguf", {"general.name": "x"})) is None


# Pieces

CORPUS = [
    "the cat sat on the mat and the dog sat on the log", "a mat, a log, a cat: that is that", "naïve café, Grüße",
    "one two three four five six seven eight nine ten", "the thing that the other thing thought", "   blanks   here",
]  # fmt: skip

ALWAYS = ["▁▁", "\n\n", "<think>"]


@pytest.fixture(scope="module", params=["llama", "gemma", "bare"])
def pieces(request, tmp_path_factory):
    """A small model of sentencepiece, trained here, and the same as metadata: with a blank before a text, or not."""
    import io

    import sentencepiece

    kind, folder = request.param, tmp_path_factory.mktemp("pieces")
    made = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS * 20), model_writer=made, vocab_size=330 if kind != "bare" else 70,
        model_type="bpe", byte_fallback=kind != "bare", add_dummy_prefix=kind == "llama",
        normalization_rule_name="identity",
        remove_extra_whitespaces=False, user_defined_symbols=ALWAYS, control_symbols=["<turn>"],
        character_coverage=1.0, minloglevel=2, hard_vocab_limit=False,
    )  # fmt: skip
    (folder / "tokenizer.model").write_bytes(made.getvalue())
    run = sentencepiece.SentencePieceProcessor(model_proto=made.getvalue())
    kinds = (run.is_unknown, 2), (run.is_control, 3), (run.is_unused, 5), (run.is_byte, 6)
    ids = range(run.get_piece_size())
    types = [next((number for holds, number in kinds if holds(id_)), 1) for id_ in ids]
    words = [run.id_to_piece(id_) for id_ in ids]
    types = [4 if word in ALWAYS else kind_ for word, kind_ in zip(words, types)]
    keys = {
        "model": "llama",
        "tokens": [word.replace("▁", " ") if kind_ == 4 else word for word, kind_ in zip(words, types)],
        "scores": [run.get_score(id_) for id_ in ids],
        "token_type": types,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        "add_space_prefix": kind == "llama",
    }
    return kind, folder, keys


def test_pieces_give_what_their_own_file_gives(pieces, tmp_path):
    _, folder, keys = pieces
    own, ours = from_files(folder), opened(write(tmp_path / "m.gguf", keys))
    assert ours.size == own.size and [ours.piece(i) for i in range(ours.size)] == [
        own.piece(i) for i in range(own.size)
    ]
    rng = random.Random(0)
    texts = TEXTS + CORPUS + ["".join(rng.choices("theaoc \n<>ï▁", k=30)) for _ in range(200)]
    for text in [*texts, "<think>x<turn> <s>", "a  b\n\nc"]:
        for rule in (Rule(), Rule(bos=False), Rule(special=True)):
            assert ours.marked(text, rule) == own.marked(text, rule), text


@pytest.mark.parametrize(
    ("changes", "expected"),
    [({}, [1]), ({"add_bos_token": False}, []), ({"add_eos_token": True}, [1, 2]), ({"bos_token_id": 2}, [2])],
)
def test_a_text_of_pieces_begins_with_a_bos_unless_told_otherwise(pieces, tmp_path, changes, expected):
    ours = opened(write(tmp_path / "m.gguf", pieces[2] | changes))
    marked = ours.marked("cat")
    assert [id_ for id_, added in zip(*marked) if added] == expected


def test_a_vocabulary_of_pieces_need_say_little(pieces, tmp_path):
    """No types of unknown words, no ids: the format's own reader takes 0, 1 and 2."""
    _, folder, keys = pieces
    types = [1 if kind == 2 else kind for kind in keys["token_type"]]
    little = {key: value for key, value in keys.items() if not key.endswith("_id")} | {"token_type": types}
    ours, own = opened(write(tmp_path / "m.gguf", little)), from_files(folder)
    assert [ours.encode(text) for text in TEXTS] == [own.encode(text) for text in TEXTS]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"scores": [0.5]}, "tokenizer.ggml.scores: 1 for "),
        ({"unknown_token_id": 10**6}, "unknown_token_id: 1000000 is no token of"),
        ({"token_type": [2] * 330}, "token_type|not a model of sentencepiece"),
        ({"add_space_prefix": 1}, "add_space_prefix: 1 is not true or false"),
    ],
)
def test_faults_of_pieces_are_told(pieces, tmp_path, changes, expected):
    with pytest.raises(GptcliError, match=expected):
        opened(write(tmp_path / "m.gguf", pieces[2] | changes))


# Trained vocabularies


def library(path: Path):
    """transformers' tokenizer of a .gguf file."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_trained_vocabularies_equal_transformers_conversion(name, tmp_path):
    path = smollm2() if name == "smollm2" else gemma3(tmp_path)
    if path is None:
        pytest.skip(f"needs the package that holds {name}")
    ours, theirs = opened(path), library(path)
    if name == "smollm2":  # whose split of digits, each alone, the library does not know of a file's name
        from tokenizers import pre_tokenizers

        steps = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        theirs.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    rng = random.Random(1)
    alphabet = "etaoin shrdlu.,'\n\t0123456789ABCéü中文🙂<>|_"
    texts = TEXTS + ["".join(rng.choices(alphabet, k=60)) for _ in range(200)]
    for text in texts:
        if "<" in text:  # special words: the library takes them for tokens wherever they stand
            text = text.replace("<", "(")
        assert ours.encode(text) == theirs(text)["input_ids"], text
    pieces = [ours.piece(id_).decode("utf-8", "replace") for id_ in range(0, ours.size, 37)]
    if name == "smollm2":
        assert pieces == [theirs.decode([id_]) for id_ in range(0, ours.size, 37)]


# Chat


def test_a_message_in_the_file_s_own_template(gpt2, tmp_path):
    template = "{{ bos_token }}{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}{{ eos_token }}{% endfor %}>"
    keys = metadata(gpt2, pre="gpt-2") | {"tokenizer.chat_template": template}
    header = read_header(write(tmp_path / "m.gguf", keys))
    assert chat_text(header, "Hi") == "<|endoftext|>[user] Hi<|endoftext|>>"
    bad = metadata(gpt2, pre="gpt-2") | {"tokenizer.chat_template": "{{ 1 / 0 }}"}
    with pytest.raises(GptcliError, match=r"n.gguf: the template fails \(division by zero\)"):
        chat_text(read_header(write(tmp_path / "n.gguf", bad)), "Hi")
    with pytest.raises(GptcliError, match=r"o.gguf has no chat template"):
        chat_text(read_header(write(tmp_path / "o.gguf", metadata(gpt2, pre="gpt-2"))), "Hi")
