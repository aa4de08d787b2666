"""`trace`: the walk through a head, one activation, or the list of them all."""

from typing import Annotated, Literal

import typer

from gptcli.cli.attribution import AttributionOptions
from gptcli.cli.capture import PAGE, SUFFIXES, FileOptions
from gptcli.cli.edits import BesideOptions
from gptcli.cli.maps import PICTURES, MapOptions
from gptcli.cli.options import ModelOptions, OutputOptions, RunOptions, Text, TextOptions, came_from, command
from gptcli.cli.text import read_ids, run_of
from gptcli.errors import GptcliError


@command
def trace(
    given: ModelOptions,
    how: RunOptions,
    read: TextOptions,
    out: OutputOptions,
    maps: MapOptions,
    split: AttributionOptions,
    edit: BesideOptions,
    files: FileOptions,
    text: Text = None,
    layer: Annotated[str, typer.Option(metavar="LAYER", help="1 to N; L0 counts from 0; -1 is the last; all.")] = "1",
    head: Annotated[str, typer.Option(metavar="HEAD", help="0 to H-1; -1 is the last; all.")] = "0",
    position: Annotated[str, typer.Option(metavar="POSITION", help="The query, from 0; -1 is the last; all.")] = "-1",
    attention: Annotated[
        Literal["self", "cross", "encoder"],
        typer.Option(help="A text's own; across to the source; the source's own."),
    ] = "self",
    at: Annotated[
        list[str] | None,
        typer.Option("--at", metavar="PATH|L0H0", help="One activation; a head, from 0; with -o, all to write."),
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="Every activation's name and shape.")] = False,
) -> None:
    """Show every number inside one head of one layer, and prove it.

    gptcli trace --layer 1 --head 0

    gptcli trace "Cats sit on" --at layers.0.attn.pattern

    gptcli trace --head all --map

    gptcli trace --attribute mats

    gptcli trace --ablate L0H1 --token chairs

    gptcli trace --at 'layers.*.resid_post' -o run.safetensors

    gptcli trace --layer 2 --head 1 -o heads.html
    """
    from gptcli.names import Names
    from gptcli.report.points import activation_report, points_report
    from gptcli.report.trace import trace_report
    from gptcli.report.view import at_head, heads_of, layers_of, stack_of

    out.check(*PICTURES, *SUFFIXES, PAGE)
    writes, at = bool(files.outputs(out)), at or []
    of_head = at_head(at[0]) if len(at) == 1 and not writes else None
    # Beside --list or --at, what chooses a head's walk would be dropped without a word.
    chosen = [option for option, chosen in (("--list", list_), ("--at", at)) if chosen]
    walks = ("layer", "head") if of_head else ("layer", "head", "position", "attention")
    # Of edits, the last two say where they are made.
    walks = walks[:2] if edit.given and not list_ else walks
    chosen += [f"--{name}" for name in walks if chosen and came_from(name, "COMMANDLINE")]
    chosen += ["-o"] if list_ and writes else []
    chosen += edit.given if list_ else []
    if len(chosen) > 1:
        raise GptcliError(f"{chosen[0]} and {chosen[1]}", "each says what to show: give one")
    elsewhere = [("--list", list_), ("--at", at and not of_head and not writes)]
    elsewhere += [("--position", came_from("position", "COMMANDLINE") and not edit.given)]
    maps.check(out, beside=[option for option, said in elsewhere if said])
    elsewhere = [("--list", list_), ("--at", at and not writes), ("--map", maps.map_), ("--from", files.from_)]
    elsewhere += [(f"--{name}", came_from(name, "COMMANDLINE")) for name in ("layer", "head", "attention")]
    split.check(beside=[*edit.given, *(option for option, said in elsewhere if said)])
    edit.check(("token", "--token"), ("k", "-k"))
    elsewhere = [("--list", list_), ("--at", at and not of_head), ("--attribute", split.attribute)]
    files.check_page(out, beside=[option for option, said in elsewhere if said])
    files.check(speaks=bool(list_ or at or writes or edit.given))
    if files.from_ is not None:
        run = files.replay(out)
        model, count = run.model, 0
    else:
        model = given.open(example=read.example)
        fed = read_ids(model, text, read)
        run, count = run_of(model, how, fed), fed.count
    names, where = Names(model, files.names), position if came_from("position", "COMMANDLINE") else None
    edit.make(run, where, attention, names)
    if list_:
        out.show(points_report(run, names), model.notes)
        return
    layers = heads = []
    if not at or of_head:
        layer = f"L{of_head[0]}" if of_head else files.layer(run, layer, attention)
        head = str(of_head[1]) if of_head else head
        stack = stack_of(attention, model.spec)
        layers, heads = layers_of(layer, stack), heads_of(head, stack, attention)
    report = files.write(out, run, at, layers, attention, names) if writes else None
    if at and not of_head:
        report = report or activation_report(run, files.one(out, run, at, names), names)
    else:
        if report is not None:
            files.told(report)
        write_page = files.page(out, run, layers, heads, position, attention)
        if split.attribute:
            report = split.report(run, position)
        elif maps.map_:
            report = maps.report(run, layers, heads, attention, out, files.room(out, run))
        elif edit.given:
            looked = of_head or any(came_from(name, "COMMANDLINE") for name in ("layer", "head"))
            report = edit.report(run, where, attention, (layers, heads) if looked else None, files.room(out, run))
        else:
            files.room(out, run).walks(layers, heads, position, attention)
            report = trace_report(run, layers, heads, position, attention)
        write_page(report)
    out.show(report, run.notes, run.seconds, count)
