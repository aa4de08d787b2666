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
    from gptcli.cli.options import RunOptions, TextOptions
    from gptcli.model.parallel import Group
    from gptcli.run import Run
    from gptcli.tokens import Encoded, Rule


class Fed(NamedTuple):
    """The ids to feed, one list a text, and which of them the tokenizer's rule added (None: ids were given).

    source: what the encoder reads, and its own marks; segments: each id's part of its text.
    """

    ids: list[list[int]]
    added: list[list[bool]] | None = None
    source: list[list[int]] | None = None
    source_added: list[list[bool]] | None = None
    segments: list[list[int]] | None = None

    @property
    def count(self) -> int:
        """How many ids there are to feed."""
        return sum(map(len, self.ids))


def run_of(
    model: Model, how: "RunOptions", fed: Fed, repeat: int = 1, group: "Group | None" = None, once: bool = False
) -> "Run":
    """The request that the options and the ids make. once: it takes one pass."""
    from gptcli.run import Run

    return Run(
        model,
        fed.ids,
        how.dtype,
        how.device,
        how.threads,
        how.stream,
        repeat,
        group,
        added=fed.added,
        source=fed.source,
        source_added=fed.source_added,
        segments=fed.segments,
        once=once,
    )


def read_ids(model: Model, words: list[str] | None, read: "TextOptions", alone: bool = False) -> Fed:
    """What to feed. Raises GptcliError where nothing was given, or twice, or not understood.

    alone: a text without a source is read as it is, though the model has an encoder.
    """
    if alone and read.source is None and read.source_ids is None:
        return _read_text(model, words or [], read, has_source=False)
    source, source_added = _read_source(model, read)
    fed = _read_text(model, words or [], read, source is not None)
    segments = None if read.segments is None else parse_ids("--segments", read.segments)
    if segments is not None and [*map(len, segments)] != [*map(len, fed.ids)]:
        what = f"{len(fed.ids[0])} tokens" if len(fed.ids) == 1 else "the texts' tokens"
        said = f"--segments {read.segments}: not one number for each of {what}"
        raise GptcliError(said, "`gptcli tokens` shows them", "inputs")
    if source is not None and len(source) == 1:
        source, source_added = source * len(fed.ids), source_added and source_added * len(fed.ids)
    return fed._replace(source=source, source_added=source_added, segments=segments)


def _read_source(model: Model, read: "TextOptions") -> tuple[list[list[int]] | None, list[list[bool]] | None]:
    """What the encoder beside a decoder reads."""
    given = [name for name, said in (("--source", read.source), ("--source-ids", read.source_ids)) if said is not None]
    if len(given) > 1:
        raise GptcliError("--source and --source-ids", "give one of them")
    if model.spec.encoder is None:
        if given:
            raise GptcliError(f"{given[0]}: {model.shown} has no encoder to read it", "leave it out", "inputs")
        return None, None
    if read.source_ids is not None:
        return parse_ids("--source-ids", read.source_ids), None
    texts = read.source
    if texts is None:
        if model.config is None or model.config.source is None:
            raise GptcliError("no source text, which this model's encoder reads", 'give --source "…"', "inputs")
        texts = [model.config.source]
    if len(texts) > 1 and not read.batch:
        raise GptcliError(f"{len(texts)} source texts for one text", "--batch takes several", "inputs")
    encoded = [model.tokenizer.marked(text, _rule(model, read)) for text in texts]
    if any(all(found.added) for found in encoded):
        raise GptcliError("the source text is empty", "give a text of at least one token", "empty")
    return [found.ids for found in encoded], [found.added for found in encoded]


def _read_text(model: Model, words: list[str], read: "TextOptions", has_source: bool) -> Fed:
    if read.ids is not None:
        if words:
            raise GptcliError("a text and --ids", "give one of them")
        shaping = [name for name, said in (("--chat", read.chat), ("--special", read.special)) if said]
        if shaping or read.bos is not None:
            raise GptcliError(f"{(shaping or ['--bos'])[0]} and --ids", "ids are fed as they are")
        return Fed(parse_ids("--ids", read.ids))
    begun = has_source and model.start is not None and read.bos is not False  # a decoder's text may be its start alone
    if words:
        refuse_a_model(words[0])
        texts = read_texts(words, read.batch)
    elif _unread_input():
        raise GptcliError("standard input holds a text, but nothing said to read it", "write - in the text's place")
    elif model.config is not None and model.config.prompt is not None:
        texts = [model.config.prompt]
    elif begun:
        texts = [""]
    else:
        raise GptcliError("no text and no --ids", 'give a text, such as "The cat sat on the"')
    encoded = [_encoded(model, text, read, has_source) for text in texts]
    for text, found in enumerate(encoded):
        if not found.ids if begun else all(found.added):
            which = f"text {text} is empty" if len(encoded) > 1 else "the text is empty"
            raise GptcliError(which, "give a text of at least one token", "empty")
    return Fed([found.ids for found in encoded], [found.added for found in encoded])


def _encoded(model: Model, text: str, read: "TextOptions", has_source: bool) -> "Encoded":
    if has_source:
        if read.chat:
            raise GptcliError("--chat beside a source text", "a chat is read by a decoder alone", "chat")
        from gptcli.run import decoder_text

        return decoder_text(model, text, _rule(model, read))
    if not read.chat:
        return model.tokenizer.marked(text, _rule(model, read))
    from gptcli.tokens import Rule
    from gptcli.tokens.chat import chat_text

    source = model.gguf or model.directory
    if source is None:
        raise GptcliError("--chat: this model has no chat template", "name a checkpoint's directory by -m", "chat")
    # The template writes the special tokens itself, its BOS among them.
    return model.tokenizer.marked(chat_text(source, text), Rule(bos=read.bos or False, special=True))


def _rule(model: Model, read: "TextOptions") -> "Rule":
    """Where a model fills in masks, the mask in its text is that token, and so are its other special words."""
    from gptcli.tokens import Rule

    return Rule(read.bos, read.special or model.fills)


def read_texts(words: list[str], batch: bool) -> list[str]:
    """The texts that words make; `-` reads standard input, which can be read once."""
    if words == ["-"]:
        try:
            text = sys.stdin.buffer.read().decode("utf-8")
        except UnicodeDecodeError as error:
            raise GptcliError(f"standard input is not UTF-8 (byte {error.start})", "give UTF-8 text") from None
        text = text.removesuffix("\n").removesuffix("\r")
        # Not splitlines, which also parts a text at form feeds and other signs that may stand inside it.
        return [line.removesuffix("\r") for line in text.split("\n")] if batch else [text]
    return words if batch else [" ".join(words)]


def refuse_a_model(word: str) -> None:
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


def parse_ids(option: str, given: str) -> list[list[int]]:
    """`12,45,78`, `[[12, 45, 78]]` or `@file` of either, as one list a text. Raises GptcliError, naming the option."""
    said = f"{option} {given if len(given) <= 60 else given[:59] + '…'}"
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
