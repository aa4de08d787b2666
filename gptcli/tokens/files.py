"""The tokenizer in a checkpoint's directory, run by tiktoken, by the tokenizers library or by sentencepiece."""

import json
import re
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from gptcli.errors import GptcliError
from gptcli.tokens import OWN_RULE, Encoded, Ends, Rule, Tokenizer, framed
from gptcli.tokens.wordpiece import SPECIAL, word_pieces

# GPT-2's split of a text before any merge: contractions, words, numbers, other signs, white space.
GPT2_SPLIT = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
SPACE = "\u2581"  # sentencepiece's sign for one
END_OF_TEXT = "<|endoftext|>"
NO_ENDS = Ends([], [])
MASKS = ("[MASK]", "<mask>")


class BytePairs(Tokenizer):
    """A byte-level byte-pair encoding of GPT-2's kind, run by tiktoken.

    ends: what its own rule adds; bos: the id that it begins with if asked; unreached: the bytes of words that have an
    id but that no merge makes.
    """

    def __init__(
        self,
        encoding: Any,
        name: str,
        ends: Ends = NO_ENDS,
        bos: int | None = None,
        unreached: dict[int, bytes] | None = None,
    ):
        self.encoding, self.name, self.ends, self.bos = encoding, name, ends, bos
        self.unreached = unreached or {}
        self.size = max(encoding.n_vocab, max(self.unreached, default=-1) + 1)

    def marked(self, text: str, rule: Rule = OWN_RULE) -> Encoded:
        check_text(text)
        ids = self.encoding.encode(text, allowed_special="all") if rule.special else self.encoding.encode_ordinary(text)
        return framed(ids, self.ends, rule, self.bos, self.name)

    def piece(self, id_: int) -> bytes | None:
        if id_ in self.unreached:
            return self.unreached[id_]
        try:
            return self.encoding.decode_single_token_bytes(id_)
        except (KeyError, OverflowError):  # tiktoken's ids are 32 bits
            return None


class Library(Tokenizer):
    """Any tokenizer.json, run by the tokenizers library."""

    def __init__(self, path: Path, table: dict[str, Any], settings: dict[str, Any], loose: bool = False):
        """loose: the table was put together from other files; path is then the first of them."""
        from tokenizers import Tokenizer as Run

        model = table.get("model")
        if isinstance(model, dict) and model.get("dropout"):
            raise GptcliError(f"{path}: its dropout makes other ids at each run", "set it to null", "tokenizer")
        try:
            self.run = Run.from_str(json.dumps(table)) if loose else Run.from_file(str(path))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # the library raises bare Exceptions, and panics that are none
            raise GptcliError(f"{path}: {first_line(error)}", "mend the file", "tokenizer") from None
        # A file may ask for texts cut or filled up to a length, which is for training.
        self.run.no_truncation()
        self.run.no_padding()
        self.name, self.table = path.name, table
        self.content = {id_: token.content for id_, token in self.run.get_added_tokens_decoder().items()}
        self.size = max(self.run.get_vocab().values(), default=-1) + 1
        self.bos, self.mask = self._id(settings.get("bos_token")), self._id(settings.get("mask_token"))
        if self.mask is None:  # no word of it beside the file: it goes by the special word that says so
            self.mask = next((id_ for id_, word in self.content.items() if word in MASKS), None)
        # None: the file's own post-processor has the word, whatever tokenizer_config.json says.
        self.ends = loose_ends(settings, self._id) if loose and "post_processor" not in table else None
        unknown = model.get("unk_token") if isinstance(model, dict) else None
        self.unknown = model.get("unk_id") if unknown is None and isinstance(model, dict) else self._id(unknown)

    def _id(self, token: Any) -> int | None:
        word = word_of(token)
        return None if word is None else self.run.token_to_id(word)

    def marked(self, text: str, rule: Rule = OWN_RULE) -> Encoded:
        check_text(text)
        self.run.encode_special_tokens = not rule.special
        try:
            encoded = self.run.encode(text, add_special_tokens=self.ends is None and rule.bos is not False)
        except Exception as error:  # a word that is not in the vocabulary, where no id stands for such
            raise GptcliError(f"{self.name}: {first_line(error)}", "give --ids", "tokenizer") from None
        # The library marks what its post-processor added, not the special words of the text.
        ids = [id_ for id_, added in zip(encoded.ids, encoded.special_tokens_mask) if not added]
        start = [*encoded.special_tokens_mask, 0].index(0)
        ends = self.ends or Ends(encoded.ids[:start], encoded.ids[start + len(ids) :])
        bos = self.bos if self.bos is not None else next(iter(ends.before), None)
        return framed(ids, ends, rule, bos, self.name)

    @cached_property
    def letters(self) -> dict[str, int] | None:
        """The letters of bytes, for a vocabulary of GPT-2's alphabet; None for one of sentencepiece's."""
        return byte_letters() if "ByteLevel" in json.dumps(self.table.get("decoder")) else None

    @cached_property
    def inner(self) -> str | None:
        """What begins a piece that stands inside a word, for a vocabulary that marks those instead of spaces."""
        decoder = self.table.get("decoder") or {}
        return decoder.get("prefix") if decoder.get("type") == "WordPiece" else None

    def piece(self, id_: int) -> bytes | None:
        if id_ in self.content:  # an added token stands for itself
            return self.content[id_].encode()
        try:
            word = self.run.id_to_token(id_)
        except OverflowError:
            return None
        if word is None:
            return None
        if self.letters is not None:
            return spelt(word, self.letters)
        if self.inner:
            return (word.removeprefix(self.inner) if word.startswith(self.inner) else f" {word}").encode()
        return sentence_piece(word)


def sentence_processor(path: Path, proto: bytes | None = None) -> Any:
    """sentencepiece's reader of a file. proto: the model itself, where the file holds it in another form.

    Raises GptcliError.
    """
    try:
        from sentencepiece import SentencePieceProcessor
    except ImportError:
        raise GptcliError(
            f"{path}: sentencepiece is not installed", "pip install sentencepiece, or give --ids", "tokenizer"
        ) from None
    try:
        given = {"model_file": str(path)} if proto is None else {"model_proto": proto}
        return SentencePieceProcessor(**given)
    except Exception as error:
        raise GptcliError(
            f"{path}: not a model of sentencepiece ({first_line(error)})", "mend the file", "tokenizer"
        ) from None


class Sentences(Tokenizer):
    """A tokenizer.model, run by sentencepiece, and the tokens that tokenizer_config.json adds to it.

    sentinels: how many words `<extra_id_0>`, `<extra_id_1>`, … have an id after the pieces, counted from the end.
    """

    def __init__(self, path: Path, settings: dict[str, Any], sentinels: int = 0, proto: bytes | None = None):
        self.run = sentence_processor(path, proto)
        self.name, known = path.name, self.run.get_piece_size()
        self.unknown = self.run.unk_id()
        last = known + sentinels - 1
        entries = {last - i: {"content": f"<extra_id_{i}>", "special": True} for i in range(sentinels)}
        table = settings.get("added_tokens_decoder")
        entries |= {int(id_): entry for id_, entry in table.items()} if _is_added(table) else {}
        self.content = {id_: entry["content"] for id_, entry in entries.items() if id_ >= known}
        self.size = max(known, max(self.content, default=-1) + 1)
        # Words of a text that are tokens by themselves: always, and where special words are asked for.
        self.always = {entry["content"]: id_ for id_, entry in entries.items() if not entry.get("special")}
        control = {self.run.id_to_piece(id_): id_ for id_ in range(known) if self.run.is_control(id_)}
        self.special = control | {entry["content"]: id_ for id_, entry in entries.items()}
        self.bos = self._id(settings.get("bos_token"), self.run.bos_id())
        eos = self._id(settings.get("eos_token"), self.run.eos_id())
        self.ends = stated_ends({"add_bos_token": True} | settings, self.bos, eos)

    def _id(self, token: Any, own: int) -> int | None:
        """A token that the settings name, else the file's own (-1 where it has none)."""
        named = self.special.get(word_of(token))
        return named if named is not None else own if own >= 0 else None

    def marked(self, text: str, rule: Rule = OWN_RULE) -> Encoded:
        check_text(text)
        words, ids = self.special if rule.special else self.always, []
        for part in split_at(text, words):
            ids += [words[part]] if part in words else self.run.encode(part)
        return framed(ids, self.ends, rule, self.bos, self.name)

    def piece(self, id_: int) -> bytes | None:
        if id_ in self.content:
            return self.content[id_].encode()
        return sentence_piece(self.run.id_to_piece(id_)) if 0 <= id_ < self.run.get_piece_size() else None


class NumberedSentences(Tokenizer):
    """Pieces of a sentencepiece model whose ids a vocabulary beside it gives, and an end after each text.

    A text may begin with a word for the language that is wanted, `>>fra<<`. other: what encodes the target's text.
    """

    def __init__(self, path: Path, vocab: Path, settings: dict[str, Any], other: Tokenizer | None = None):
        self.run, self.other = sentence_processor(path), other
        self.name, self.ids = path.name, read_json(vocab)
        if not self.ids or not all(type(id_) is int and 0 <= id_ < 2**31 for id_ in self.ids.values()):
            raise GptcliError(f"{vocab}: not a table of words and their ids", "mend the file", "tokenizer")
        self.words = {id_: word for word, id_ in self.ids.items()}
        self.size = max(self.words) + 1
        usual = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
        named = {key: word_of((usual | settings).get(key)) for key in usual}
        self.special = {word: self.ids[word] for word in named.values() if word in self.ids}
        for key in ("eos_token", "unk_token"):
            if named[key] not in self.ids:
                raise GptcliError(f"{vocab}: {named[key]!r} is not in it ({key})", "mend the file", "tokenizer")
        self.unknown, self.ends = self.ids[named["unk_token"]], Ends([], [self.ids[named["eos_token"]]])

    @property
    def target(self) -> Tokenizer:
        return self.other or self

    def marked(self, text: str, rule: Rule = OWN_RULE) -> Encoded:
        check_text(text)
        words, ids = self.special if rule.special else {}, []
        for part in split_at(text, words):
            ids += [words[part]] if part in words else self._numbered(part)
        return framed(ids, self.ends, rule, None, self.name)

    def _numbered(self, text: str) -> list[int]:
        language = re.match(">>.*?<<", text, re.DOTALL)
        pieces = self.run.encode(text[language.end() :] if language else text, out_type=str)
        return [self.ids.get(piece, self.unknown) for piece in [*([language[0]] if language else ()), *pieces]]

    def piece(self, id_: int) -> bytes | None:
        return sentence_piece(self.words[id_]) if id_ in self.words else None


def _is_added(table: Any) -> bool:
    """Is it a table of added tokens by their ids, as tokenizer_config.json writes one?"""
    return isinstance(table, dict) and all(
        id_.isdecimal() and isinstance(entry, dict) and isinstance(entry.get("content"), str)
        for id_, entry in table.items()
    )


def split_at(text: str, words: Iterable[str]) -> list[str]:
    """The text in parts, each of these words a part of its own; of two that begin alike, the longer."""
    alternatives = "|".join(re.escape(word) for word in sorted(words, key=len, reverse=True) if word)
    return [part for part in re.split(f"({alternatives})", text) if part] if alternatives else [text]


def check_text(text: str) -> None:
    """Raises GptcliError for what is no text: bytes of the command line that are not UTF-8 come as lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise GptcliError(f"the text is not UTF-8 (character {error.start})", "give UTF-8 text", "text") from None


def stated_ends(settings: dict[str, Any], bos: int | None, eos: int | None) -> Ends:
    """What tokenizer_config.json says to add to a text, of the tokens that it names."""
    ends = (("add_bos_token", bos), ("add_eos_token", eos))
    return Ends(*([id_] if settings.get(key) and id_ is not None else [] for key, id_ in ends))


def loose_ends(settings: dict[str, Any], id_of: Callable[[Any], int | None]) -> Ends:
    """What byte pairs in two files add: what the settings say, or, where they are silent and name a token that a class
    is told by and one that parts two texts, those two around each text, as the encoders that know such tokens read it.
    """
    bos, eos, cls, sep = (id_of(settings.get(f"{end}_token")) for end in ("bos", "eos", "cls", "sep"))
    silent = not settings.keys() & {"add_bos_token", "add_eos_token"}
    framing = silent and cls is not None and sep is not None
    return Ends([cls], [sep]) if framing else stated_ends(settings, bos, eos)


def sentence_piece(word: str) -> bytes:
    """The bytes of sentencepiece's pieces: `▁the` is " the", `<0x0A>` one byte."""
    if byte := re.fullmatch("<0x([0-9A-Fa-f]{2})>", word):
        return bytes.fromhex(byte[1])
    return word.replace(SPACE, " ").encode()


def spelt(word: str, letters: dict[str, int]) -> bytes:
    """The bytes of a word whose letters stand for bytes; a word with any other letter stands for itself."""
    return bytes(letters[letter] for letter in word) if letters.keys() >= set(word) else word.encode()


def word_of(token: Any) -> str | None:
    """A special token's text, which files write as text or as a table."""
    word = token.get("content") if isinstance(token, dict) else token
    return word if isinstance(word, str) else None


def first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def from_files(directory: Path) -> Tokenizer | None:
    """The tokenizer in a checkpoint's directory; None where it holds none. Raises GptcliError for broken files.

    tokenizer.json, or vocab.json and merges.txt, by tiktoken when they are GPT-2's kind exactly; any other
    tokenizer.json by the tokenizers library, and so vocab.txt; tokenizer.model or spiece.model where there is nothing
    else. What is added to a text is tokenizer.json's to say, where there is one, as transformers reads it, else
    tokenizer_config.json's.
    source.spm, target.spm and vocab.json go together: the tokenizer of the source, and in it the target's.
    """
    whole, vocab, merges, words = (
        directory / name for name in ("tokenizer.json", "vocab.json", "merges.txt", "vocab.txt")
    )
    pieces, older, source, target = (
        directory / name for name in ("tokenizer.model", "spiece.model", "source.spm", "target.spm")
    )
    settings = read_settings(directory)
    if source.is_file() and target.is_file() and vocab.is_file():
        target_vocab = directory / "target_vocab.json" if settings.get("separate_vocabs") else vocab
        return NumberedSentences(source, vocab, settings, NumberedSentences(target, target_vocab, settings))
    if whole.is_file():
        table = read_json(whole)
        if is_gpt2_like(table):
            with suppress(GptcliError):  # what tiktoken can't run, the library can
                return _byte_pairs(table, str(whole), settings | {"add_bos_token": False, "add_eos_token": False})
        return Library(whole, table, settings)
    if vocab.is_file() and merges.is_file():
        table = _joined(vocab, merges, settings)
        if is_gpt2_like(table):
            try:
                return _byte_pairs(table, str(vocab), settings)
            except _OtherOrder:
                if not settings:  # nothing says what these files are
                    raise
        return Library(vocab, table, settings, loose=True)
    if words.is_file():
        return Library(words, word_pieces(words, read(words), settings), SPECIAL | settings, loose=True)
    if pieces.is_file():
        return Sentences(pieces, settings)
    if older.is_file():
        return Sentences(older, {"add_bos_token": False, "add_eos_token": True} | settings, _sentinels(settings))
    return None


def _sentinels(settings: dict[str, Any]) -> int:
    """How many words stand for gaps in a text, where tokenizer_config.json doesn't give each its id."""
    number = settings.get("extra_ids", 100)
    return number if type(number) is int and 0 <= number < 2**20 else 0


def read_settings(directory: Path) -> dict[str, Any]:
    """tokenizer_config.json, and the special tokens that older files name beside it."""
    beside, about = directory / "special_tokens_map.json", directory / "tokenizer_config.json"
    return (read_json(beside) if beside.is_file() else {}) | (read_json(about) if about.is_file() else {})


def _joined(vocab: Path, merges: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """The two files as the tokenizer.json that says the same. Special are the words that the settings name, and those
    in angle brackets that no merge makes.
    """
    words = read_json(vocab)
    lines = [line.split(" ") for line in read(merges).split("\n") if line and not line.startswith("#version")]
    named = {word_of(token) for key, token in settings.items() if key.endswith("_token")}
    made = {"".join(pair) for pair in lines}
    marks = {word for word in words if re.fullmatch("<.+>", word) and word not in made}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    stripping = _stripping(settings)
    bytes_ = {"type": "ByteLevel", "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "added_tokens": [
            {"id": id_, "content": word} | flags | stripping.get(word, {})
            for word, id_ in words.items()
            if word in named | marks
        ],
        "pre_tokenizer": bytes_ | {"add_prefix_space": bool(settings.get("add_prefix_space"))},
        "decoder": bytes_ | {"add_prefix_space": True},
        "model": {"type": "BPE", "vocab": words, "merges": lines},
    }


def _stripping(settings: dict[str, Any]) -> dict[str | None, dict[str, bool]]:
    """Special words that the settings name by tables, and which spaces beside it such a word takes to itself."""
    tables = [token for key, token in settings.items() if key.endswith("_token") and isinstance(token, dict)]
    return {word_of(table): {side: bool(table.get(side)) for side in ("lstrip", "rstrip")} for table in tables}


def is_gpt2_like(table: dict[str, Any]) -> bool:
    """Bytes, split as GPT-2 does, nothing normalised, nothing added: what tiktoken with GPT2_SPLIT does exactly."""
    split, model, after = (table.get(name) or {} for name in ("pre_tokenizer", "model", "post_processor"))
    added = table.get("added_tokens") or []
    if not all(isinstance(part, dict) for part in (split, model, after, *added)):
        return False
    simple = split.get("type") == "ByteLevel" and not split.get("add_prefix_space") and split.get("use_regex", True)
    other = ("ignore_merges", "dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
    return (
        simple
        and _adds_nothing(after)
        and table.get("normalizer") is None
        and model.get("type") == "BPE"
        and isinstance(model.get("vocab"), dict)
        and isinstance(model.get("merges"), list)
        and not any(model.get(key) for key in other)
        and all(entry.get("special") and isinstance(entry.get("content"), str) for entry in added)
        and not any(entry.get(key) for entry in added for key in ("lstrip", "rstrip", "single_word"))
    )


def _adds_nothing(after: dict[str, Any]) -> bool:
    """Bytes have nothing to add, and neither has a template of the text alone."""
    single = after.get("single")
    alone = isinstance(single, list) and len(single) == 1 and isinstance(single[0], dict) and "Sequence" in single[0]
    return after.get("type") in (None, "ByteLevel") or (after.get("type") == "TemplateProcessing" and alone)


def read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8"
        raise GptcliError(f"{path}: {reason}", "mend the file", "file") from None


def read_json(path: Path) -> dict[str, Any]:
    try:
        table = json.loads(read(path))
    except (ValueError, RecursionError) as error:
        raise GptcliError(f"{path}: not JSON ({first_line(error)})", "mend the file", "file") from None
    if not isinstance(table, dict):
        raise GptcliError(f"{path}: holds no table", "mend the file", "file")
    return table


class _OtherOrder(GptcliError):
    """A sound byte-level vocabulary whose ids or special words are in no order that tiktoken follows."""


def _byte_pairs(table: dict[str, Any], where: str, settings: dict[str, Any]) -> BytePairs:
    """tiktoken merges the pair whose result has the lowest id first, so ids must follow the order of the merges.

    table: one that is_gpt2_like. Raises GptcliError for a vocabulary of another kind.
    """
    import tiktoken

    def refuse(reason: str, kind: type[GptcliError] = GptcliError) -> GptcliError:
        return kind(f"{where}: {reason}", "give --ids", "tokenizer")

    vocab: dict[str, int] = table["model"]["vocab"]
    pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in table["model"]["merges"]]
    added = {entry["content"]: entry.get("id") for entry in table.get("added_tokens") or ()}
    letters, ids = byte_letters(), [*vocab.values(), *added.values()]
    if not all(type(id_) is int and 0 <= id_ < 2**31 for id_ in ids) or len(set(vocab.values())) < len(vocab):
        raise refuse("its ids are not whole numbers from 0, each given once")
    # The library numbers added words on from the vocabulary, whatever their ids in the file, and of two that begin
    # alike finds the longer; tiktoken does neither.
    new = [id_ for word, id_ in added.items() if vocab.get(word) != id_]
    if new != [*range(len(vocab), len(vocab) + len(new))] or any(
        longer.startswith(word) for word, longer in pairwise(sorted(added))
    ):
        raise refuse("its special words are out of order", _OtherOrder)
    try:
        made = {first + second: vocab[first + second] for first, second in pairs}
        ranks = {bytes([byte]): vocab[letter] for letter, byte in letters.items()}
        ranks |= {bytes(letters[letter] for letter in word): id_ for word, id_ in made.items()}
        # What no merge makes is known, but no text becomes it.
        known = made | letters | added
        unreached = {id_: spelt(word, letters) for word, id_ in vocab.items() if word not in known}
        if not all(first < second for first, second in pairwise(made.values())):
            raise refuse("its ids don't follow its merges as GPT-2's do", _OtherOrder)
        encoding = tiktoken.Encoding(where, pat_str=GPT2_SPLIT, mergeable_ranks=ranks, special_tokens=added)
    except (KeyError, TypeError, ValueError) as error:
        raise refuse(f"not a byte-level vocabulary ({error})") from None
    # The first of these vocabularies came without a word of its BOS, which is the one special token that it has.
    settings = dict.fromkeys(("bos_token", "eos_token"), END_OF_TEXT) | settings
    ends = loose_ends(settings, lambda token: (vocab | added).get(word_of(token)))
    bos = (vocab | added).get(word_of(settings["bos_token"]))
    return BytePairs(encoding, f"byte pairs of {Path(where).name}", ends, bos, unreached)


def byte_letters() -> dict[str, int]:
    """The printable letter that stands for each byte in GPT-2's vocabulary files: itself, or one from U+0100 on."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(0x100 + i): byte for i, byte in enumerate(hidden)}


def from_name(name: str, offline: bool) -> Tokenizer:
    """An encoding that tiktoken knows by name, from its cache or (unless offline) fetched once into it."""
    import tiktoken
    import tiktoken.load

    def no_network(path: str) -> bytes:
        raise OSError("--offline was given")

    if name not in tiktoken.list_encoding_names():
        known = ", ".join(tiktoken.list_encoding_names())
        raise GptcliError(f"tokenizer: tiktoken has no encoding {name!r}", f"it has {known}", "tokenizer")
    fetch = tiktoken.load.read_file
    if offline:
        tiktoken.load.read_file = no_network
    try:
        encoding = tiktoken.get_encoding(name)
        return BytePairs(encoding, f"tiktoken's {name}", bos=encoding._special_tokens.get(END_OF_TEXT))
    except Exception as error:
        reason = "--offline was given" if offline else f"it could not be fetched ({type(error).__name__})"
        cache = Path(tempfile.gettempdir()) / "data-gym-cache"
        raise GptcliError(
            f"tiktoken's encoding {name!r} is not in its cache, and {reason}",
            "give --ids, or -m DIR with vocab.json and merges.txt, or fill the cache on a machine with a network and "
            f"set TIKTOKEN_CACHE_DIR (by default {cache})",
            "tokenizer",
        ) from None
    finally:
        tiktoken.load.read_file = fetch
