"""Text to ids and back. A tokenizer encodes a text, gives the bytes of an id, and finds the id that a word means."""

from importlib import import_module
from typing import Any, NamedTuple

from gptcli.data import entry
from gptcli.errors import GptcliError, nearest


class Encoded(NamedTuple):
    """A text's ids, and which of them the tokenizer's own rule added (a BOS, an EOS)."""

    ids: list[int]
    added: list[bool]


class Rule(NamedTuple):
    """How to encode. bos: begin with it; None: add what the tokenizer itself adds; False: add nothing. special: words
    such as `<|endoftext|>` in the text mean the special tokens, instead of being plain text.
    """

    bos: bool | None = None
    special: bool = False


OWN_RULE = Rule()
MASK = "[MASK]"  # the word to be filled in, of a toy vocabulary


class Tokenizer:
    """name: what encodes, for a person; size: how many ids it knows.

    between: what joins two pieces in a text; unknown: the id of everything that it has no other id for; mask: the id of
    a word that is to be filled in.
    """

    name: str
    size: int
    between = b""
    unknown: int | None = None
    mask: int | None = None

    @property
    def target(self) -> "Tokenizer":
        """What encodes the text of a decoder beside an encoder: itself, but where the two have words of their own."""
        return self

    def encode(self, text: str, rule: Rule = OWN_RULE) -> list[int]:
        """The ids of a text, with what the rule adds. Raises GptcliError."""
        return self.marked(text, rule).ids

    def marked(self, text: str, rule: Rule = OWN_RULE) -> Encoded:
        """The same, with a mark at each id that the rule added."""
        raise NotImplementedError

    def piece(self, id_: int) -> bytes | None:
        """The bytes that an id stands for; None for an id that it doesn't know."""
        raise NotImplementedError

    def find(self, word: str) -> int:
        """The one id that a word means, with or without a space before it. Raises GptcliError."""
        plain = Rule(bos=False)
        for text in (word, f" {word}") if word else ():
            ids = self.encode(text, plain)
            if len(ids) == 1 and ids != [self.unknown]:
                return ids[0]
        # Of a tokenizer that puts a space before every text, the word without its own is the word with one.
        ids = self.encode(word[1:], plain) if word.startswith(" ") else []
        if len(ids) == 1 and self.piece(ids[0]) == word.encode():
            return ids[0]
        pieces = " + ".join(visible(self.piece(id_) or b"") for id_ in self.encode(word, plain))
        raise GptcliError(f"{word!r} is not one token but {pieces or 'none'}", "name one of them", "word")


class Ends(NamedTuple):
    """What a tokenizer adds to a text by its own rule: ids before it, ids after it."""

    before: list[int]
    after: list[int]


def framed(ids: list[int], ends: Ends, rule: Rule, bos: int | None, name: str) -> Encoded:
    """A text's ids between what is added to them. Raises GptcliError where a BOS is asked for and there is none.

    The tokenizer's own rule adds its BOS even to a text that begins with one, as its library does, and the mark tells
    the two apart. A BOS that is asked for is there once.
    """
    before, after = ([], []) if rule.bos is False else ends
    if rule.bos:
        if bos is None:
            raise GptcliError(f"--bos: {name} names no BOS", "leave it out", "tokenizer")
        if ids[:1] == [bos]:
            before = [id_ for id_ in before if id_ != bos]
        elif bos not in before:
            before = [bos, *before]
    return Encoded([*before, *ids, *after], [True] * len(before) + [False] * len(ids) + [True] * len(after))


class Words(Tokenizer):
    """A toy vocabulary: a text is words parted by spaces, and an id may have no word."""

    between = b" "

    def __init__(self, words: dict[int, str], model: str, named: bool):
        self.words, self.ids = words, {word: id_ for id_, word in words.items()}
        self.name, self.size = f"the {len(words)} words of {model}", len(words)
        self.mask = self.ids.get(MASK)
        self.other = (
            "" if named else f"; the worked example {model} ran because no model was named: -m MODEL runs another"
        )

    def marked(self, text: str, rule: Rule = OWN_RULE) -> Encoded:
        if rule.bos:
            raise GptcliError("--bos: a vocabulary of words has no BOS", "leave it out", "tokenizer")
        ids = [self.find(word) for word in text.split()]
        return Encoded(ids, [False] * len(ids))

    def piece(self, id_: int) -> bytes | None:
        return self.words[id_].encode() if id_ in self.words else None

    def find(self, word: str) -> int:
        if word not in self.ids:
            meant = nearest(word, self.ids)
            known = f"the vocabulary has {', '.join(self.ids)}"
            raise GptcliError(f"unknown word {word!r}", f"{meant} {known}{self.other}".strip(), "word")
        return self.ids[word]


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


@entry
class Token:
    """One token as it is shown: its id, its text made visible, and its bytes (None where no tokenizer knows the id).

    added: the tokenizer's rule put it there, not the text.
    """

    id: int
    token: str
    bytes: list[int] | None
    added: bool = False

    @classmethod
    def of(cls, id_: int, tokenizer: Tokenizer | None, added: bool = False) -> "Token":
        piece = tokenizer.piece(id_) if tokenizer else None
        return cls(id_, visible(piece), None if piece is None else list(piece), added)


def __getattr__(name: str) -> Any:
    """The readers stand in rooms of their own, which are loaded when one is asked for."""
    room = {"BytePairs": "files", "from_files": "files", "from_name": "files", "from_gguf": "gguf"}.get(name)
    if room is None:
        raise AttributeError(name)
    return getattr(import_module(f"gptcli.tokens.{room}"), name)
