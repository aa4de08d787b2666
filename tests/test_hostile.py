"""Files that are broken, by accident or on purpose: each is refused in one line, at once, and nothing in it runs.

What a file that is not refused holds is what the format's own library says. The files are made by tests/hostile.py.
"""

import json
import pickle
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from gptcli.checkpoint.gguf import Gguf
from gptcli.checkpoint.gguf import read_header as read_gguf_header
from gptcli.checkpoint.pickles import listed
from gptcli.checkpoint.safetensors import TensorInfo, read_header
from gptcli.errors import GptcliError
from tests import hostile
from tests.command import Ran, gptcli, process
from tests.converted import convert, exact_toy
from tests.hostile import ENORMOUS, ESCAPES, SUFFIXES
from tests.test_gguf_families import SMALL

SOUND = hostile.sound()
FAULTS = hostile.faults()
NAMED = [(form, case) for form, cases in FAULTS.items() for case in cases]
DTYPES = {torch.float32: "F32"}
NUMBERS = count()


@pytest.fixture
def write(tmp_path):
    """Puts bytes into a file of that format, under a new name each time: a listing is kept by name, time and size."""

    def make(form: str, data: bytes) -> Path:
        path = tmp_path / f"{next(NUMBERS)}{SUFFIXES[form]}"
        path.write_bytes(data)
        return path

    return make


def tensors_of(form: str, path: Path) -> dict[str, TensorInfo]:
    return read_header(path) if form == "safetensors" else listed(path).tensors


def refusal(form: str, path: Path) -> str:
    """What the reader says of a file that it refuses, without the file's name; nothing where it takes it."""
    begun, said = time.process_time(), ""
    try:
        tensors_of(form, path)
    except GptcliError as error:
        said = error.message.removeprefix(f"{path}: ")
    assert time.process_time() - begun < 2
    assert said.isprintable() and len(said) < 400
    return said


# The reader: every length, and thousands of changes


@pytest.mark.parametrize("form", SOUND)
def test_every_truncation_is_refused(form, write):
    for name, data in hostile.truncations(SOUND[form]):
        path = write(form, data)
        assert refusal(form, path), name
        path.unlink()


def flat(value: object, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from flat(inner, f"{path}.{key}" if path else str(key))


def by_library(form: str, path: Path) -> dict[str, torch.Tensor]:
    if form == "safetensors":
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
    return dict(flat(torch.load(path, weights_only=True, map_location="cpu")))


def same_as_library(form: str, path: Path, name: str) -> None:
    """Names, types, shapes and numbers; what torch's loader refuses to build must be told by its listing."""
    if form != "safetensors" and listed(path).foreign:
        with pytest.raises(Exception):  # noqa: B017 - whatever torch says
            by_library(form, path)
        return
    theirs, ours, data = by_library(form, path), tensors_of(form, path), path.read_bytes()
    assert {key: (DTYPES.get(x.dtype), tuple(x.shape)) for key, x in theirs.items()} == {
        key: (info.dtype, info.shape) for key, info in ours.items()
    }, name
    strides = {} if form == "safetensors" else listed(path).strides
    for key, info in ours.items():
        held = torch.frombuffer(bytearray(data[info.start : info.end]), dtype=torch.float32)
        held = held.as_strided(info.shape, strides.get(key, theirs[key].stride()))
        assert torch.equal(held.view(torch.int32), theirs[key].view(torch.int32)), name


@pytest.mark.parametrize("form", SOUND)
def test_random_changes_are_refused_or_seen_as_the_library_sees_them(form, write):
    accepted = 0
    for name, data in hostile.flips(SOUND[form], 2000, seed=5):
        path = write(form, data)
        if not refusal(form, path):
            accepted += 1
            same_as_library(form, path, name)
        path.unlink()
    assert 100 < accepted < 1000  # data can be changed unseen, most else can't


@pytest.mark.parametrize("form, case", NAMED, ids=[f"{form}: {case}" for form, case in NAMED])
def test_each_fault_is_told(form, case, write):
    data, says = FAULTS[form][case]
    said = refusal(form, write(form, data))
    assert said and says in said


# The command line


@pytest.fixture(scope="module")
def config(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("config") / "mini.yaml"
    path.write_text(hostile.CONFIG)
    return path


WORDS = {
    "inspect": lambda path, config: ["inspect", path],
    "inspect -q": lambda path, config: ["inspect", "-q", path],
    "inspect --json": lambda path, config: ["inspect", "--json", path],
    "params": lambda path, config: ["params", path, "-c", config],
    "forward": lambda path, config: ["forward", "-m", path, "-c", config, "--ids", "1"],
}


def harmless(ran: Ran) -> None:
    """Nothing that a terminal would obey, and no stack."""
    text = ran.out + ran.err
    assert all(letter.isprintable() or letter == "\n" for letter in text), text
    assert "Traceback" not in text and "a defect of" not in text, text


def is_refused(ran: Ran, word: str) -> None:
    """`inspect` finds (1), the others can't run (2), and one line says why."""
    harmless(ran)
    assert ran.status == 2 or (ran.status == 1 and word.startswith("inspect")), ran
    if ran.status == 2:
        assert ran.err.startswith("gptcli: ") and ran.err.count("\n") == 1, ran
        assert ran.out == "" or word == "inspect --json", ran
    elif word == "inspect -q":
        assert ran.out.count("\n") == 1 and not ran.out.startswith("whole"), ran
    elif word == "inspect --json":
        assert ran.json["status"] == "findings" and ran.json["findings"], ran


@pytest.mark.parametrize("form", SOUND)
@pytest.mark.parametrize("word", WORDS)
def test_the_sound_files_are_taken(word, form, write, config):
    ran = gptcli(*WORDS[word](write(form, SOUND[form]), config))
    harmless(ran)
    assert ran.status == 0, ran


@pytest.mark.parametrize("form, case", NAMED, ids=[f"{form}: {case}" for form, case in NAMED])
def test_each_fault_on_the_command_line(form, case, write, config):
    path = write(form, FAULTS[form][case][0])
    number = NAMED.index((form, case))
    for word in ("inspect -q", ("params", "forward", "inspect", "inspect --json")[number % 4]):
        columns = 80 if number % 8 < 4 else None
        ran = gptcli(*WORDS[word](path, config), columns=columns, NO_COLOR="1")
        is_refused(ran, word)


@pytest.mark.parametrize("form", SOUND)
def test_damage_on_the_command_line(form, write, config):
    """A sample of the truncations and of the changes."""
    damaged = list(hostile.truncations(SOUND[form]))[:: len(SOUND[form]) // 20]
    damaged += list(hostile.flips(SOUND[form], 2000, seed=5))[::80]
    for i, (name, data) in enumerate(damaged):
        path, word = write(form, data), [*WORDS][i % len(WORDS)]
        ran = gptcli(*WORDS[word](path, config), columns=80, NO_COLOR="1")
        if ran.status == 0 or not refusal(form, path):  # a name may have become another, which the config does not know
            harmless(ran)
            assert not refusal(form, path), name
        else:
            is_refused(ran, word)


@pytest.fixture(scope="module")
def gguf(tmp_path_factory) -> bytes:
    """A small model that describes itself."""
    folder = tmp_path_factory.mktemp("gguf")
    exact_toy(SMALL | {"model_type": "llama", "num_hidden_layers": 1}, folder / "toy")
    return convert(folder / "toy", folder / "toy.gguf").read_bytes()


def test_a_damaged_gguf_file_on_the_command_line(gguf, tmp_path):
    """Cut anywhere, or its header changed: refused in one line, or taken by the reader as well."""
    words = {"inspect": [], "inspect -q": [], "params": [], "forward": ["--ids", "1", "-m"]}
    header = len(gguf) - sum(info.end - info.start for info in read_gguf(gguf, tmp_path).infos.values())
    damaged = list(hostile.truncations(gguf))[:: len(gguf) // 40]
    damaged += [(name, data + gguf[header:]) for name, data in hostile.flips(gguf[:header], 2000, seed=5)][::25]
    for i, (name, data) in enumerate(damaged):
        path, word = tmp_path / f"{i}.gguf", [*words][i % len(words)]
        path.write_bytes(data)
        ran = gptcli(*word.split(), *words[word], path, columns=80, NO_COLOR="1")
        if ran.status == 0:
            harmless(ran)
            assert read_gguf(data, tmp_path).infos, name
        else:
            is_refused(ran, word)


def read_gguf(data: bytes, folder: Path) -> Gguf:
    path = folder / "whole.gguf"
    path.write_bytes(data)
    return read_gguf_header(path)


# Code that would run


@pytest.mark.parametrize("way", hostile.traps(""))
def test_code_in_a_pickle_does_not_run(way, tmp_path, write, config):
    mark = tmp_path / "mark"
    code = hostile.traps(str(mark))[way]
    with suppress(AttributeError):  # what comes of some is not what it is used for
        pickle.loads(b"\x80\x02" + code + b".")  # noqa: S301 - to see that it would
    assert mark.exists()
    mark.rmdir() if mark.is_dir() else mark.unlink()
    for place, (form, data) in hostile.trapped(code).items():
        path = write(form, data)
        said = refusal(form, path)
        assert said or listed(path).foreign, place
        for word in ("inspect -q", "params", "forward"):
            ran = gptcli(*WORDS[word](path, config))
            is_refused(ran, word)
        assert not mark.exists(), place


def test_what_would_run_is_named(tmp_path, write):
    code = hostile.traps("/somewhere")["REDUCE"]
    held = listed(write("zip", hostile.trapped(code)["beside a tensor"][1]))
    assert held.foreign == ["os.system"]
    assert held.opaque == {"trap": "os.system('touch /somewhere')"}
    assert list(held.tensors) == ["w"]


# Names that a terminal would obey


def escaped_files() -> dict[str, tuple[str, bytes]]:
    """Sound files that are full of escape sequences."""
    names = {f"{name}{ESCAPES}": x for name, x in hostile.state().items()}
    settings = {
        "model": names,
        ESCAPES: {ESCAPES: [ESCAPES]},
        "model_args": {ESCAPES: ESCAPES},
        f"x{ESCAPES}": b"\x1b[",
    }
    one, linear = hostile.table(("w", hostile.tensor())), torch.nn.ModuleDict({"a\x1b[31m": torch.nn.Linear(1, 1)})
    foreign = hostile.table(("w", hostile.tensor()), ("o", b"ca\x1b[31m\x07\nb\xc2\x9b2J\n)R"))
    return {
        "names in a safetensors file": ("safetensors", hostile.save(names, metadata={ESCAPES: ESCAPES})),
        "names in a zip file": ("zip", hostile.by_torch(settings, True)),
        "names in an older file": ("legacy", hostile.by_torch(settings, False)),
        "a class": ("zip", hostile.torch_zip(foreign)),
        "the zip file's folder": ("zip", hostile.torch_zip(one, root="\x1b[31mm\u202e")),
        "a module": ("zip", hostile.by_torch({ESCAPES: linear}, True)),
    }


ESCAPED = escaped_files()


@pytest.mark.parametrize("case", ESCAPED)
@pytest.mark.parametrize("word", WORDS)
def test_no_escape_sequence_reaches_the_terminal(word, case, write, config):
    form, data = ESCAPED[case]
    path = write(form, data)
    for ran in (
        gptcli(*WORDS[word](path, config), columns=80, NO_COLOR="1"),
        gptcli(*WORDS[word](path, config), "--full", encoding="ascii"),
    ):
        harmless(ran)
        assert ran.status in ((0, 1, 2) if word.startswith("inspect") else (2,)), ran


# Time and memory, in processes of their own

PEAK = """
import resource
from pathlib import Path
def megabytes():
    try:  # the other number begins with what the process had that started this one
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
"""
READ = f"""
import json, sys, time
{PEAK}
from gptcli.checkpoint.pickles import listed
from gptcli.checkpoint.safetensors import read_header
from gptcli.errors import GptcliError
path = Path(sys.argv[1])
begun, said = time.process_time(), ""
try:
    (read_header if path.suffix == ".safetensors" else listed)(path)
except GptcliError as error:
    said = error.message
print(json.dumps([said, time.process_time() - begun, megabytes()]))
"""
COMMAND = f"""
import json, sys
{PEAK}
from gptcli.cli.main import main
sys.argv = ["gptcli", *sys.argv[1:]]
print(json.dumps([main(), megabytes()]))
"""


def alone(script: str, *words: object) -> list:
    """What a script prints last, in a process of its own."""
    words = [sys.executable, "-c", script, *map(str, words)]
    ran = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0 and "Traceback" not in ran.stderr, ran
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.mark.parametrize("case", ENORMOUS)
def test_large_files_take_neither_time_nor_memory(case, write):
    form, make = ENORMOUS[case]
    path = write(form, make())
    said, seconds, megabytes = alone(READ, path)
    path.unlink()
    assert said.isprintable() and len(said) < len(str(path)) + 400
    assert seconds < 2 and megabytes < 300, (said, seconds, megabytes)


@pytest.mark.parametrize("case", ["a header of 59,000 tensors", "tensors under long names", "older tables"])
def test_commands_on_large_files_take_no_memory_either(case, write, config):
    form, make = ENORMOUS[case]
    path = write(form, make())
    for word in ("inspect -q", "params"):
        status, megabytes = alone(COMMAND, *WORDS[word](path, config))
        assert status in (0, 1, 2) and megabytes < 300, (word, status, megabytes)
    path.unlink()


SAMPLE = [
    ("safetensors", "a Git LFS pointer", "inspect -q"), ("safetensors", "offsets at 2^63", "params"),
    ("zip", "a bomb of 100 MB", "inspect -q"), ("zip", "a way out", "params"), ("zip", "calls in calls", "inspect -q"),
    ("legacy", "data cut short", "inspect -q"), ("legacy", "a key of escapes twice", "params"),
]  # fmt: skip


@pytest.mark.parametrize("form, case, word", SAMPLE, ids=[case for _, case, _ in SAMPLE])
def test_a_sample_in_processes_of_their_own(form, case, word, write, config):
    is_refused(process(*WORDS[word](write(form, FAULTS[form][case][0]), config)), word)
