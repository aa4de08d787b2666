"""Text to ids and back. A tokenizer encodes a text, gives the bytes of an id, and finds the id that a word means."""

import json
import tempfile
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

from gptcli.errors import GptcliError, nearest

# GPT-2's split of a text before any merge: contractions, words, numbers, other signs, white space.
GPT2_SPLIT = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""


class Tokenizer(Protocol):
    """name: what encodes, for a person; size: how many ids it knows; between: what joins two pieces in a text."""

    name: str
    size: int
    between: bytes

    def encode(self, text: str) -> list[int]:
        """The ids of a text; special tokens in it are plain text. Raises GptcliError."""
        ...

    def piece(self, id_: int) -> bytes | None:
        """The bytes that an id stands for; None for an id that it doesn't know."""
        ...

    def find(self, word: str) -> int:
        """The one id that a word means, with or without a space before it. Raises GptcliError."""
        ...


class Words:
    """A toy vocabulary: a text is words parted by spaces, and an id may have no word."""

    between = b" "

    def __init__(self, words: dict[int, str], model: str, named: bool):
        self.words, self.ids = words, {word: id_ for id_, word in words.items()}
        self.name, self.size = f"the {len(words)} words of {model}", len(words)
        self.other = (
            "" if named else f"; the worked example {model} ran because no model was named: -m MODEL runs another"
        )

    def encode(self, text: str) -> list[int]:
        return [self.find(word) for word in text.split()]

    def piece(self, id_: int) -> bytes | None:
        return self.words[id_].encode() if id_ in self.words else None

    def find(self, word: str) -> int:
        if word not in self.ids:
            meant = nearest(word, self.ids)
            known = f"the vocabulary has {', '.join(self.ids)}"
            raise GptcliError(f"unknown word {word!r}", f"{meant} {known}{self.other}".strip(), "word")
        return self.ids[word]


class BytePairs:
    """A byte-level byte-pair encoding of GPT-2's kind, run by tiktoken."""

    between = b""

    def __init__(self, encoding, name: str):
        self.encoding, self.name, self.size = encoding, name, encoding.n_vocab

    def encode(self, text: str) -> list[int]:
        return self.encoding.encode_ordinary(text)

    def piece(self, id_: int) -> bytes | None:
        try:
            return self.encoding.decode_single_token_bytes(id_)
        except (KeyError, OverflowError):  # tiktoken's ids are 32 bits
            return None

    def find(self, word: str) -> int:
        for text in (word, f" {word}") if word else ():
            ids = self.encode(text)
            if len(ids) == 1:
                return ids[0]
        pieces = " + ".join(visible(self.piece(id_) or b"") for id_ in self.encode(word))
        raise GptcliError(f"{word!r} is not one token but {pieces or 'none'}", "name one of them", "word")


def from_files(directory: Path) -> Tokenizer | None:
    """The byte-pair encoding in a checkpoint's directory, from `vocab.json` and `merges.txt` or from `tokenizer.json`.

    None where the directory holds neither. Raises GptcliError for files that hold something else.
    """
    vocab, merges, both = (directory / name for name in ("vocab.json", "merges.txt", "tokenizer.json"))
    if vocab.is_file() and merges.is_file():
        lines = [line for line in _read(merges).split("\n") if line and not line.startswith("#version")]
        return _byte_pairs(_json(vocab), lines, [], str(vocab))
    if both.is_file():
        table = _json(both)
        if not _is_gpt2_like(table):
            raise GptcliError(f"{both}: not a byte-pair encoding of GPT-2's kind", "give --ids", "tokenizer")
        model = table["model"]
        return _byte_pairs(model.get("vocab"), model.get("merges"), table.get("added_tokens") or [], str(both))
    return None


def _is_gpt2_like(table: dict) -> bool:
    """Bytes, split as GPT-2 does, nothing normalised, nothing added: what tiktoken with GPT2_SPLIT does."""
    model, split, after = (table.get(part) or {} for part in ("model", "pre_tokenizer", "post_processor"))
    added = table.get("added_tokens") or []
    if not all(isinstance(part, dict) for part in (model, split, after, *added)):
        return False
    other_rules = ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
    merged = model.get("type") == "BPE" and not any(model.get(rule) for rule in other_rules)
    plain = split.get("type") == "ByteLevel" and not split.get("add_prefix_space") and split.get("use_regex", True)
    marked = after.get("type") == "TemplateProcessing" and "SpecialToken" in json.dumps(after.get("single"))
    kept = after.get("type") in (None, "ByteLevel", "TemplateProcessing") and not marked
    words = any(not entry.get("special") for entry in added)  # they would be cut out of a text before any merge
    return bool(merged and plain and kept and not words and table.get("normalizer") is None)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise GptcliError(
            f"{path}: {getattr(error, 'strerror', None) or 'not UTF-8'}", "mend the file", "file"
        ) from None


def _json(path: Path) -> dict:
    try:
        table = json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise GptcliError(f"{path}: not JSON ({str(error).splitlines()[0]})", "mend the file", "file") from None
    if not isinstance(table, dict):
        raise GptcliError(f"{path}: holds no table", "mend the file", "file")
    return table


def _byte_pairs(vocab: Any, merges: Any, added: list[dict], where: str) -> BytePairs:
    """tiktoken merges the pair whose result has the lowest id first, so ids must follow the order of the merges.

    A word that is neither a byte nor made by a merge (padding, an end mark) is known and never encoded.
    """
    import tiktoken

    letters = _byte_letters()
    try:
        ids = [vocab["".join(pair.split(" ") if isinstance(pair, str) else pair)] for pair in merges]
        made = {vocab[letter] for letter in letters} | set(ids)
        ordered = all(first < second for first, second in pairwise(ids))
        known = vocab | {entry["content"]: entry["id"] for entry in added}
        whole = all(isinstance(word, str) and type(id_) is int and 0 <= id_ < 2**32 for word, id_ in known.items())
        special = {word: id_ for word, id_ in known.items() if id_ not in made}
        ranks = {bytes(letters[c] for c in word): id_ for word, id_ in vocab.items() if id_ in made}
    except (AttributeError, KeyError, TypeError) as error:
        raise GptcliError(f"{where}: not a byte-level vocabulary ({error})", "give --ids", "tokenizer") from None
    if not (ordered and whole and len(set(known.values())) == len(known)):
        raise GptcliError(f"{where}: its ids don't follow its merges as GPT-2's do", "give --ids", "tokenizer")
    encoding = tiktoken.Encoding(where, pat_str=GPT2_SPLIT, mergeable_ranks=ranks, special_tokens=special)
    return BytePairs(encoding, f"byte pairs of {Path(where).name}")


def _byte_letters() -> dict[str, int]:
    """The printable letter that stands for each byte in GPT-2's vocabulary files: itself, or one from U+0100 on."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(0x100 + i): byte for i, byte in enumerate(hidden)}


def from_name(name: str, offline: bool) -> Tokenizer:
    """An encoding that tiktoken knows by name, from its cache or (unless offline) fetched once into it."""
    import tiktoken
    import tiktoken.load

    if name not in tiktoken.list_encoding_names():
        raise GptcliError(f"tokenizer {name!r}: tiktoken knows no such encoding", "give --ids", "tokenizer")

    def no_network(path: str) -> bytes:
        raise OSError("--offline was given")

    fetch = tiktoken.load.read_file
    if offline:
        tiktoken.load.read_file = no_network
    try:
        return BytePairs(tiktoken.get_encoding(name), f"tiktoken's {name}")
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


def visible(piece: bytes | None) -> str:
    """Bytes as one unmistakable text: a space is ␣, what can't be seen or is no character alone is escaped."""
    if piece is None:
        return ""
    text = piece.decode("utf-8", errors="surrogateescape")
    return "".join(_visible_letter(letter) for letter in text)


def _visible_letter(letter: str) -> str:
    code = ord(letter)
    if letter == " ":
        return "␣"
    if letter in "\n\t\r\\":
        return {"\n": r"\n", "\t": r"\t", "\r": r"\r", "\\": r"\\"}[letter]
    if 0xDC80 <= code <= 0xDCFF:
        return f"\\x{code - 0xDC00:02x}"
    if letter.isprintable() and letter != "␣":
        return letter
    return f"\\x{code:02x}" if code < 0x80 else f"\\u{{{code:x}}}"


@dataclass(frozen=True)
class Token:
    """One token as it is shown: its id, its text made visible, and its bytes (None where no tokenizer knows the id)."""

    id: int
    token: str
    bytes: list[int] | None

    @classmethod
    def of(cls, id_: int, tokenizer: Tokenizer | None) -> "Token":
        piece = tokenizer.piece(id_) if tokenizer else None
        return cls(id_, visible(piece), None if piece is None else list(piece))
