"""`trace -o x.safetensors`, `--from`, `--names`, `--max-memory`: options of traces as files, and what they come to."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from gptcli.cli.options import OutputOptions, came_from, say
from gptcli.errors import GptcliError

if TYPE_CHECKING:
    from gptcli.names import Names
    from gptcli.report import Report
    from gptcli.report.capture import CaptureReport, Replay
    from gptcli.report.room import Room
    from gptcli.report.trace import Attending
    from gptcli.run import Run

SUFFIXES = (".safetensors", ".npy")
PAGE = ".html"
# What a file has said already: the options of a run, and how a person gives them.
OF_A_RUN = {
    name: f"--{name.replace('_', '-')}"
    for name in (
        *("seed", "revision", "offline", "strict", "device", "dtype", "threads", "ids", "batch", "bos", "special"),
        *("source", "source_ids", "segments", "chat", "ablate", "patch"),
    )
} | {"model": "-m", "config": "-c", "text": "a text", "set_": "--set"}


@dataclass
class FileOptions:
    """Traces as files."""

    from_: Annotated[
        Path | None,
        typer.Option("--from", metavar="FILE", rich_help_panel="File", help="Show a trace that -o has written."),
    ] = None
    names: Annotated[
        Literal["ours", "transformerlens", "huggingface"],
        typer.Option(
            metavar="WHOSE", rich_help_panel="File",
            help="Names of activations, printed and understood: ours, transformerlens, huggingface.",
        ),
    ] = "ours"  # fmt: skip
    max_memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE", rich_help_panel="File",
            help="Refuse to hold more: 2GiB, 500MB; by default a quarter of what is free.",
        ),
    ] = None  # fmt: skip

    def check(self, speaks: bool) -> None:
        """Refuses a vocabulary where no activation is named. Raises GptcliError."""
        if self.names != "ours" and not speaks:
            raise GptcliError(f"--names {self.names} without --list, --at, -o or an edit", "say what it should name")

    def pages(self, out: OutputOptions) -> list[Path]:
        """The pages to write."""
        return [path for path in out.output or () if path.suffix == PAGE]

    def check_page(self, out: OutputOptions, beside: list[str]) -> None:
        """Refuses a page beside options that show no head. Raises GptcliError."""
        if self.pages(out) and beside:
            raise GptcliError(f"-o {self.pages(out)[0]} and {beside[0]}", "a page shows heads: leave one out", "output")

    def page(
        self, out: OutputOptions, run: "Run", layers: list[int], heads: list[int], position: str, attending: "Attending"
    ) -> "Callable[[Report], None]":
        """Plans the pages that are asked for; what is returned writes them, given the report that is shown.

        Raises GptcliError before anything runs where memory or the file don't hold a page.
        """
        files = self.pages(out)
        if not files:
            return lambda report: None
        from gptcli.render.page import write_page
        from gptcli.report.page import page_report
        from gptcli.report.page_plan import plan_of
        from gptcli.report.trace import TraceReport

        plan = plan_of(run, layers, heads, position, attending, self.room(out, run))

        def write(report: "Report") -> None:
            page = page_report(run, plan, report if isinstance(report, TraceReport) else None)
            for file in files:
                write_page(file, page)

        return write

    def replay(self, out: OutputOptions) -> "Replay":
        """The run that the file holds. Raises GptcliError for an option that says what to run instead."""
        from gptcli.report.capture import Replay

        for name, said in OF_A_RUN.items():
            if came_from(name, "COMMANDLINE"):
                raise GptcliError(f"--from and {said}", "the file says what ran: leave one out")
        written = self.outputs(out)
        if written:
            raise GptcliError(f"--from and -o {written[0]}", "the activations are in a file already")
        return Replay(self.from_)

    def outputs(self, out: OutputOptions) -> list[Path]:
        """The files of activations to write."""
        return [path for path in out.output or () if path.suffix in SUFFIXES]

    def room(self, out: OutputOptions, run: "Run") -> "Room":
        """What may be held of that run."""
        from gptcli.cost import most
        from gptcli.report.capture import size_of
        from gptcli.report.room import Room

        as_json = out.json or any(path.suffix == ".json" for path in out.output or ())
        return Room(size_of(run), most(self.max_memory), self.max_memory is not None, as_json)

    def layer(self, run: "Run", layer: str, attending: "Attending") -> str:
        """The layer that is meant; of a trace's file, where none is named, the first that it holds whole."""
        if not run.replayed or came_from("layer", "COMMANDLINE"):
            return layer
        whole = run.whole_layers("encoder." if attending == "encoder" else "")
        return f"L{whole[0]}" if whole else layer

    def one(self, out: OutputOptions, run: "Run", at: list[str], names: "Names") -> str:
        """The one activation that is to be shown. Raises GptcliError for several, and for one that is too large."""
        paths = [path for wanted in at for path in names.select("--at", wanted) if run.holds(path)]
        if len(paths) > 1:
            said = " ".join(f"--at {wanted}" for wanted in at)
            raise GptcliError(f"{said}: {len(paths)} activations", "one is shown; -o FILE.safetensors takes several")
        if not paths:
            raise GptcliError(f"--at {at[0]}: {self.from_} holds no such activation", "--list says what it holds")
        self.room(out, run).activation(paths[0])
        return paths[0]

    def write(
        self, out: OutputOptions, run: "Run", at: list[str], layers: list[int], attending: "Attending", names: "Names"
    ) -> "CaptureReport":
        """Writes the activations that --at chooses, or everything of the layers that are walked through.

        Raises GptcliError before anything runs where memory or disk don't hold it.
        """
        from gptcli.render.capture import check_room, write_activations
        from gptcli.report.capture import capture_report, chosen

        paths = chosen(run, names, at, layers, attending)
        files = self.outputs(out)
        for file in files:
            check_room(file, self.room(out, run), paths)
        found = [write_activations(file, run, paths) for file in files]
        return capture_report(run, paths, names, files[0], found[0])

    def told(self, report: "CaptureReport") -> None:
        """A line of what was written, where the report that is shown is another one."""
        from gptcli.render.capture import summary

        say(summary(report))
