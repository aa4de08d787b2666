"""The README's commands run, and print what it shows.

    python -m tests.test_readme

writes their present output into the README.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).resolve().parent.parent / "README.md"
BLOCK = re.compile(r"```console\n\$ (gptcli .*)\n((?:.*\n)*?)```\n")


def run(command: str) -> str:
    """What a person sees in a pipe: both streams, time left out."""
    words = shlex.split(command)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GPTCLI_")} | {"PYTHONUTF8": "1"}
    done = subprocess.run(
        [sys.executable, "-m", *words],
        capture_output=True,
        text=True,
        encoding="utf-8",
        cwd=README.parent,
        env=environment,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == (2 if "--layer 0" in command else 0), done.stderr
    return done.stdout + "".join(line + "\n" for line in done.stderr.splitlines() if "tokens/s" not in line)


def portable(text: str) -> str:
    """Rounding errors differ from processor to processor."""
    return re.sub(r"(fused kernel's z|sum to 1) .*", r"\1", text)


@pytest.mark.parametrize("command, shown", BLOCK.findall(README.read_text(encoding="utf-8")))
def test_command_prints_what_the_readme_shows(command, shown):
    assert portable(run(command)) == portable(shown)


def test_there_are_ten_commands_at_least():
    assert len(BLOCK.findall(README.read_text(encoding="utf-8"))) >= 10


if __name__ == "__main__":
    text = README.read_text(encoding="utf-8")
    text = BLOCK.sub(lambda match: f"```console\n$ {match[1]}\n{run(match[1])}```\n", text)
    README.write_text(text, encoding="utf-8")
