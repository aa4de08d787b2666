"""How many ids a checkpoint's tokenizer knows, read off its files: no library is loaded to count them."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from gptcli.checkpoint.files import read_json
from gptcli.errors import GptcliError


class Size(NamedTuple):
    """The file that says it, and one more than the highest id."""

    file: str
    ids: int


def size_of(directory: Path) -> Size | None:
    """Of the tokenizer that from_files would run; None where there is none. Raises GptcliError for a broken file."""
    whole, vocab, pieces = (directory / name for name in ("tokenizer.json", "vocab.json", "tokenizer.model"))
    if whole.is_file():
        table = _table(whole)
        model = table.get("model") if isinstance(table.get("model"), dict) else {}
        added = table.get("added_tokens") if isinstance(table.get("added_tokens"), list) else []
        ids = [entry.get("id") for entry in added if isinstance(entry, dict)]
        return Size(whole.name, _beyond(_ids(model.get("vocab"), whole), [id_ for id_ in ids if type(id_) is int]))
    if vocab.is_file() and (directory / "merges.txt").is_file():
        return Size(vocab.name, _beyond(_ids(_table(vocab), vocab)))
    if pieces.is_file():
        settings = directory / "tokenizer_config.json"
        added = _table(settings).get("added_tokens_decoder") if settings.is_file() else None
        ids = [int(id_) for id_ in added if id_.isdecimal()] if isinstance(added, dict) else []
        return Size(pieces.name, _beyond(range(sum(1 for _ in _pieces(pieces))), ids))
    return None


def _table(path: Path) -> dict[str, Any]:
    """A JSON file's table, which may be long: only where it can't be read, what says why is asked."""
    try:
        table = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        table = None
    return table if isinstance(table, dict) else read_json(path)


def _ids(vocabulary: Any, path: Path) -> range | list[int]:
    """Ids by word, or words (with their scores) in the order of ids."""
    if isinstance(vocabulary, list):
        return range(len(vocabulary))
    if not isinstance(vocabulary, dict) or not all(type(id_) is int for id_ in vocabulary.values()):
        raise GptcliError(f"{path}: no vocabulary of words and ids", "mend the file", "tokenizer")
    return list(vocabulary.values())


def _beyond(*several: range | list[int]) -> int:
    return max((max(ids, default=-1) for ids in several), default=-1) + 1


def _pieces(path: Path) -> Iterator[bytes]:
    """The vocabulary of a sentencepiece model: field 1 of a protocol buffer, once a piece.

    Each field is a number (its own, times 8, and its type), then, of type 2, a length and that many bytes.
    """
    data = path.read_bytes()

    def broken() -> GptcliError:
        return GptcliError(f"{path}: not a model of sentencepiece", "mend the file", "tokenizer")

    at, end = 0, len(data)
    while at < end:
        tag, at = _number(data, at)
        length, at = _number(data, at) if tag & 7 == 2 else ({1: 8, 5: 4}.get(tag & 7, -1), at)
        if tag & 7 == 0:
            length, (_, at) = 0, _number(data, at)
        if length < 0 or at + length > end:
            raise broken()
        if tag == 0x0A:
            yield data[at : at + length]
        at += length


def _number(data: bytes, at: int) -> tuple[int, int]:
    """A protocol buffer's number, seven bits a byte, the lowest first; and where it ends."""
    value = shift = 0
    for byte in data[at : at + 10]:
        value, shift, at = value | (byte & 127) << shift, shift + 7, at + 1
        if byte < 128:
            return value, at
    return 2**63, len(data)
