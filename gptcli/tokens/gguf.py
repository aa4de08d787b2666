"""The tokenizer in a .gguf file's metadata, run by the library that runs the same vocabulary from its own files."""

import struct
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gptcli.errors import GptcliError, nearest
from gptcli.families.splits import SPLITS, UNNAMED, VOCABULARIES, Split
from gptcli.tokens import Tokenizer
from gptcli.tokens.files import SPACE, Library, Sentences

if TYPE_CHECKING:
    from gptcli.checkpoint.gguf import Gguf

AT = "tokenizer.ggml."
# tokenizer.ggml.token_type, and sentencepiece's own numbers.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


def from_gguf(header: "Gguf") -> Tokenizer | None:
    """The tokenizer of a .gguf file; None where it has none. Raises GptcliError for one that can't be run."""
    if f"{AT}model" not in header.metadata:
        return None
    return Vocabulary(header.metadata, header.files[0]).tokenizer()


def chat_settings(header: "Gguf") -> tuple[str | None, dict[str, str]]:
    """The chat template of a .gguf file, if it has one, and its special tokens by the names that templates use."""
    template = header.metadata.get("tokenizer.chat_template")
    vocabulary = Vocabulary(header.metadata, header.files[0])
    keys = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    named = {f"{word}_token": vocabulary.named(key, None) for word, key in keys.items()}
    special = {word: token for word, token in named.items() if token}
    return template if isinstance(template, str) else None, special


class Vocabulary:
    """What the metadata says of a tokenizer, checked."""

    def __init__(self, metadata: Mapping[str, Any], path: Path):
        self.metadata, self.path = metadata, path
        self.tokens: list[str] = self.array("tokens", str)
        if not self.tokens:
            raise self.refuse(f"{AT}tokens: missing")
        types = self.array("token_type", int)
        self.types: list[int] = types or [NORMAL] * len(self.tokens)
        if len(self.types) != len(self.tokens):
            raise self.refuse(f"{AT}token_type: {len(types):,} for {len(self.tokens):,} tokens")
        # Names for rows that no text becomes, up to a round number.
        while self.tokens and self.types[len(self.tokens) - 1] == UNUSED and self.is_padding(len(self.tokens) - 1):
            self.tokens.pop()
        twice = next((word for word, times in Counter(self.tokens).items() if times > 1), None)
        if twice is not None:
            raise self.refuse(f"{AT}tokens: {twice[:40]!r} stands twice")

    def refuse(self, reason: str, hint: str = "give --ids") -> GptcliError:
        return GptcliError(f"{self.path}: {reason}", hint, "tokenizer")

    def is_padding(self, id_: int) -> bool:
        return self.tokens[id_] == f"[PAD{id_}]"

    def array(self, key: str, kind: type) -> list:
        """An array's values; none where there is none. Raises GptcliError for values of another type."""
        values = self.metadata.get(AT + key)
        if values is None:
            return []
        if isinstance(values, str) or not isinstance(values, Sequence):
            raise self.refuse(f"{AT}{key}: not an array")
        values = list(values)
        if not all(type(value) is kind for value in values):
            raise self.refuse(f"{AT}{key}: not an array of {kind.__name__}")
        return values

    def flag(self, key: str, default: bool) -> bool:
        value = self.metadata.get(AT + key, default)
        if not isinstance(value, bool):
            raise self.refuse(f"{AT}{key}: {str(value)[:20]} is not true or false")
        return value

    def named(self, key: str, default: int | None) -> str | None:
        """The token that a key names by its id."""
        id_ = self.metadata.get(f"{AT}{key}_token_id", default)
        if id_ is None:
            return None
        if type(id_) is not int or not 0 <= id_ < len(self.tokens):
            if f"{AT}{key}_token_id" not in self.metadata:
                return None
            raise self.refuse(f"{AT}{key}_token_id: {str(id_)[:20]} is no token of {len(self.tokens):,}")
        return self.tokens[id_]

    def settings(self, bos: bool, ends: tuple[int | None, int | None]) -> dict[str, Any]:
        """What tokenizer_config.json would say. bos: does a text begin with it, where the file says nothing?

        Raises GptcliError where what is to be added is not named.
        """
        found: dict[str, Any] = {}
        for end, default, id_ in (("bos", bos, ends[0]), ("eos", False, ends[1])):
            found[f"{end}_token"] = self.named(end, id_)
            found[f"add_{end}_token"] = self.flag(f"add_{end}_token", default)
            if found[f"add_{end}_token"] and found[f"{end}_token"] is None:
                raise self.refuse(f"{AT}add_{end}_token: true, but {AT}{end}_token_id is missing")
        return found

    def tokenizer(self) -> Tokenizer:
        kind = self.metadata[f"{AT}model"]
        if not isinstance(kind, str) or kind not in VOCABULARIES:
            known = ", ".join(VOCABULARIES)
            raise self.refuse(f"{AT}model: {str(kind)[:40]!r} is not implemented (known: {known})")
        if VOCABULARIES[kind] == "pieces":
            return self.pieces()
        split = self.split()
        return Library(self.path, self.table(split), self.settings(split.bos, (None, None)), loose=True)

    def split(self) -> Split:
        """How a text is split before its merges."""
        name = self.metadata.get(f"{AT}pre")
        if name in (None, "default"):
            name = UNNAMED.get(self.metadata.get("general.architecture"), name)
        if name is None:
            raise self.refuse(f"{AT}pre: missing, and with it how a text is split before its merges")
        if not isinstance(name, str) or name not in SPLITS:
            hint = f"{nearest(str(name), SPLITS)} give --ids".strip()
            raise self.refuse(f"{AT}pre: {str(name)[:40]!r} is not implemented", hint)
        return SPLITS[name]

    def table(self, split: Split) -> dict[str, Any]:
        """The tokenizer.json that says the same."""
        merges = self.array("merges", str)
        if not merges:
            raise self.refuse(f"{AT}merges: missing")
        bytes_ = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
        steps: list[dict[str, Any]] = []
        if split.digits:
            steps.append({"type": "Digits", "individual_digits": True})
        if split.pattern is not None:
            pattern = {"Regex": split.pattern}
            steps.append({"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False})
        steps.append(bytes_ | {"use_regex": split.pattern is None})
        return {
            "version": "1.0",
            "added_tokens": list(self.added()),
            "normalizer": {"type": "NFC"} if split.composed else None,
            "pre_tokenizer": {"type": "Sequence", "pretokenizers": steps},
            "decoder": bytes_ | {"use_regex": True},
            "model": {
                "type": "BPE",
                "vocab": {word: id_ for id_, word in enumerate(self.tokens)},
                "merges": [self.pair(merge) for merge in merges],
                "ignore_merges": split.whole,
            },
        }

    def pair(self, merge: str) -> list[str]:
        """The two words that a merge joins, of which the first may begin with a blank."""
        at = merge.find(" ", 1)
        if at < 0:
            raise self.refuse(f"{AT}merges: {merge[:40]!r} is not two words")
        return [merge[:at], merge[at + 1 :]]

    def added(self) -> Iterator[dict[str, Any]]:
        """Words of a text that are tokens by themselves: always, or (control) where special words are asked for."""
        flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        for id_, (word, kind) in enumerate(zip(self.tokens, self.types)):
            if kind in (CONTROL, USER_DEFINED) and word:
                yield {"id": id_, "content": word} | flags | {"special": kind == CONTROL}

    def pieces(self) -> Tokenizer:
        """sentencepiece's own model, put together again."""
        unknown = self.named("unknown", 0)
        settings = self.settings(True, (1, 2))
        if UNKNOWN not in self.types and unknown is not None:
            self.types[self.tokens.index(unknown)] = UNKNOWN
        scores = self.array("scores", float) or [0.0] * len(self.tokens)
        if len(scores) < len(self.tokens):
            raise self.refuse(f"{AT}scores: {len(scores):,} for {len(self.tokens):,} tokens")
        # The rule of the format: words that are always tokens have their blanks written as such.
        words = [
            word.replace(" ", SPACE) if kind == USER_DEFINED else word or f"[EMPTY{id_}]"
            for id_, (word, kind) in enumerate(zip(self.tokens, self.types))
        ]
        spelt = {word for word, kind in zip(words, self.types) if kind == BYTE}
        return Sentences(self.path, settings, proto=b"".join(
            (
                *(_message(1, _piece(*one)) for one in zip(words, scores, self.types)),
                _message(2, _number(3, 2) + _number(35, len(spelt) == 256)),  # byte pairs; bytes for the unknown
                _message(3, _number(3, self.flag("add_space_prefix", True))
                    + _number(4, self.flag("remove_extra_whitespaces", False)) + _number(5, True)),
            )
        ))  # fmt: skip


# Protocol buffers, as far as sentencepiece's ModelProto needs them: a field is its number and kind, then the value.


def _varint(value: int) -> bytes:
    """Seven bits a byte, the lowest first."""
    found = bytearray()
    while value > 127:
        found.append(value & 127 | 128)
        value >>= 7
    return bytes((*found, value))


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(int(value))


def _message(field: int, body: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(body)) + body


def _piece(word: str, score: float, kind: int) -> bytes:
    return _message(1, word.encode()) + _varint(2 << 3 | 5) + struct.pack("<f", score) + _number(3, kind)
