"""`trace`: the walk through a head, one activation, or the list of them all."""

from typing import Annotated, Literal

import typer

from gptcli.cli.options import ModelOptions, OutputOptions, RunOptions, Text, TextOptions, came_from, command
from gptcli.cli.text import read_ids, run_of
from gptcli.errors import GptcliError


@command
def trace(
    given: ModelOptions,
    how: RunOptions,
    read: TextOptions,
    out: OutputOptions,
    text: Text = None,
    layer: Annotated[str, typer.Option(metavar="LAYER", help="1 to N; L0 counts from 0; -1 is the last; all.")] = "1",
    head: Annotated[str, typer.Option(metavar="HEAD", help="0 to H-1; -1 is the last; all.")] = "0",
    position: Annotated[str, typer.Option(metavar="POSITION", help="The query, from 0; -1 is the last; all.")] = "-1",
    attention: Annotated[
        Literal["self", "cross", "encoder"],
        typer.Option(help="A text's own; across to the source; the source's own."),
    ] = "self",
    at: Annotated[
        str | None, typer.Option("--at", metavar="PATH|L0H0", help="One activation; or a head, both from 0.")
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="Every activation's name and shape.")] = False,
) -> None:
    """Show every number inside one head of one layer, and prove it.

    gptcli trace --layer 1 --head 0

    gptcli trace "Cats sit on" --at layers.0.attn.pattern
    """
    from gptcli.report import trace as walk

    out.check()
    of_head = walk.at_head(at) if at is not None else None
    # Beside --list or --at, what chooses a head's walk would be dropped without a word.
    chosen = [option for option, chosen in (("--list", list_), ("--at", at is not None)) if chosen]
    walks = ("layer", "head") if of_head else ("layer", "head", "position", "attention")
    chosen += [f"--{name}" for name in walks if chosen and came_from(name, "COMMANDLINE")]
    if len(chosen) > 1:
        raise GptcliError(f"{chosen[0]} and {chosen[1]}", "each says what to show: give one")
    model = given.open(example=read.example)
    fed = read_ids(model, text, read)
    run = run_of(model, how, fed)
    if list_:
        out.show(walk.points_report(run), model.notes)
        return
    if at is not None and not of_head:
        report = walk.activation_report(run, at)
    else:
        layer, head = of_head or (layer, head)
        stack = walk.stack_of(attention, model.spec)
        layers, heads = walk.layers_of(layer, stack), walk.heads_of(head, stack, attention)
        report = walk.trace_report(run, layers, heads, position, attention)
    out.show(report, model.notes, run.seconds, fed.count)
