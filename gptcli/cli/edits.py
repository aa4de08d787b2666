"""`--ablate`, `--patch`, `--set`: options of every command that runs a text, and what they come to."""

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from gptcli.cli.options import came_from
from gptcli.errors import GptcliError

if TYPE_CHECKING:
    from gptcli.names import Names
    from gptcli.report.edits import EditsReport, Request
    from gptcli.report.room import Room
    from gptcli.report.view import Attending
    from gptcli.run import Run
    from gptcli.source import Model

KINDS = ("ablate", "patch", "set")


@dataclass
class EditOptions:
    """What is changed on the way."""

    ablate: Annotated[
        list[str] | None,
        typer.Option(
            "--ablate", metavar="L0H1|PATH", rich_help_panel="Edit", help="Zeros for a head's z, or for activations."
        ),
    ] = None
    ablate_with: Annotated[
        Literal["zero", "mean"],
        typer.Option(help="What stands in: zeros, or the mean over positions.", rich_help_panel="Edit"),
    ] = "zero"
    patch: Annotated[
        list[str] | None,
        typer.Option(
            "--patch", metavar="FILE:PATH", rich_help_panel="Edit",
            help="The same from a file: a trace's, any .safetensors, .npy; FILE:L0H1 for a head.",
        ),
    ] = None  # fmt: skip
    set_: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="PATH[index]=value", rich_help_panel="Edit",
            help="layers.0.attn.pattern[0,3]=0: head 0, query 3, every key.",
        ),
    ] = None  # fmt: skip

    def values(self, kind: str) -> list[str]:
        """What was given for an option."""
        return list(getattr(self, "set_" if kind == "set" else kind) or ())

    @property
    def given(self) -> list[str]:
        """The options that were given, as they are called."""
        return [f"--{kind}" for kind in KINDS if self.values(kind)]

    def requests(self) -> "list[Request]":
        """The edits in the order in which they stand on the command line."""
        from gptcli.report.edits import Request

        left = {kind: self.values(kind) for kind in KINDS}
        found = []
        for word, following in zip(sys.argv, [*sys.argv[1:], ""]):
            option, sign, value = word.partition("=")
            kind, value = option.removeprefix("--"), value if sign else following
            if option.startswith("--") and left.get(kind, [])[:1] == [value]:
                found.append(Request(kind, left[kind].pop(0), self.ablate_with))
        return found + [Request(kind, value, self.ablate_with) for kind, values in left.items() for value in values]

    def check(self, *others: tuple[str, str]) -> None:
        """Refuses options that tell of edits where there are none: parameters, and how they are called.

        Raises GptcliError.
        """
        for name, said in (("ablate_with", "--ablate-with"), *others):
            if not self.given and came_from(name, "COMMANDLINE"):
                raise GptcliError(f"{said} without an edit", f"give one of {', '.join(f'--{k}' for k in KINDS)}")
        if self.ablate_with != "zero" and not self.ablate:
            raise GptcliError(f"--ablate-with {self.ablate_with} without --ablate", "name what to ablate")

    def make(
        self,
        run: "Run",
        position: str | None = None,
        attending: "Attending" = "self",
        names: "Names | None" = None,
    ) -> None:
        """Gives the run its edits, if there are any. Raises GptcliError."""
        from gptcli.report.edits import edits_of

        self.check()
        if self.given and run.group is not None:
            raise GptcliError(f"{self.given[0]} and --parallel", "an edit needs all heads in one process", "parallel")
        if self.given:
            run.edits = edits_of(run, self.requests(), position, attending, names)


@dataclass
class BesideOptions(EditOptions):
    """What is changed on the way, and what is shown of the run with and without."""

    token: Annotated[
        list[str] | None,
        typer.Option("--token", metavar="WORD", rich_help_panel="Edit", help="Show what becomes of this token."),
    ] = None
    k: Annotated[
        int, typer.Option("--top-k", "-k", metavar="N", min=1, rich_help_panel="Edit", help="Next tokens to list.")
    ] = 5

    def report(
        self,
        run: "Run",
        position: str | None,
        attending: "Attending",
        of_walk: tuple[list[int], list[int]] | None,
        room: "Room",
    ) -> "EditsReport":
        """The run beside its edited one, and walks through these layers' heads of the edited one."""
        from gptcli.report.edits import edits_report, shown_positions
        from gptcli.report.trace import trace_report

        room.edits()
        if of_walk:
            room.walks(*of_walk, position or "-1", attending)
        report = edits_report(run, self.k, asked(run.model, self.token), shown_positions(run, position))
        if of_walk:
            walked = trace_report(run, *of_walk, position or "-1", attending)
            report.walks, report.proof = walked.walks, walked.proof
            report.findings = report.findings or walked.findings
        return report


def asked(model: "Model", words: list[str] | None) -> tuple[str, ...]:
    """The words given by --token, and the ones that the config presets."""
    preset = model.config.show if model.config else ()
    return (*preset, *(words or ()))
