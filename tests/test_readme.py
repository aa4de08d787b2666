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


def test_the_python_lines_give_what_their_comments_say():
    block = re.search(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)[1]
    names: dict = {}
    for line in block.splitlines():
        code, _, said = line.partition("#")
        if not re.match(r"m\.|m\[", code):
            exec(code, names)  # noqa: S102 - the README's own lines
            continue
        value = eval(code, names)  # noqa: S307
        if re.match(r" (\d|\[|torch)", said):
            assert repr(value) == said.strip().removesuffix(", [out, in]"), line


def test_there_are_ten_commands_at_least():
    assert len(BLOCK.findall(README.read_text(encoding="utf-8"))) >= 10


if __name__ == "__main__":
    text = README.read_text(encoding="utf-8")
    text = BLOCK.sub(lambda match: f"```console\n$ {match[1]}\n{run(match[1])}```\n", text)
    README.write_text(text, encoding="utf-8")
