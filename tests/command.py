"""Runs the command line as a person does: in this process, which is quick, or in one of its own."""

import io
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import pytest

from gptcli.cli.main import main

# What the environment of whoever runs the tests must not decide.
FOREIGN = ("GPTCLI_MODEL", "GPTCLI_DEBUG", "NO_COLOR", "FORCE_COLOR", "COLUMNS", "PYTHONIOENCODING", "LC_ALL")


def strict(text: str) -> Any:
    """The value of one line of strict JSON: no NaN, no Infinity, nothing after it."""

    def refuse(constant: str):
        raise AssertionError(f"{constant} is not JSON")

    assert text.endswith("\n") and text.count("\n") == 1
    return json.loads(text, parse_constant=refuse)


@dataclass(frozen=True)
class Ran:
    """What came of one command line."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return strict(self.out)


class Stream(io.TextIOWrapper):
    """Standard output or error: a pipe, or a terminal."""

    def __init__(self, encoding: str, errors: str, terminal: bool):
        super().__init__(io.BytesIO(), encoding=encoding, errors=errors, newline="\n", write_through=True)
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal

    @property
    def text(self) -> str:
        return self.buffer.getvalue().decode(self.encoding, "backslashreplace")


def gptcli(
    *words: object, stdin: bytes | io.IOBase = b"", columns: int | None = None, encoding: str = "utf-8", **env: str
) -> Ran:
    """Runs main() in this process. columns: of the terminal on standard output; None: a pipe. env: added to it."""
    out = Stream(encoding, "strict", terminal=columns is not None)
    err = Stream(encoding, "backslashreplace", terminal=False)
    with pytest.MonkeyPatch.context() as patch:
        for name in FOREIGN:
            patch.delenv(name, raising=False)
        for name, value in ({"TERM": "xterm"} | ({"COLUMNS": str(columns)} if columns else {}) | env).items():
            patch.setenv(name, value)
        patch.setattr(sys, "argv", ["gptcli", *map(str, words)])
        patch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)) if isinstance(stdin, bytes) else stdin)
        patch.setattr(sys, "stdout", out)
        patch.setattr(sys, "stderr", err)
        status = main()
    return Ran(status, out.text, err.text)


def process(*words: object, stdin: bytes = b"", encoding: str = "utf-8", **env: str) -> Ran:
    """Runs `python -m gptcli` in the working directory."""
    kept = {name: value for name, value in os.environ.items() if name not in FOREIGN}
    done = subprocess.run(
        [sys.executable, "-m", "gptcli", *map(str, words)],
        input=stdin,
        capture_output=True,
        env=kept | {"PYTHONUTF8": "1"} | env,
        timeout=60,
    )
    return Ran(done.returncode, done.stdout.decode(encoding), done.stderr.decode(encoding))
