"""`heads`: what every head does."""

from typing import Annotated, Literal

import typer

from gptcli.cli.edits import EditOptions
from gptcli.cli.options import ModelOptions, OutputOptions, RunOptions, Text, TextOptions, command
from gptcli.cli.text import Fed, read_ids, run_of
from gptcli.errors import GptcliError


@command
def heads(
    given: ModelOptions,
    how: RunOptions,
    read: TextOptions,
    out: OutputOptions,
    edit: EditOptions,
    text: Text = None,
    by: Annotated[
        Literal["previous", "first", "self", "entropy", "induction", "distance"],
        typer.Option(help="What ranks them: see above."),
    ] = "previous",
    top: Annotated[int, typer.Option("--top", metavar="N", min=1, help="How many to show.")] = 10,
    repeat: Annotated[
        int | None,
        typer.Option("--repeat", metavar="N", min=2, help="N random tokens, drawn by --seed, twice; no text."),
    ] = None,
    attention: Annotated[
        Literal["self", "encoder"], typer.Option(help="A text's own; the source's own in an encoder.")
    ] = "self",
) -> None:
    """Rank every head of every layer by what it does with a text.

    previous, first, self: mean weight on the token before, on token 0, on itself.

    induction: mean weight on what followed the latest earlier occurrence of the token.

    entropy: of the weights, as a share of what it could be for the keys seen. distance: mean, in positions.

    Means over the queries that see two keys or more.

    gptcli heads -m ./gpt2 "The cat sat on the mat because it was tired"

    gptcli heads -m ./gpt2 --repeat 32 --by induction
    """
    from gptcli.report.heads import heads_report, random_twice

    out.check()
    if repeat is not None:
        said = [("a text", text), ("--ids", read.ids), ("--source", read.source), ("--source-ids", read.source_ids)]
        said += [("--batch", read.batch), ("--chat", read.chat), ("--segments", read.segments)]
        for name, value in said:
            if value:
                raise GptcliError(f"--repeat and {name}", "--repeat draws its own text: give one of them")
    model = given.open(example=read.example)
    if repeat is None:
        fed = read_ids(model, text, read)
    else:
        from gptcli.tokens import Rule

        drawn = random_twice(model, repeat, given.seed, Rule(bos=read.bos))
        fed = Fed([drawn.ids], [drawn.added])
    run = run_of(model, how, fed)
    edit.make(run, attending=attention)
    report = heads_report(run, by, top, attention, repeat, None if repeat is None else given.seed)
    out.show(report, run.notes, run.seconds, fed.count)
