"""A trace's file: writing it whole or not at all, and the report of what it holds."""

from pathlib import Path

from gptcli.cost import Choice, arrayed, bytes_text, kept, refuse_full, streamed
from gptcli.errors import GptcliError
from gptcli.render.common import fed, title
from gptcli.render.files import write
from gptcli.render.screen import Screen
from gptcli.report import Finding
from gptcli.report.capture import CaptureReport, array, stream
from gptcli.report.room import Room
from gptcli.run import Run


def check_room(file: Path, room: Room, paths: list[str]) -> None:
    """Refuses, before anything runs, a file that memory or disk don't hold. Raises GptcliError."""
    wanted = set(paths)
    written, held = kept(room.size, wanted.__contains__), streamed(room.size, wanted.__contains__)
    if file.suffix == ".npy":
        if len(paths) > 1:
            raise GptcliError(f"-o {file}: one array, and {len(paths)} activations", "name one by --at", "output")
        room.refuse(Choice(f"-o {file}", arrayed(room.size, paths[0])), Choice("-o FILE.safetensors", held))
    else:
        room.refuse(Choice(f"-o {file}", held), otherwise="choose smaller ones by --at, or a shorter text")
    refuse_full(file, written)


def write_activations(file: Path, run: Run, paths: list[str]) -> list[Finding]:
    """Runs the model and writes the activations: `.safetensors` as they are born, `.npy` the one there is.

    Gives what the run found: where NaN was born.
    """
    found: list[Finding] = []

    def writer(draft: Path) -> None:
        if file.suffix == ".safetensors":
            found.extend(stream(run, paths, draft))
            return
        import numpy

        numbers, findings = array(run, paths[0])
        found.extend(findings)
        with draft.open("wb") as handle:
            numpy.save(handle, numbers)

    write(file, writer)
    return found


def draw(report: CaptureReport, screen: Screen) -> None:
    """Prints the report to the screen."""
    title(screen, report.model)
    fed(screen, report.tokens, report.source)
    rows = [
        [
            one.path,
            f"[{','.join(one.axes)}]",
            f"[{','.join(map(str, one.shape))}]",
            one.dtype,
            bytes_text(one.bytes),
            *([one.name] if one.name not in (None, one.path) else []),
        ]
        for one in report.activations
    ]
    screen.table(rows, ("activation", "shape", "", "type", "size"), right=(4,))
    screen.line(summary(report))


def summary(report: CaptureReport) -> str:
    """What was written where, and what writing it held."""
    count = len(report.activations)
    held = f"{bytes_text(report.held_bytes)} held at once"
    what = f"{count} activation{'s' * (count != 1)}"
    return f"{what} in {report.file}, {bytes_text(report.written_bytes)}, {held}"


def verdict(report: CaptureReport) -> str:
    """What `-q` prints."""
    return report.file
