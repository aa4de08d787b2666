"""What a person gives to read: words on the command line, standard input, or ids."""

import json
import os
import re
import select
import stat
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from gptcli import shipped
from gptcli.errors import GptcliError
from gptcli.source import Model

if TYPE_CHECKING:
    from gptcli.cli.options import TextOptions
    from gptcli.tokens import Encoded


class Fed(NamedTuple):
    """The ids to feed, one list a text, and which of them the tokenizer's rule added (None: ids were given)."""

    ids: list[list[int]]
    added: list[list[bool]] | None = None


def read_ids(model: Model, words: list[str] | None, read: "TextOptions") -> Fed:
    """What to feed. Raises GptcliError where nothing was given, or twice, or not understood."""
    words = words or []
    if read.ids is not None:
        if words:
            raise GptcliError("a text and --ids", "give one of them")
        shaping = [name for name, said in (("--chat", read.chat), ("--special", read.special)) if said]
        if shaping or read.bos is not None:
            raise GptcliError(f"{(shaping or ['--bos'])[0]} and --ids", "ids are fed as they are")
        return Fed(parse_ids(read.ids))
    if words:
        _refuse_a_model(words[0])
        texts = _texts(words, read.batch)
    elif _unread_input():
        raise GptcliError("standard input holds a text, but nothing said to read it", "write - in the text's place")
    elif model.config is not None and model.config.prompt is not None:
        texts = [model.config.prompt]
    else:
        raise GptcliError("no text and no --ids", 'give a text, such as "The cat sat on the"')
    encoded = [_encoded(model, text, read) for text in texts]
    for text, found in enumerate(encoded):
        if all(found.added):
            which = f"text {text} is empty" if len(encoded) > 1 else "the text is empty"
            raise GptcliError(which, "give a text of at least one token", "empty")
    return Fed([found.ids for found in encoded], [found.added for found in encoded])


def _encoded(model: Model, text: str, read: "TextOptions") -> "Encoded":
    from gptcli.tokens import Rule

    if not read.chat:
        return model.tokenizer.marked(text, Rule(read.bos, read.special))
    from gptcli.tokens.chat import chat_text

    if model.directory is None:
        raise GptcliError("--chat: this model has no chat template", "name a checkpoint's directory by -m", "chat")
    # The template writes the special tokens itself, its BOS among them.
    return model.tokenizer.marked(chat_text(model.directory, text), Rule(bos=read.bos or False, special=True))


def _texts(words: list[str], batch: bool) -> list[str]:
    if words == ["-"]:
        try:
            text = sys.stdin.buffer.read().decode("utf-8")
        except UnicodeDecodeError as error:
            raise GptcliError(f"standard input is not UTF-8 (byte {error.start})", "give UTF-8 text") from None
        text = text.removesuffix("\n").removesuffix("\r")
        # Not splitlines, which also parts a text at form feeds and other signs that may stand inside it.
        return [line.removesuffix("\r") for line in text.split("\n")] if batch else [text]
    return words if batch else [" ".join(words)]


def _refuse_a_model(word: str) -> None:
    """A path, a shipped config or a shipped sample where a text belongs is a slip."""
    path, ships = Path(word), {*shipped.configs(), *shipped.samples()} - {"cats"}
    try:
        is_path = bool(word) and path.exists() and (os.sep in word or path.suffix != "" or path.is_dir())
        is_text = is_path and path.is_file() and path.suffix in ("", ".txt", ".md")
    except OSError:  # a text longer than any file's name
        return
    if is_text:
        raise GptcliError(f"{word!r} is a file, not a text", f"- reads standard input: gptcli … - < {word}")
    if is_path or word.removesuffix(".yaml") in ships:
        flag = "-c" if path.suffix in (".yaml", ".yml") else "-m"
        raise GptcliError(f"{word!r} is a model, not a text", f"use {flag} {word}")


def _unread_input() -> bool:
    """Is text waiting on standard input? A terminal, /dev/null and an idle pipe hold none."""
    try:
        mode = os.fstat(sys.stdin.fileno())
        if stat.S_ISREG(mode.st_mode):
            return mode.st_size > os.lseek(sys.stdin.fileno(), 0, os.SEEK_CUR)
        if not stat.S_ISFIFO(mode.st_mode):
            return False
        waiting = bool(select.select([sys.stdin], [], [], 0)[0])
        return waiting and bool(sys.stdin.buffer.peek(1))
    except (OSError, ValueError, AttributeError):
        return False


def parse_ids(given: str) -> list[list[int]]:
    """`12,45,78`, `[[12, 45, 78]]` or `@file` of either, as one list a text. Raises GptcliError."""
    said = f"--ids {given if len(given) <= 60 else given[:59] + '…'}"
    if given.startswith("@"):
        try:
            text = Path(given[1:]).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "not UTF-8 text"
            raise GptcliError(f"{said}: {reason}", "give a readable file of ids", "file") from None
    else:
        text = given
    text = text.strip()
    wanted = "give ids such as 12,45,78 or [[12, 45, 78]]"
    try:
        if text.startswith("["):
            found = json.loads(text)
        else:
            parts = text.replace(",", " ").split()
            if not all(re.fullmatch(r"[-+]?[0-9]{1,19}", part) for part in parts):
                raise ValueError("not whole numbers")
            found = [int(part) for part in parts]
    except (ValueError, RecursionError):
        raise GptcliError(f"{said}: not ids", wanted, "ids") from None
    if found and all(isinstance(row, list) for row in found):
        rows = found
    else:
        rows = [found]
    if not all(row and all(type(id_) is int and abs(id_) < 2**63 for id_ in row) for row in rows):
        empty = not found or [] in rows
        reason = "an empty text holds no token to run" if empty else "not whole numbers"
        raise GptcliError(f"{said}: {reason}", wanted, "empty" if empty else "ids")
    return rows
