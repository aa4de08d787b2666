"""The commands: each parses, calls one function, and shows the report that comes back."""

from collections.abc import Callable
from importlib import import_module
from typing import Annotated, Literal

import typer

from gptcli.cli.edits import EditOptions, asked
from gptcli.cli.options import (
    ModelOptions,
    OutputOptions,
    Repeat,
    RunOptions,
    Source,
    Text,
    TextOptions,
    came_from,
    command,
    say,
)
from gptcli.cli.parallel import Parallel, join
from gptcli.cli.text import read_ids, run_of
from gptcli.errors import GptcliError


def __getattr__(name: str) -> Callable:
    """A command in a file of its own, which is read when the command is called."""
    if name in ("bench", "diff", "heads", "lens", "trace"):
        return getattr(import_module(f"gptcli.cli.{name}"), name)
    raise AttributeError(name)


Words = Annotated[
    list[str] | None, typer.Option("--token", metavar="WORD", help="Add a row for this token (repeatable).")
]


@command
def forward(
    given: ModelOptions,
    how: RunOptions,
    read: TextOptions,
    out: OutputOptions,
    edit: EditOptions,
    text: Text = None,
    k: Annotated[int, typer.Option("--top-k", "-k", metavar="N", min=1, help="Next tokens to list.")] = 5,
    token: Words = None,
    stages: Annotated[bool, typer.Option("--stages", help="Open every layer's inner stages.")] = False,
    repeat: Repeat = 1,
    parallel: Parallel = None,
) -> None:
    """Run a forward pass: the shapes on the way, and the next token.

    gptcli forward "Cats sit on"

    gptcli forward -m ./gpt2 "The cat sat on the" -o logits.safetensors
    """
    from gptcli.report.forward import forward_report

    if stages and parallel:
        raise GptcliError("--stages and --parallel", "each rank sees its own heads: leave one out", "parallel")
    group = join(parallel, how, read, text)
    out.check(".safetensors", ".npy")
    model = given.open(example=read.example)
    fed = read_ids(model, text, read)
    run = run_of(model, how, fed, repeat, group, once=True)
    edit.make(run)
    report, logits = forward_report(run, k, asked(model, token), stages)
    for path in out.output or ():
        if path.suffix != ".json":
            from gptcli.render.files import write_logits

            write_logits(path, logits, run.inputs("all").ids)
    out.show(report, run.notes, run.seconds, fed.count)


@command
def topk(
    given: ModelOptions,
    how: RunOptions,
    read: TextOptions,
    out: OutputOptions,
    edit: EditOptions,
    text: Text = None,
    k: Annotated[int, typer.Option("--top-k", "-k", metavar="N", min=1, help="How many.")] = 10,
    token: Words = None,
    position: Annotated[
        str, typer.Option(metavar="POSITION", help="After this position, from 0; -1 is the last; all; mask.")
    ] = "-1",
    temperature: Annotated[float, typer.Option(metavar="T", help="Divides the logits before the softmax.")] = 1.0,
    repeat: Repeat = 1,
    parallel: Parallel = None,
) -> None:
    """Rank the next tokens.

    gptcli topk "Cats sit on" --token chairs

    gptcli topk -m ./gpt2 -k 3 --position all "The cat sat on the"
    """
    from gptcli.report.topk import topk_report

    group = join(parallel, how, read, text)
    out.check()
    model = given.open(example=read.example)
    fed = read_ids(model, text, read)
    run = run_of(model, how, fed, repeat, group, once=True)
    edit.make(run)
    if model.fills and came_from("position", "DEFAULT"):
        position = "mask"
    report = topk_report(run, k, asked(model, token), position, temperature)
    out.show(report, run.notes, run.seconds, fed.count)


@command
def score(
    given: ModelOptions,
    how: RunOptions,
    read: TextOptions,
    out: OutputOptions,
    edit: EditOptions,
    text: Text = None,
    repeat: Repeat = 1,
    parallel: Parallel = None,
) -> None:
    """Score a text's own tokens: log-probability, rank, surprisal, perplexity.

    gptcli score "Cats sit on mats"
    """
    from gptcli.report.score import score_report

    group = join(parallel, how, read, text)
    out.check()
    model = given.open(example=read.example)
    fed = read_ids(model, text, read)
    run = run_of(model, how, fed, repeat, group)
    edit.make(run)
    out.show(score_report(run), run.notes, run.seconds, fed.count)


@command
def params(
    given: ModelOptions,
    out: OutputOptions,
    models: Annotated[
        list[str] | None, typer.Argument(metavar="[MODEL]...", help="As for --model; several stand side by side.")
    ] = None,
    by: Annotated[Literal["component", "layer", "tensor"], typer.Option(help="What a row is.")] = "component",
    dtype: Annotated[
        str, typer.Option(metavar="TYPE", help="The type whose bytes are shown; auto is as stored.")
    ] = "auto",
    card: Annotated[
        str | None, typer.Option(metavar="SIZE", help="A model card's number, such as 117M: which count gives it?")
    ] = None,
    seq_len: Annotated[
        int | None, typer.Option(metavar="T", min=1, help="Costs of texts of T tokens.", rich_help_panel="Costs")
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(metavar="B", min=1, max=10**9, help="So many texts (1).", rich_help_panel="Costs"),
    ] = None,
    source_len: Annotated[
        int | None,
        typer.Option(metavar="S", min=1, help="Tokens that an encoder reads (T).", rich_help_panel="Costs"),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="24GiB: the longest T that fits.", rich_help_panel="Costs"),
    ] = None,
    devices: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=2, max=4096, help="What each of N ranks holds and sends.", rich_help_panel="Costs"
        ),
    ] = None,
) -> None:
    """Count parameters and bytes; what a run costs; models side by side.

    gptcli params gpt2-small --seq-len 1024

    gptcli params --config llama3-8b --by tensor --dtype bf16

    gptcli params gpt2-small llama3-8b

    gptcli params llama3.1-405b --devices 8 --seq-len 8192 --memory 141GiB
    """
    from gptcli.report.params import params_report

    out.check()
    workload = _workload(seq_len, batch, source_len, memory, devices)
    names = models or [None]
    if len(names) > 1 and given.config is not None:
        raise GptcliError(f"-c {given.config}: several models are named", "-c describes one", "usage")
    if len(names) > 1 and devices is not None:
        raise GptcliError(f"--devices {devices}: several models are named", "name one", "usage")
    opened = [given.open(name, config_only=True) for name in names]
    reports = [params_report(model, by, dtype, out.full, workload, card) for model in opened]
    if len(reports) == 1:
        out.show(reports[0], opened[0].notes)
        return
    from gptcli.report.side import side_by_side

    notes = [f"{model.shown}: {note}" for model in opened for note in model.notes]
    out.show(side_by_side(opened, reports, by, out.full), notes)


def _workload(tokens: int | None, batch: int | None, source: int | None, memory: str | None, devices: int | None):
    """The run whose costs are asked for, if any are."""
    if devices is not None and tokens is None:
        raise GptcliError(f"--devices {devices}: of which run?", "give --seq-len T", "usage")
    if tokens is None and memory is None:
        option = "--batch" if batch is not None else "--source-len" if source is not None else ""
        if option:
            raise GptcliError(f"{option}: of which run?", "give --seq-len T, or --memory SIZE", "usage")
        return None
    from gptcli.count import in_bytes
    from gptcli.report.costs import Workload

    room = None if memory is None else in_bytes(memory)
    return Workload(tokens=tokens, batch=batch or 1, source_tokens=source, memory=room, devices=devices)


@command
def inspect(
    given: ModelOptions,
    out: OutputOptions,
    paths: Annotated[
        list[str] | None, typer.Argument(metavar="[PATH]...", help="Directories, files, samples, names on the Hub.")
    ] = None,
    tensors: Annotated[bool, typer.Option("--tensors", help="A row a tensor.", rich_help_panel="Tensors")] = False,
    fits: Annotated[
        str | None,
        typer.Option("--filter", metavar="GLOB", help="Tensors of either such name.", rich_help_panel="Tensors"),
    ] = None,
    where: Annotated[
        bool, typer.Option("--where", help="A row a tensor, with file and byte.", rich_help_panel="Tensors")
    ] = False,
    stats: Annotated[
        bool, typer.Option("--stats", help="Read every tensor: statistics, NaN, Inf.", rich_help_panel="Read all")
    ] = False,
    spectral: Annotated[
        bool, typer.Option("--spectral", help="With --stats: spectral norms, estimated.", rich_help_panel="Read all")
    ] = False,
    digests: Annotated[
        bool, typer.Option("--hash", help="Digests of the tensors and of the model.", rich_help_panel="Read all")
    ] = False,
) -> None:
    """Say what a checkpoint is, whether it is whole, and what is in it.

    gptcli inspect tiny-gpt2

    gptcli inspect -q ./gpt2 ./run/ckpt.pt

    gptcli inspect tiny-gpt2 --stats --filter "*.attn.*"
    """
    from gptcli.render.progress import progress
    from gptcli.report.inspect import Wanted, inspect_report
    from gptcli.source import locate

    out.check()
    sources = paths or [given.model] if paths or given.model else []
    if not sources:
        raise GptcliError("nothing to inspect", "give a checkpoint's directory or file")
    if spectral and not stats:
        raise GptcliError("--spectral without --stats", "add --stats")
    if paths and given.model and not came_from("model", "ENVIRONMENT"):
        raise GptcliError(f"{paths[0]} and -m {given.model}", "name all of them without -m")
    wanted = Wanted(tensors or out.full, where, fits, stats, spectral, digests, progress)
    report = inspect_report(
        sources, lambda source: locate(source, given.revision, given.offline), given.config, wanted, given.strict
    )
    for one in report.unopened if out.json else ():
        say(f"gptcli: {one.message}; {one.hint}")
    out.show(report)


@command
def tokens(
    given: ModelOptions,
    read: TextOptions,
    out: OutputOptions,
    text: Text = None,
    decode: Annotated[bool, typer.Option("--decode", help="Print the text that the ids stand for.")] = False,
) -> None:
    """Turn a text into ids, and ids into text.

    gptcli tokens -m ./gpt2 "The cat sat on the"

    gptcli tokens --ids 12,45,78
    """
    from gptcli.report.listing import tokens_report

    out.check()
    model = given.open(example=read.example)
    fed = read_ids(model, text, read, alone=True)
    out.show(tokens_report(run_of(model, RunOptions(), fed), decode), model.notes)


@command
def config(given: ModelOptions, out: OutputOptions, source: Source = None) -> None:
    """Print a model's config as YAML, to edit.

    gptcli config cats > mine.yaml && gptcli forward -c mine.yaml
    """
    from gptcli.report.listing import config_report

    out.check()
    model = given.open(source, configs_first=True)
    out.show(config_report(model), model.notes)


@command
def list_(out: OutputOptions) -> None:
    """List the configs and samples that ship.

    gptcli list
    """
    from gptcli.report.listing import list_report

    out.check()
    out.show(list_report())


@command
def generate(words: Annotated[list[str] | None, typer.Argument()] = None) -> None:
    """Not what gptcli does."""
    raise GptcliError("gptcli does not generate text", "`gptcli topk TEXT` ranks the next tokens")


@command
def draw(
    given: ModelOptions,
    out: OutputOptions,
    source: Source = None,
    other: Annotated[str | None, typer.Argument(metavar="[OTHER]", help="A second model, to compare with.")] = None,
) -> None:
    """Draw a model's structure from its config: boxes, shapes, parameters, the residual path.

    gptcli draw gpt2-small

    gptcli draw gpt2-small llama3-8b

    gptcli draw bert-base -o bert.svg --force
    """
    from gptcli.report.draw import draw_report

    out.check(".svg", ".mmd")
    models = [given.open(source, config_only=True)]
    if other is not None:
        models.append(given.open(other, config_only=True))
    report = draw_report(models, out.full)
    for path in out.output or ():
        if path.suffix == ".svg":
            from gptcli.render.svg import write_svg

            write_svg(path, report)
        elif path.suffix == ".mmd":
            from gptcli.render.mermaid import write_mermaid

            write_mermaid(path, report)
    out.show(report, [note for model in models for note in model.notes])
