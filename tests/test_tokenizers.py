"""Tokenizers of every kind that a checkpoint brings, against transformers and sentencepiece on the same directory."""

import io
import json
import subprocess
import sys
import time

import pytest
import sentencepiece
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, BertTokenizer, GPT2Tokenizer, LlamaTokenizer, PreTrainedTokenizerFast
from transformers.tokenization_utils_base import generate_merges

from gptcli.errors import GptcliError
from gptcli.shipped import samples
from gptcli.source import open_model
from gptcli.tokens import BytePairs, Rule, Token, from_files, visible
from gptcli.tokens.chat import chat_text
from gptcli.tokens.files import Library, Sentences
from tests.command import gptcli
from tests.oracle import save_toy
from tests.toys import gpt2_vocabulary

SENTENCES = [
    "The cat sat on the mat, and the dog sat on the cat.",
    "A model reads a text as a row of tokens, and says which token comes next.",
    "the cat's mat isn't the dog's mat; they're 12 mats of 345 cats",
    "naïve café 日本語 the cat\nand\tthe dog",
] * 4
TEXTS = [
    "the cat sat",
    " the cat sat",
    "The  cat's\n\n\tmat 1234",
    "naïve 日本語 👩🏽‍🚀 🙂",
    "é\u0301\u200b\ufeff\x00",
    "\n",
    "   ",
    "▁ a Ġb <0x0A> ␣",
    "<s>the cat</s>",
]
PLAIN, WITH_SPECIAL = Rule(bos=False), Rule(special=True)


def bpe(size, special, **options):
    return trainers.BpeTrainer(vocab_size=size, special_tokens=special, show_progress=False, **options)


def byte_level():
    """Bytes under merges, split by a published regex, `<s>` put in front by a template, and special words added."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    split = r"(?i:'s|'t|'re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(SENTENCES, bpe(320, [], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    tokenizer.add_special_tokens(["<s>", "</s>", "<|eot|>"])
    template = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return tokenizer


def no_bos():
    """The same without anything added, and a word that is added but not special."""
    tokenizer = byte_level()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    return tokenizer


def byte_fallback():
    """Pieces with `▁` for a space, one put before each text, and `<0x0A>` for a byte that no piece holds."""
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(SENTENCES[:2], bpe(340, special, initial_alphabet=["▁"]))
    model = json.loads(trained.to_str())["model"]
    merges = [tuple(merge) for merge in model["merges"]]
    tokenizer = Tokenizer(
        models.BPE(model["vocab"], merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)  # noqa: S106
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)]
    )
    return tokenizer


def unigram():
    """Pieces by their probability, `</s>` put after each text."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.train_from_iterator(
        SENTENCES,
        trainers.UnigramTrainer(
            vocab_size=90,
            special_tokens=["<pad>", "</s>", "<unk>"],
            unk_token="<unk>",  # noqa: S106
            show_progress=False,
        ),
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    return tokenizer


def word_pieces():
    """Lower case, `##` before what goes on with a word, marks at both ends."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))  # noqa: S106
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    special = ["[UNK]", "[CLS]", "[SEP]"]
    tokenizer.train_from_iterator(
        SENTENCES, trainers.WordPieceTrainer(vocab_size=120, special_tokens=special, show_progress=False)
    )
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1))
    return tokenizer


KINDS = {made.__name__: made for made in (byte_level, no_bos, byte_fallback, unigram, word_pieces)}
SPACE_FIRST = ("byte_fallback", "unigram")  # a space is put before each text
TABLE = {"content": "<s>", "lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
SETTINGS = {
    "no file": None,
    "nothing said": {},
    "bos named": {"bos_token": "<s>"},
    "bos as a table": {"bos_token": TABLE | {"__type": "AddedToken"}, "add_bos_token": True},
    "bos on": {"bos_token": "<s>", "add_bos_token": True},
    "bos off": {"bos_token": "<s>", "add_bos_token": False},
    "on but none named": {"bos_token": None, "add_bos_token": True},
    "both ends": {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, "add_eos_token": True},
    "eos alone": {"bos_token": "<s>", "eos_token": "</s>", "add_eos_token": True},
    "bos off, eos on": {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": False, "add_eos_token": True},
}


def written(folder, tokenizer, settings=None):
    """A folder as a checkpoint has it: tokenizer.json, and tokenizer_config.json where there are settings."""
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    if settings is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


def framed_ids(ours, text, rule=Rule()):  # noqa: B008
    """(ids, the ones that were added)"""
    ids, added = ours.marked(text, rule)
    assert len(ids) == len(added)
    return ids, [id_ for id_, mark in zip(ids, added) if mark]


def joined(tokenizer, ids):
    return b"".join(tokenizer.piece(id_) for id_ in ids)


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    return request.param, KINDS[request.param]()


# tokenizer.json, by its own library.


@pytest.mark.parametrize("settings", SETTINGS)
def test_ids_and_what_is_added_are_transformers(kind, tmp_path, settings):
    """The file's own post-processor has the word; add_bos_token and add_eos_token beside it are not read."""
    name, tokenizer = kind
    if name in ("unigram", "word_pieces"):  # transformers would add to the vocabulary what the settings name
        tokenizer = Tokenizer.from_str(tokenizer.to_str())
        tokenizer.add_special_tokens(["<s>", "</s>"])
    folder = written(tmp_path / "model", tokenizer, SETTINGS[settings])
    theirs, ours = PreTrainedTokenizerFast.from_pretrained(folder), from_files(folder)
    assert isinstance(ours, Library)
    # Plain text is what the library calls special tokens split.
    theirs.backend_tokenizer.encode_special_tokens = True
    for text in TEXTS:
        expected = theirs.backend_tokenizer.encode(text)
        ids, added = ours.marked(text)
        assert ids == expected.ids
        assert added == [bool(mark) for mark in expected.special_tokens_mask]
        assert ours.encode(text, PLAIN) == theirs.backend_tokenizer.encode(text, add_special_tokens=False).ids
    for text in TEXTS:
        assert ours.encode(text, WITH_SPECIAL) == theirs(text, split_special_tokens=False)["input_ids"]


def test_auto_tokenizer_reads_the_directory_alike(kind, tmp_path):
    """The way most people load it: a config.json and a tokenizer_class beside it."""
    folder = written(tmp_path / "model", kind[1], {"tokenizer_class": "PreTrainedTokenizerFast"})
    (folder / "config.json").write_text('{"model_type": "llama"}')
    theirs, ours = AutoTokenizer.from_pretrained(folder), from_files(folder)
    for text in TEXTS[:4]:
        assert ours.encode(text) == theirs(text)["input_ids"]


@pytest.mark.parametrize("name", ["byte_level", "no_bos", "byte_fallback"])
@pytest.mark.parametrize("text", TEXTS)
def test_pieces_join_to_the_text(name, tmp_path, text):
    """Nothing is lost and nothing is spelt in signs; a tokenizer that puts a space before a text shows that space."""
    ours = from_files(written(tmp_path / "model", KINDS[name]()))
    normal = normalizers.NFC().normalize_str(text) if name == "no_bos" else text
    space = b" " if name in SPACE_FIRST and text else b""
    if name == "byte_fallback":
        normal = normal.replace("▁", " ")  # to sentencepiece's kind, its sign for a space is a space
    assert joined(ours, ours.encode(text, PLAIN)) == space + normal.encode()


@pytest.mark.parametrize("name", ["unigram", "word_pieces"])
def test_pieces_of_words_join_to_the_text(name, tmp_path):
    ours = from_files(written(tmp_path / "model", KINDS[name]()))
    assert joined(ours, ours.encode("the cat sat on the mat", PLAIN)) == b" the cat sat on the mat"


def test_no_label_holds_a_sign_of_the_files(kind, tmp_path):
    """The letters that stand for bytes, the sign for a space, a byte by its number, the mark of a word's inside."""
    name, tokenizer = kind
    ours = from_files(written(tmp_path / "model", tokenizer))
    labels = [visible(ours.piece(id_)) for id_ in range(ours.size)]
    assert len(labels) == tokenizer.get_vocab_size() and all(labels)
    spelt = [label for label in labels if any(sign in label for sign in ("Ġ", "Ċ", "▁", "<0x", "##"))]
    assert spelt == []
    assert "␣the" in labels and ("\\n" in labels or name in ("unigram", "word_pieces"))


def test_find_is_the_word_with_or_without_its_space(kind, tmp_path):
    ours = from_files(written(tmp_path / "model", kind[1]))
    assert visible(ours.piece(ours.find(" the"))) == "␣the"
    assert ours.piece(ours.find("the")).strip() == b"the"


@pytest.mark.parametrize("name", ["unigram", "word_pieces"])
def test_find_does_not_take_the_unknown_for_a_word(name, tmp_path):
    """Each of these is one id, the one that stands for everything else."""
    ours = from_files(written(tmp_path / "model", KINDS[name]()))
    unknown = {"unigram": 2, "word_pieces": 0}[name]
    assert unknown in ours.encode("☃", PLAIN)
    with pytest.raises(GptcliError, match="is not one token"):
        ours.find("☃")


@pytest.mark.parametrize("id_", [10_000, 2**31, 2**32, 2**64, -1])
def test_an_id_beyond_is_an_empty_label(kind, tmp_path, id_):
    assert Token.of(id_, from_files(written(tmp_path / "model", kind[1]))) == Token(id_, "", None)


def test_a_length_that_a_file_asks_for_is_for_training(tmp_path):
    """Files of trained models may cut or fill up every text; transformers does neither unless it is asked."""
    tokenizer = byte_level()
    tokenizer.enable_truncation(3)
    tokenizer.enable_padding(length=50, pad_id=0)
    folder = written(tmp_path / "model", tokenizer)
    text = "the cat sat on the mat"
    ids = from_files(folder).encode(text)
    assert len(ids) > 3 and ids == PreTrainedTokenizerFast.from_pretrained(folder)(text)["input_ids"]


def test_ids_of_added_words_are_the_librarys(tmp_path):
    """It numbers them on from the vocabulary, whatever the file says; the labels must be of the ids that are fed."""
    table = json.loads(no_bos().to_str())
    assert table["added_tokens"][-1]["content"] == "<tool>"
    table["added_tokens"][-1]["id"] += 20
    (tmp_path / "tokenizer.json").write_text(json.dumps(table), encoding="utf-8")
    ours = from_files(tmp_path)
    (id_,) = ours.encode("<tool>")
    assert ours.piece(id_) == b"<tool>" and ours.size == id_ + 1
    assert [id_] == PreTrainedTokenizerFast.from_pretrained(tmp_path)("<tool>")["input_ids"]


def test_a_word_without_an_id_is_one_error(tmp_path):
    folder = written(tmp_path / "model", Tokenizer(models.WordPiece({"the": 0}, unk_token="[UNK]")))  # noqa: S106
    with pytest.raises(GptcliError, match=r"tokenizer\.json: .*\[UNK\]"):
        from_files(folder).encode("dog")


def test_what_is_no_text_is_one_error(kind, tmp_path):
    """Python reads bytes of a command line that are not UTF-8 as lone surrogates."""
    with pytest.raises(GptcliError, match="not UTF-8"):
        from_files(written(tmp_path / "model", kind[1])).encode("a\udcffb")
    with pytest.raises(GptcliError, match="not UTF-8"):
        from_files(samples()["tiny-gpt2"]).encode("a\udcffb")


# BOS and special words.


def ids_of(tokenizer, *words):
    return [tokenizer.token_to_id(word) for word in words]


@pytest.mark.parametrize("settings", ["no file", "bos on"])
def test_asking_for_a_bos_or_for_none(tmp_path, settings):
    tokenizer = byte_level()
    ours = from_files(written(tmp_path / "model", tokenizer, SETTINGS[settings]))
    (bos,), text = ids_of(tokenizer, "<s>"), ours.encode("the cat", PLAIN)
    assert bos not in text
    assert framed_ids(ours, "the cat") == framed_ids(ours, "the cat", Rule(bos=True)) == ([bos, *text], [bos])
    assert framed_ids(ours, "the cat", Rule(bos=False)) == (text, [])


def test_asking_for_a_bos_where_the_model_begins_with_none(tmp_path):
    tokenizer = no_bos()
    ours = from_files(written(tmp_path / "model", tokenizer, SETTINGS["bos named"]))
    (bos,), text = ids_of(tokenizer, "<s>"), ours.encode("the cat")
    assert framed_ids(ours, "the cat") == (text, [])
    assert framed_ids(ours, "the cat", Rule(bos=True)) == ([bos, *text], [bos])


@pytest.mark.parametrize("name", ["no_bos", "unigram"])
def test_asking_for_a_bos_that_nobody_names(name, tmp_path):
    """The unigram's `</s>` is put after a text: it is no BOS."""
    ours = from_files(written(tmp_path / "model", KINDS[name]()))
    with pytest.raises(GptcliError, match=r"--bos: tokenizer\.json names no BOS"):
        ours.encode("the cat", Rule(bos=True))


@pytest.mark.parametrize("library", ["tokenizers", "tiktoken"])
def test_a_text_that_begins_with_the_bos_word(tmp_path, library):
    """The model's rule adds its own before it, as transformers does, and the mark tells which is which; --bos asks for
    one and gets one; without a rule the text's own stays.
    """
    if library == "tokenizers":
        folder, word = written(tmp_path / "model", byte_level(), SETTINGS["bos on"]), "<s>"
    else:
        folder, word = gpt2_vocabulary(tmp_path), "<|endoftext|>"
        settings = {"bos_token": word, "add_bos_token": True, "tokenizer_class": "GPT2Tokenizer"}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    ours, theirs = from_files(folder), AutoTokenizer.from_pretrained(folder)
    bos = theirs.bos_token_id
    text = ours.encode("the cat", PLAIN)
    assert isinstance(ours, BytePairs) is (library == "tiktoken")
    assert framed_ids(ours, f"{word}the cat", WITH_SPECIAL) == ([bos, bos, *text], [bos])
    assert theirs(f"{word}the cat")["input_ids"] == [bos, bos, *text]
    assert framed_ids(ours, f"{word}the cat", Rule(True, special=True)) == ([bos, *text], [])
    assert framed_ids(ours, f"{word}the cat", Rule(False, special=True)) == ([bos, *text], [])
    plain = framed_ids(ours, f"{word}the cat")
    assert plain[0].count(bos) == 1 and plain[1] == [bos]  # here the word is ordinary text


def test_one_encoding_leaves_nothing_to_the_next(kind, tmp_path):
    ours = from_files(written(tmp_path / "model", kind[1], SETTINGS["bos named"]))
    rules = [Rule(), WITH_SPECIAL, PLAIN, Rule(False, special=True)]
    text = "<s>the cat</s>[SEP]"
    first = [ours.marked(text, rule) for rule in rules]
    assert [ours.marked(text, rule) for rule in reversed(rules)] == first[::-1]


def test_added_words_that_are_not_special_are_tokens_in_any_text(tmp_path):
    """So it is in transformers: only special words can be asked to be plain text."""
    tokenizer = no_bos()
    ours = from_files(written(tmp_path / "model", tokenizer))
    tool, eot = ids_of(tokenizer, "<tool>", "<|eot|>")
    assert ours.encode("<tool>")[:1] == [tool]
    assert eot not in ours.encode("a<|eot|>b") and eot in ours.encode("a<|eot|>b", WITH_SPECIAL)


# GPT-2's kind, by tiktoken.


def saved_by_transformers(gpt2, folder, **settings):
    theirs = GPT2Tokenizer(vocab=str(gpt2 / "vocab.json"), merges=str(gpt2 / "merges.txt"), **settings)
    theirs.save_pretrained(folder)
    return folder, theirs


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    return gpt2_vocabulary(tmp_path_factory.mktemp("gpt2"))


def test_gpt2_as_transformers_saves_it_is_run_by_tiktoken(gpt2, tmp_path):
    """Its template of the text alone adds nothing."""
    folder, theirs = saved_by_transformers(gpt2, tmp_path)
    table = json.loads((folder / "tokenizer.json").read_text())
    assert table["post_processor"]["type"] == "TemplateProcessing"
    ours = from_files(folder)
    assert isinstance(ours, BytePairs)
    for text in TEXTS:
        assert ours.encode(text) == theirs(text)["input_ids"]
    text = "a<|endoftext|> b<|endoftext|>"
    assert ours.encode(text, WITH_SPECIAL) == theirs(text)["input_ids"]
    assert ours.encode(text, WITH_SPECIAL).count(50256) == 2 and 50256 not in ours.encode(text)


def test_gpt2_with_a_bos_of_its_own_rule(gpt2, tmp_path):
    folder, theirs = saved_by_transformers(gpt2, tmp_path, add_bos_token=True)
    for text in TEXTS:
        ids, added = from_files(folder).marked(text)
        assert ids == theirs(text)["input_ids"] and added == [True] + [False] * (len(ids) - 1)


def test_gpt2s_bos_is_its_one_special_token(gpt2):
    """The files that OpenAI published come without a word of it: the text of a document began after `<|endoftext|>`."""
    ours = from_files(gpt2)
    assert framed_ids(ours, "The cat", Rule(bos=True)) == ([50256, 464, 3797], [50256])
    assert framed_ids(ours, "The cat") == ([464, 3797], [])


def test_special_words_that_begin_alike_are_the_longer(gpt2, tmp_path):
    """tiktoken would take whichever it comes upon first, and another at each start."""
    folder, _ = saved_by_transformers(gpt2, tmp_path, extra_special_tokens=["<|a|>", "<|a|><|b|>"])
    theirs, ours = AutoTokenizer.from_pretrained(folder), from_files(folder)
    text = "x<|a|><|b|>y<|a|>"
    assert ours.encode(text, WITH_SPECIAL) == theirs(text)["input_ids"]
    assert {50257, 50258} < set(ours.encode(text, WITH_SPECIAL))


def test_a_special_word_that_takes_the_space_before_it(gpt2, tmp_path):
    folder, _ = saved_by_transformers(gpt2, tmp_path, mask_token=AddedToken("<mask>", lstrip=True, special=True))
    theirs, ours = AutoTokenizer.from_pretrained(folder), from_files(folder)
    assert ours.encode("a  <mask> b", WITH_SPECIAL) == theirs("a  <mask> b")["input_ids"] == [64, 50257, 275]


def test_a_word_that_no_merge_makes_has_a_readable_label(tmp_path):
    """It stands in vocab.json like any other, in letters for bytes, and no text becomes it, special or not."""
    source = samples()["tiny-gpt2"]
    table = json.loads((source / "vocab.json").read_text(encoding="utf-8"))
    (tmp_path / "vocab.json").write_text(json.dumps(table | {"Ġmouse": 320, "<pad>": 321}), encoding="utf-8")
    (tmp_path / "merges.txt").write_bytes((source / "merges.txt").read_bytes())
    ours = from_files(tmp_path)
    assert isinstance(ours, BytePairs)
    assert visible(ours.piece(320)) == "␣mouse" and ours.size == 322
    assert 320 not in ours.encode("a mouse Ġmouse", WITH_SPECIAL)
    assert ours.encode("<pad>", WITH_SPECIAL) == [321] and 321 not in ours.encode("<pad>")


OPT = {
    "add_bos_token": True,
    "add_prefix_space": False,
    "tokenizer_class": "GPT2Tokenizer",
    **{f"{name}_token": TABLE | {"content": "</s>", "__type": "AddedToken"} for name in ("bos", "eos", "unk")},
    "pad_token": "<pad>",
}


def opt(gpt2, folder, ordered):
    """OPT's files: GPT-2's merges under ids that begin with four marks; as published, by how often a word occurs."""
    words = json.loads((gpt2 / "vocab.json").read_text(encoding="utf-8"))
    del words["<|endoftext|>"]
    names = sorted(words, key=words.__getitem__) if ordered else sorted(words)
    vocab = {name: id_ for id_, name in enumerate(["<s>", "<pad>", "</s>", "<unk>", *names])}
    folder.mkdir()
    (folder / "vocab.json").write_text(json.dumps(vocab), encoding="utf-8")
    (folder / "merges.txt").write_bytes((gpt2 / "merges.txt").read_bytes())
    (folder / "tokenizer_config.json").write_text(json.dumps(OPT))
    return folder


@pytest.mark.parametrize("ordered", [True, False])
def test_opts_two_files(gpt2, tmp_path, ordered):
    """Ids in no order of the merges are beyond tiktoken, so the library runs them."""
    folder = opt(gpt2, tmp_path / "opt", ordered)
    ours, theirs = from_files(folder), AutoTokenizer.from_pretrained(folder)
    assert isinstance(ours, BytePairs if ordered else Library) and ours.size == 50260
    for text in TEXTS[:-1]:
        ids, added = ours.marked(text)
        assert ids == theirs(text)["input_ids"] and added == [True] + [False] * (len(ids) - 1) and ids[0] == 2
        assert joined(ours, ids[1:]) == text.encode()
    assert 2 not in ours.encode("a</s>", PLAIN)
    assert ours.encode("a</s>b", WITH_SPECIAL) == theirs("a</s>b")["input_ids"]
    assert theirs.convert_ids_to_tokens(ours.find(" cat")) == "Ġcat"


def test_a_prefix_space_that_the_settings_ask_for(gpt2, tmp_path):
    folder = gpt2_vocabulary(tmp_path)
    (folder / "tokenizer_config.json").write_text('{"add_prefix_space": true, "tokenizer_class": "GPT2Tokenizer"}')
    theirs = AutoTokenizer.from_pretrained(folder)
    assert from_files(folder).encode("cat sat") == theirs("cat sat")["input_ids"] == [3797, 3332]


def test_a_bos_that_only_the_older_file_names(tmp_path):
    folder = written(tmp_path / "model", no_bos(), {})
    (folder / "special_tokens_map.json").write_text('{"bos_token": "<s>"}')
    assert PreTrainedTokenizerFast.from_pretrained(folder).bos_token == "<s>"  # noqa: S105
    assert framed_ids(from_files(folder), "cat", Rule(bos=True))[1] == ids_of(no_bos(), "<s>")


# tokenizer.model, by sentencepiece.


def pieces(folder, kind="bpe", **options):
    """A trained tokenizer.model in a folder, and sentencepiece's own reader of it."""
    folder.mkdir(exist_ok=True)
    model = io.BytesIO()
    settings = {"byte_fallback": True, "character_coverage": 1.0, "normalization_rule_name": "identity"}
    settings |= {"remove_extra_whitespaces": False, "split_digits": True, "hard_vocab_limit": False}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(SENTENCES[:3]),
        model_writer=model,
        vocab_size=340,
        model_type=kind,
        minloglevel=2,
        **settings | options,
    )
    (folder / "tokenizer.model").write_bytes(model.getvalue())
    return folder, sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_a_sentencepiece_model_is_run_by_its_library(tmp_path, kind):
    folder, theirs = pieces(tmp_path, kind)
    ours = from_files(folder)
    assert isinstance(ours, Sentences) and ours.size == theirs.get_piece_size()
    for text in TEXTS:
        ids, added = framed_ids(ours, text)
        assert ids == [1, *theirs.encode(text)] and added == [1]
        assert joined(ours, ids[1:]).decode() == " " + text.replace("▁", " ")
    assert visible(ours.piece(3 + 0x0A)) == r"\n" and visible(ours.piece(theirs.piece_to_id("▁the"))) == "␣the"
    assert visible(ours.piece(ours.find(" the"))) == visible(ours.piece(ours.find("the"))) == "␣the"
    assert not {1, 2} & set(ours.encode("<s>the cat</s>", PLAIN))
    for id_ in (theirs.get_piece_size(), 2**31, 2**63, -1):
        assert ours.piece(id_) is None


def llama(theirs, **settings):
    """transformers' LlamaTokenizer of the same pieces: merges in the order of the pieces' scores, as it makes them."""
    words = [theirs.id_to_piece(id_) for id_ in range(theirs.get_piece_size())]
    vocab = {word: id_ for id_, word in enumerate(words)}
    scores = {word: theirs.get_score(id_) for word, id_ in vocab.items()}
    return LlamaTokenizer(vocab=vocab, merges=generate_merges(vocab, scores), add_bos_token=True, **settings)


def test_a_sentencepiece_model_is_transformers_llama(tmp_path):
    folder, theirs = pieces(tmp_path)
    ours, llamas = from_files(folder), llama(theirs, legacy=True)
    for text in (TEXTS[0], *TEXTS[2:4]):
        assert ours.encode(text) == llamas(text)["input_ids"]
    assert ours.encode("a</s>b", WITH_SPECIAL) == llamas("a</s>b")["input_ids"]


@pytest.mark.parametrize(
    ("settings", "before", "after"),
    [
        ({}, [1], []),
        ({"add_bos_token": False}, [], []),
        ({"add_eos_token": True}, [1], [2]),
        ({"add_bos_token": False, "add_eos_token": True}, [], [2]),
        ({"add_bos_token": True, "bos_token": TABLE | {"content": "</s>"}}, [2], []),
    ],
)
def test_what_a_sentencepiece_tokenizer_adds(tmp_path, settings, before, after):
    """A BOS unless it is switched off and no EOS unless it is switched on, as Llama's slow tokenizer always did."""
    folder, theirs = pieces(tmp_path)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    text = theirs.encode("the cat")
    ours = from_files(folder)
    assert framed_ids(ours, "the cat") == ([*before, *text, *after], before + after)
    assert framed_ids(ours, "the cat", PLAIN) == (text, [])
    bos = before or [1]
    assert framed_ids(ours, "the cat", Rule(bos=True)) == ([*bos, *text, *after], bos + after)


def test_tokens_added_to_a_sentencepiece_model(tmp_path):
    """They have ids after the pieces' own. One that is not special is a token in any text."""
    folder, theirs = pieces(tmp_path)
    size = theirs.get_piece_size()
    words = {"<|im|>": True, "<tool>": False}
    table = {str(size + i): TABLE | {"content": word, "special": words[word]} for i, word in enumerate(words)}
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": table, "add_bos_token": False}))
    ours = from_files(folder)
    assert ours.size == size + 2 and ours.piece(size) == b"<|im|>" and ours.piece(size + 2) is None
    assert size not in ours.encode("a<|im|>b") and size + 1 in ours.encode("a<tool>b")
    expected = [*theirs.encode("a"), size, *theirs.encode("b"), size + 1, *theirs.encode("\n"), 2]
    assert ours.encode("a<|im|>b<tool>\n</s>", WITH_SPECIAL) == expected


def test_a_sentencepiece_model_without_a_bos(tmp_path):
    folder, theirs = pieces(tmp_path, bos_id=-1)
    ours = from_files(folder)
    assert framed_ids(ours, "the cat") == (theirs.encode("the cat"), [])
    with pytest.raises(GptcliError, match=r"--bos: tokenizer\.model names no BOS"):
        ours.encode("the cat", Rule(bos=True))


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 50,
        b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 499723\n",
        b"IQ== 0\nIg== 1\n",  # the same name holds ranks of bytes in other models
    ],
)
def test_a_broken_sentencepiece_model_is_one_error(tmp_path, content):
    (tmp_path / "tokenizer.model").write_bytes(content)
    with pytest.raises(GptcliError, match=r"tokenizer\.model: not a model of sentencepiece") as caught:
        from_files(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_sentencepiece_model_serves_where_nothing_else_is(tmp_path):
    folder, _ = pieces(tmp_path)
    source = samples()["tiny-gpt2"]
    assert isinstance(from_files(folder), Sentences)
    (folder / "vocab.json").write_bytes((source / "vocab.json").read_bytes())
    assert isinstance(from_files(folder), Sentences)  # half of a pair is none
    (folder / "merges.txt").write_bytes((source / "merges.txt").read_bytes())
    assert isinstance(from_files(folder), BytePairs)
    written(folder, unigram())
    assert isinstance(from_files(folder), Library)


# Chat templates.

LLAMA_2 = (
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}{% if message['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + message['content'].strip() + ' [/INST]' }}{% endif %}{% endfor %}"
)
CHATML = """{%- if tools %}
    {{- tools | tojson }}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{% for message in messages -%}
    {%- set ns.last = loop.index0 %}
    {{- '<|eot|>' ~ message.role ~ '\\n' ~ message.content }}{% generation %}</s>{% endgeneration %}
    {%- if loop.last %}{% break %}{% endif %}
{%- endfor %}
{{ ns.last }}{{ pad_token is defined }}{{ {'é': messages[0]} | tojson(indent=1, sort_keys=True) }}
  {%- if add_generation_prompt %}
<|eot|>assistant{{ strftime_now("%Y") }}
{% endif %}
"""


def with_template(folder, template, where):
    """A template in each of the places where it is found."""
    settings = {"bos_token": "<s>", "eos_token": TABLE | {"content": "</s>", "__type": "AddedToken"}}
    if where == "list":
        settings["chat_template"] = [{"name": "rag", "template": "no"}, {"name": "default", "template": template}]
    elif where == "string":
        settings["chat_template"] = template
    else:
        folder.mkdir(exist_ok=True)
        settings["chat_template"] = "an older one"
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return written(folder, byte_level(), settings)


@pytest.mark.parametrize("where", ["string", "list", "file"])
@pytest.mark.parametrize("template", [LLAMA_2, CHATML], ids=["llama 2", "chatml"])
@pytest.mark.parametrize("message", [" The cat? ", "<|eot|>\n日本 {{ 1 }}"])
def test_a_chat_is_transformers(tmp_path, template, where, message):
    """What the template writes is whole: it has its own BOS, and nothing is added."""
    folder = with_template(tmp_path / "model", template, where)
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    messages = [{"role": "user", "content": message}]
    text = chat_text(folder, message)
    assert text == theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    expected = theirs.apply_chat_template(messages, tokenize=True, add_generation_prompt=True)["input_ids"]
    assert framed_ids(from_files(folder), text, Rule(False, special=True)) == (expected, [])


BAD_TEMPLATES = {
    "for ever": ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "too long"),
    "for ever, writing": ("{% for i in range(99999) %}{% for j in range(99999) %}{{ j }}{% endfor %}{% endfor %}", ""),
    "one long step": ("{{ 7 ** (10 ** 9) }}", "too long"),
    "a long range": ("{% for i in range(10 ** 9) %}{% endfor %}", "Range too big"),
    "a long text": ("{{ 'a' * 10 ** 9 }}", "MiB"),
    "a text that is long enough": ("{{ 'a' * 10 ** 7 }}", "characters"),
    "a wide field": ("{{ '%999999999d' % 1 }}", "MiB"),
    "doubling": ("{% set n = namespace(x='a') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}", "MiB"),
    "a long list": ("{{ [0] * 10 ** 9 }}", "MiB"),
    "itself": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    "attributes": ("{{ ''.__class__ }}", "__class__"),
    "attributes in a format": ("{{ '{0.__class__}'.format(1) }}", "__class__"),
    "the system": ("{{ cycler.__init__.__globals__.os.popen('touch ' ~ 'DONE').read() }}", "__init__"),
    "a file": ("{% include '/etc/passwd' %}", "no loader"),
    "changing a list": ("{{ messages.append(1) }}", "append"),
    "refusing": ("{{ raise_exception('only  a\nsystem') }}", r"\(only a system\)"),
    "syntax": ("{% if %}", "Expected an expression"),
    "deep": ("{% for a in [1] %}" * 25 + "{% endfor %}" * 25, "nested"),
    "deeper": ("{{" + "(" * 9000 + ")" * 9000 + "}}", ""),
    "arithmetic": ("{{ 1 // 0 }}", "zero"),
    "undefined": ("{{ messages[7].content }}", "no element 7"),
}


@pytest.mark.parametrize("name", BAD_TEMPLATES)
def test_a_bad_template_is_one_error_and_soon(tmp_path, monkeypatch, name):
    template, said = BAD_TEMPLATES[name]
    monkeypatch.chdir(tmp_path)
    folder = with_template(tmp_path / "model", template, "string")
    begun = time.monotonic()
    with pytest.raises(GptcliError, match=f"--chat: .*tokenizer_config.json: the template fails .*{said}") as caught:
        chat_text(folder, "hello")
    assert time.monotonic() - begun < 5  # it has one second of the processor, which others may share
    assert "\n" not in str(caught.value) and len(caught.value.message) < 300 + len(str(tmp_path))
    assert not (tmp_path / "DONE").exists()


def test_a_bad_template_takes_little_memory(tmp_path):
    """The most that a child of a process that only renders it has held, in KiB on Linux."""
    if sys.platform != "linux":
        pytest.skip("the limit, and the unit of what is measured, are Linux's")
    folder = with_template(tmp_path / "model", BAD_TEMPLATES["doubling"][0], "string")
    code = (
        "import resource, sys\n"
        "from pathlib import Path\n"
        "from gptcli.tokens.chat import chat_text\n"
        "try:\n"
        "    chat_text(Path(sys.argv[1]), 'hello')\n"
        "except Exception:\n"
        "    print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)\n"
    )
    ran = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, text=True, check=True)
    assert 0 < int(ran.stdout) < 300 * 1024


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "has no chat template"),
        ({"chat_template": None}, "has no chat template"),
        ({"chat_template": [{"name": "rag", "template": "x"}]}, r"no template is named default \(there is rag\)"),
        ({"chat_template": [1]}, "no template is named default"),
    ],
)
def test_no_chat_template(tmp_path, settings, said):
    with pytest.raises(GptcliError, match=said):
        chat_text(written(tmp_path / "model", byte_level(), settings), "hello")


def test_chat_with_a_sentencepiece_model(tmp_path):
    """Its control symbols in the template are those tokens, though in a text they are not."""
    folder, theirs = pieces(tmp_path)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": LLAMA_2, "bos_token": "<s>"}))
    text = chat_text(folder, "the cat </s>")
    assert text == "<s>[INST] the cat </s> [/INST]"
    ids = from_files(folder).encode(text, Rule(False, special=True))
    assert ids == [1, *theirs.encode("[INST] the cat "), 2, *theirs.encode(" [/INST]")]


# Through the command line.


def model_with(folder, tokenizer, settings, rows):
    """A checkpoint of a toy Llama with so many rows in its table, and a tokenizer."""
    config = {
        "model_type": "llama", "vocab_size": rows, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }  # fmt: skip
    save_toy(config, folder)
    return written(folder, tokenizer, settings)


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    tokenizer = byte_level()
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": LLAMA_2}
    folder = tmp_path_factory.mktemp("toy") / "model"
    return model_with(folder, tokenizer, settings, tokenizer.get_vocab_size()), tokenizer


def fed_by(*words):
    """What `tokens --json` says was fed: [(id, added)] a text."""
    ran = gptcli("tokens", "--json", *words)
    assert ran.status == 0, ran.err
    return [[(token["id"], token["added"]) for token in text] for text in ran.json["tokens"]]


def test_what_the_rule_added_is_marked(toy):
    folder, tokenizer = toy
    (bos,), text = ids_of(tokenizer, "<s>"), tokenizer.encode("the cat", add_special_tokens=False).ids
    plain = [(id_, False) for id_ in text]
    assert fed_by("-m", folder, "the", "cat") == [[(bos, True), *plain]]
    assert fed_by("-m", folder, "--no-bos", "the cat") == [plain]
    assert fed_by("-m", folder, "--bos", "the cat") == [[(bos, True), *plain]]
    two = [[(bos, True), *plain], [(bos, True), *((id_, False) for id_ in tokenizer.encode(" dog").ids[1:])]]
    assert fed_by("-m", folder, "--batch", "the cat", " dog") == two
    for command in ("forward", "topk"):
        said = gptcli(command, "-m", folder, "--json", "the cat").json
        assert [(token["id"], token["added"]) for token in said["tokens"][0]] == [(bos, True), *plain]
    assert "<s> (added)" in gptcli("tokens", "-m", folder, "the cat").out
    assert f"0 <s> {bos} added   1 " in gptcli("forward", "-m", folder, "the cat").out


def test_special_words_and_chat_on_the_command_line(toy):
    folder, tokenizer = toy
    bos, eot = ids_of(tokenizer, "<s>", "<|eot|>")
    (text,) = fed_by("-m", folder, "a<|eot|>")
    assert text[0] == (bos, True) and eot not in dict(text)
    (text,) = fed_by("-m", folder, "--special", "a<|eot|>")
    assert text[-1] == (eot, False)
    theirs = PreTrainedTokenizerFast.from_pretrained(folder)
    expected = [
        theirs.apply_chat_template([{"role": "user", "content": message}], add_generation_prompt=True)["input_ids"]
        for message in ("hi there", "ho")
    ]
    assert expected[0].count(bos) == 1
    plain = [[(id_, False) for id_ in ids] for ids in expected]
    assert fed_by("-m", folder, "--chat", "hi", "there") == plain[:1]
    assert fed_by("-m", folder, "--chat", "--batch", "hi there", "ho") == plain
    assert fed_by("-m", folder, "--chat", "--bos", "hi there") == plain[:1]  # the template's BOS is one


@pytest.mark.parametrize("flags", [["--chat"], ["--special"], ["--bos"], ["--no-bos"]])
def test_ids_are_fed_as_they_are(toy, flags):
    ran = gptcli("tokens", "-m", toy[0], "--ids", "1,2", "--json", *flags)
    assert ran.status == 2 and "and --ids" in ran.json["error"]["message"]


def test_a_bos_that_is_not_there_is_an_error_on_the_command_line(tmp_path):
    tokenizer = no_bos()
    folder = model_with(tmp_path / "model", tokenizer, {}, tokenizer.get_vocab_size())
    ran = gptcli("forward", "-m", folder, "--bos", "the cat")
    assert ran.status == 2 and ran.err.count("\n") == 1 and "--bos: tokenizer.json names no BOS" in ran.err
    ran = gptcli("forward", "-m", folder, "--chat", "the cat")
    assert ran.status == 2 and "has no chat template" in ran.err


def test_a_bos_lets_the_first_word_be_scored(toy):
    """The token at t is scored by the logits at t-1, so only what something precedes has a score."""
    folder, tokenizer = toy
    ids = tokenizer.encode("the cat", add_special_tokens=False).ids
    with_bos = gptcli("score", "-m", folder, "--json", "the cat").json
    without = gptcli("score", "-m", folder, "--json", "--no-bos", "the cat").json
    rows = [
        [(row["id"], row["logprob"] is not None) for row in said["texts"][0]["tokens"]] for said in (with_bos, without)
    ]
    assert rows[0] == [(tokenizer.token_to_id("<s>"), False), *((id_, True) for id_ in ids)]
    assert rows[1] == [(ids[0], False), *((id_, True) for id_ in ids[1:])]


@pytest.mark.parametrize("more", [0, 7, -1])
def test_a_table_of_another_size_is_said(tmp_path, more):
    """More rows than tokens is padding, whose ids have no label; fewer means that some ids can't be fed."""
    tokenizer = byte_level()
    size = tokenizer.get_vocab_size()
    folder = model_with(tmp_path / "model", tokenizer, SETTINGS["bos named"], size + more)
    ran = gptcli("topk", "-m", folder, "-k", 1000, "--json", "the cat")
    assert ran.status == 0
    top = ran.json["next"][0]["top"]
    assert len(top) == size + more
    assert sorted(row["id"] for row in top if row["bytes"] is None) == [*range(size, size + more)]
    assert all(row["token"] == "" for row in top if row["bytes"] is None)
    note = {0: "", 7: f"knows {size} ids and the table has {size + 7} rows: the rows beyond are padding"}
    note[-1] = f"knows {size} ids and the table has {size - 1} rows: ids beyond it have no row"
    assert note[more] in ran.err
    assert ("rows" in ran.err) is bool(more)
    assert gptcli("topk", "-m", folder, "-k", 1000, "--full", "the cat").status == 0
    assert gptcli("tokens", "-m", folder, "--ids", size + 3).status == 0
    ran = gptcli("forward", "-m", folder, "--special", "the<|eot|>")  # the last id of the tokenizer
    assert ran.status == (2 if more < 0 else 0)


def test_a_sentencepiece_model_through_the_command_line(tmp_path):
    tokenizer = byte_level()
    folder = model_with(tmp_path / "model", tokenizer, None, 400)
    (folder / "tokenizer.json").unlink()
    _, theirs = pieces(folder)
    assert fed_by("-m", folder, "the cat") == [[(1, True), *((id_, False) for id_ in theirs.encode("the cat"))]]
    ran = gptcli("forward", "-m", folder, "the\ncat")
    assert ran.status == 0 and "▁" not in ran.out and "<0x" not in ran.out


def test_a_model_reads_its_tokenizer_once(toy):
    model = open_model(str(toy[0]))
    assert model.tokenizer is model.tokenizer is model.labels


WORDS = "[PAD] [UNK] [CLS] [SEP] [MASK] the cat sat on mat ##s ##ting , . ' caf ##e naive ##ï 日 本 Cat".split()


@pytest.mark.parametrize(
    "settings",
    [{}, {"do_lower_case": False}, {"strip_accents": False}, {"mask_token": "the"}, {"tokenize_chinese_chars": False}],
    ids=str,
)
@pytest.mark.parametrize("text", ["The cats sat on, 'mats'.", "cafe café naïve Cat", "日本 the [MASK] sat", "x" * 101])
def test_a_lone_vocab_txt_is_cut_into_pieces_as_transformers_does(settings, text, tmp_path):
    (tmp_path / "vocab.txt").write_text("\n".join(WORDS) + "\n", encoding="utf-8")
    about = {"tokenizer_class": "BertTokenizer"} | settings
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(about), encoding="utf-8")
    theirs = BertTokenizer(vocab={word: id_ for id_, word in enumerate(WORDS)}, **settings)
    ours = from_files(tmp_path)
    assert ours.encode(text, WITH_SPECIAL) == theirs(text)["input_ids"]
    assert ours.encode(text, Rule(bos=False, special=True)) == theirs(text, add_special_tokens=False)["input_ids"]
    assert ours.mask == theirs.mask_token_id and ours.size == len(WORDS)
    assert [ours.piece(WORDS.index(word)) for word in ("cat", "##s", "[CLS]")] == [b" cat", b"s", b"[CLS]"]


def test_a_vocab_txt_without_its_special_words_is_refused(tmp_path):
    (tmp_path / "vocab.txt").write_text("the\ncat\n", encoding="utf-8")
    with pytest.raises(GptcliError, match=r"no word \[UNK\], which every text needs"):
        from_files(tmp_path)


@pytest.mark.parametrize("word", ["[MASK]", "<mask>", "[BLANK]"])
def test_a_mask_is_known_by_its_word_where_nothing_stands_beside_tokenizer_json(word, tmp_path):
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "the": 1, word: 2}, unk_token="[UNK]"))  # noqa: S106 - a word
    tokenizer.add_special_tokens([word])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert from_files(tmp_path).mask == (None if word == "[BLANK]" else 2)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"mask_token": word}), encoding="utf-8")
    assert from_files(tmp_path).mask == 2
