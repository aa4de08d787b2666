"""`--parallel tensor`: this process is one of several that torchrun started, and only the first one prints."""

import os
import signal
import sys
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from gptcli.errors import GptcliError

if TYPE_CHECKING:
    from gptcli.cli.options import RunOptions, TextOptions
    from gptcli.model.parallel import Group

Parallel = Annotated[
    Literal["tensor"] | None,
    typer.Option(
        "--parallel", rich_help_panel="Run",
        help="As one of torchrun's processes: each holds its share of the weights. No GPU has run this.",
    ),
]  # fmt: skip


def join(parallel: str | None, how: "RunOptions", read: "TextOptions", text: list[str] | None) -> "Group | None":
    """The processes that run one model together, joined; None where this one runs it alone. Raises GptcliError.

    A process computes on the device of its own number, unless --device says cpu. torchrun ends all of them where one
    has gone: the first that notices has still time to say so.
    """
    if parallel is None:
        return None
    if "-" in (text or ()) or "/dev/" in f"{read.ids} {read.source_ids}":
        raise GptcliError("standard input and --parallel", "each process reads by itself: give --ids @FILE", "parallel")
    if how.stream == "on":
        raise GptcliError("--stream on and --parallel", "each rank keeps its share: leave --stream out", "parallel")
    from gptcli.model.device import choose_device
    from gptcli.model.parallel import Processes, lost, own_device

    def ended(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise lost(group, "torchrun ended this one")

    if how.device in ("auto", "cuda"):
        how.device = own_device(how.device)
    group = Processes(choose_device(how.device))
    signal.signal(signal.SIGTERM, ended)
    if group.rank > 0:
        sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: PTH123, SIM115 - open as long as the process
    return group
