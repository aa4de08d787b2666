"""`lens`: what every layer would say if the model ended there."""

import re
from typing import Annotated

import typer

from gptcli.cli.edits import EditOptions, asked
from gptcli.cli.options import ModelOptions, OutputOptions, RunOptions, Text, TextOptions, came_from, command
from gptcli.cli.text import read_ids, run_of
from gptcli.errors import GptcliError


@command
def lens(
    given: ModelOptions,
    how: RunOptions,
    read: TextOptions,
    out: OutputOptions,
    edit: EditOptions,
    text: Text = None,
    position: Annotated[
        str | None,
        typer.Option(metavar="P|A:B", help="Open position P, from 0 (-1 is the last; mask); A:B is A to B-1; all."),
    ] = None,
    k: Annotated[int, typer.Option("--top-k", "-k", metavar="N", min=1, help="Tokens a layer, at one position.")] = 5,
    token: Annotated[
        list[str] | None,
        typer.Option("--token", metavar="WORD", help="This token's rank and probability, at one position."),
    ] = None,
) -> None:
    """Read every layer as the last one is read: the logit lens.

    gptcli lens "Cats sit on"

    gptcli lens -m ./gpt2 "The cat sat on the" --position -1 --token mat
    """
    from gptcli.report.lens import lens_report, position_report

    out.check()
    opened = position is not None and re.fullmatch(r"-?[0-9]+|mask", position) is not None
    for name, said in (("--token", token), ("-k", came_from("k", "COMMANDLINE"))):
        if said and not opened:
            beside = "without --position" if position is None else f"and --position {position}"
            raise GptcliError(f"{name} {beside}", "open one position: --position -1")
    model = given.open(example=read.example)
    fed = read_ids(model, text, read)
    run = run_of(model, how, fed)
    edit.make(run)
    if opened:
        report = position_report(run, position, k, asked(model, token))
    else:
        report = lens_report(run, position, out.full)
    out.show(report, run.notes, run.seconds, fed.count)
