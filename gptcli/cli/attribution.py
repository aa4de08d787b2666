"""`trace --attribute`: its options, and what they come to."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from gptcli.cli.options import came_from
from gptcli.errors import GptcliError

if TYPE_CHECKING:
    from gptcli.report.attribution import AttributionReport
    from gptcli.run import Run


@dataclass
class AttributionOptions:
    """Which logits are split, and how many parts of each are shown."""

    attribute: Annotated[
        list[str] | None,
        typer.Option(
            "--attribute", metavar="TOKEN", rich_help_panel="Attribution",
            help="Split this token's logit over heads, MLPs, embedding, biases (repeatable).",
        ),
    ] = None  # fmt: skip
    top: Annotated[
        int,
        typer.Option(
            "--top", metavar="N", min=1, help="Largest parts to show; --full shows all.", rich_help_panel="Attribution"
        ),
    ] = 12

    def check(self, beside: list[str]) -> None:
        """Refuses options that only an attribution has without one, and what stands in its way.

        beside: options given that say what else to show. Raises GptcliError.
        """
        if self.attribute and beside:
            raise GptcliError(f"--attribute and {beside[0]}", "each says what to show: give one")
        if not self.attribute and came_from("top", "COMMANDLINE"):
            raise GptcliError("--top without --attribute", "--attribute TOKEN splits a logit")

    def report(self, run: "Run", position: str) -> "AttributionReport":
        """The tokens' logits at the position, split."""
        from gptcli.report.attribution import attribution_report

        if run.model.fills and came_from("position", "DEFAULT"):
            position = "mask"
        return attribution_report(run, self.attribute or [], position, self.top)
