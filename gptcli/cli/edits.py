"""`trace --ablate`, `--patch`, `--set`: their options, and what they come to."""

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from gptcli.cli.options import came_from
from gptcli.errors import GptcliError

if TYPE_CHECKING:
    from gptcli.names import Names
    from gptcli.report.edits import Edits, EditsReport, Request
    from gptcli.report.room import Room
    from gptcli.report.trace import Attending
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
    token: Annotated[
        list[str] | None,
        typer.Option("--token", metavar="WORD", rich_help_panel="Edit", help="Show what becomes of this token."),
    ] = None
    k: Annotated[
        int, typer.Option("--top-k", "-k", metavar="N", min=1, rich_help_panel="Edit", help="Next tokens to list.")
    ] = 5

    @property
    def given(self) -> list[str]:
        """The options that were given, as they are called."""
        return [f"--{kind}" for kind in KINDS if getattr(self, "set_" if kind == "set" else kind)]

    def check(self) -> None:
        """Refuses options that tell of edits where there are none. Raises GptcliError."""
        if self.given:
            return
        for name, said in (("ablate_with", "--ablate-with"), ("token", "--token"), ("k", "-k")):
            if came_from(name, "COMMANDLINE"):
                raise GptcliError(f"{said} without an edit", f"give one of {', '.join(f'--{k}' for k in KINDS)}")

    def edits(self, run: "Run", position: str | None, attending: "Attending", names: "Names") -> "Edits | None":
        """The edits of a run; None where there are none. Raises GptcliError."""
        from gptcli.report.edits import edits_of

        if not self.given:
            return None
        if self.ablate_with != "zero" and not self.ablate:
            raise GptcliError(f"--ablate-with {self.ablate_with} without --ablate", "name what to ablate")
        return edits_of(run, self.requests(), self.ablate_with, position, attending, names)

    def requests(self) -> "list[Request]":
        """The edits in the order in which they stand on the command line."""
        from gptcli.report.edits import Request

        left = {kind: list(getattr(self, "set_" if kind == "set" else kind) or ()) for kind in KINDS}
        found = []
        for word, following in zip(sys.argv, [*sys.argv[1:], ""]):
            option, sign, value = word.partition("=")
            kind, value = option.removeprefix("--"), value if sign else following
            if option.startswith("--") and left.get(kind, [])[:1] == [value]:
                found.append(Request(kind, left[kind].pop(0)))
        return found + [Request(kind, value) for kind, values in left.items() for value in values]

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

        room.edits()
        if of_walk:
            room.walks(*of_walk, position or "-1", attending)
        report = edits_report(run, self.k, asked(run.model, self.token), shown_positions(run, position))
        if of_walk:
            from gptcli.report.trace import trace_report

            walked = trace_report(run, *of_walk, position or "-1", attending)
            report.walks, report.proof = walked.walks, walked.proof
            report.findings = report.findings or walked.findings
        return report


def asked(model: "Model", words: list[str] | None) -> tuple[str, ...]:
    """The words given by --token, and the ones that the config presets."""
    preset = model.config.show if model.config else ()
    return (*preset, *(words or ()))
