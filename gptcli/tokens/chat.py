"""A user's message in the form that a chat model was trained on, by the template in its directory."""

from pathlib import Path
from typing import Any

from gptcli.errors import GptcliError
from gptcli.tokens.files import read, read_json, word_of


def chat_text(directory: Path, message: str) -> str:
    """One user message by the directory's chat template, up to where the answer begins.

    The template runs in jinja2's sandbox. Raises GptcliError where there is none, or where it refuses or fails.
    """
    about, alone = directory / "tokenizer_config.json", directory / "chat_template.jinja"
    settings = read_json(about) if about.is_file() else {}
    template = read(alone) if alone.is_file() else settings.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {entry.get("name"): entry.get("template") for entry in template if isinstance(entry, dict)}
        template = named.get("default")
    if not isinstance(template, str):
        raise GptcliError(f"--chat: {directory} has no chat template", "leave --chat out", "chat")
    return _render(template, settings, message, str(alone if alone.is_file() else about))


def _render(template: str, settings: dict[str, Any], message: str, where: str) -> str:
    import datetime
    import json

    from jinja2 import TemplateError
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(said: str) -> None:
        raise TemplateError(said)

    box = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    box.filters["tojson"] = lambda x, indent=None, **_: json.dumps(x, ensure_ascii=False, indent=indent)
    box.globals["raise_exception"] = raise_exception
    box.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    special = {key: word_of(settings.get(key)) or "" for key in ("bos_token", "eos_token", "pad_token", "unk_token")}
    try:
        messages = [{"role": "user", "content": message}]
        return box.from_string(template).render(messages=messages, add_generation_prompt=True, tools=None, **special)
    except (TemplateError, TypeError, ValueError, OverflowError, RecursionError) as error:
        said = " ".join(str(error).split())[:120]
        raise GptcliError(f"--chat: {where}: the template fails ({said})", "leave --chat out", "chat") from None
