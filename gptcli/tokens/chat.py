"""A user's message in the form that a chat model was trained on, by the template that comes with it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gptcli.errors import GptcliError
from gptcli.tokens.files import read, read_settings, word_of
from gptcli.tokens.gguf import chat_settings

if TYPE_CHECKING:
    from gptcli.checkpoint.gguf import Gguf

TEMPLATE = Path(__file__).with_name("template.py")
SECONDS = 10  # for the child as a whole, should the system know no limits


class Template(NamedTuple):
    """A chat template, the special tokens that it may write by their names, and where it stands."""

    text: str
    special: dict[str, str]
    where: Path


def chat_text(source: "Path | Gguf", message: str) -> str:
    """One user message by the chat template of a directory or a .gguf file, up to where the answer begins.

    The template runs in jinja2's sandbox, in a process of its own with little time and memory. Raises GptcliError where
    there is none, or where it refuses or fails.
    """
    template = _in_directory(source) if isinstance(source, Path) else _in_gguf(source)
    found = _rendered({"template": template.text, "message": message, "special": template.special})
    if "text" not in found:
        said = " ".join(str(found.get("error", "it says nothing")).split())[:120]
        raise GptcliError(f"--chat: {template.where}: the template fails ({said})", "leave --chat out", "chat")
    return found["text"]


def _in_gguf(header: "Gguf") -> Template:
    template, special = chat_settings(header)
    if template is None:
        raise GptcliError(f"--chat: {header.files[0]} has no chat template", "leave --chat out", "chat")
    return Template(template, special, header.files[0])


def _in_directory(directory: Path) -> Template:
    alone, settings = directory / "chat_template.jinja", read_settings(directory)
    template = read(alone) if alone.is_file() else settings.get("chat_template")
    where = alone if alone.is_file() else directory / "tokenizer_config.json"
    if isinstance(template, list):  # several, by name
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        if "default" not in named:
            names = ", ".join(map(str, named)) or "none"
            raise GptcliError(f"--chat: {where}: no template is named default (there is {names})", code="chat")
        template = named["default"]
    if not isinstance(template, str):
        raise GptcliError(f"--chat: {directory} has no chat template", "leave --chat out", "chat")
    special = {key: word_of(token) for key, token in settings.items() if key.endswith("_token") and word_of(token)}
    return Template(template, special, where)


def _rendered(asked: dict[str, Any]) -> dict[str, str]:
    """What template.py answers: a text or an error.

    Python can't stop an endless loop or a huge power inside itself, and the sandbox forbids neither; the system can.
    """
    given = json.dumps(asked | {"path": sys.path}).encode()
    try:
        child = subprocess.run(  # noqa: S603  # Python itself, and a file of this package
            [sys.executable, "-I", str(TEMPLATE)], input=given, capture_output=True, timeout=SECONDS, check=False
        )
        found = json.loads(child.stdout)
    except subprocess.TimeoutExpired:
        return {"error": f"it runs for more than {SECONDS} s"}
    except ValueError:  # it was ended before it could say anything
        return {"error": "it takes too long or too much memory"}
    return found
