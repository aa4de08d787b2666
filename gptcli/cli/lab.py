"""`gptcli lab`: a command an experiment. Only the one that is called is built."""

import math
from typing import Annotated, Any, Literal

import typer

from gptcli.cli.options import (
    ModelOptions,
    OutputOptions,
    RunOptions,
    TextOptions,
    came_from,
    command,
    typer_context,
)
from gptcli.cli.text import read_ids
from gptcli.errors import GptcliError
from gptcli.report.lab import EXPERIMENTS

Words = Annotated[list[str] | None, typer.Argument(metavar="[WORD]...", help="Words, parted by spaces.")]
Seed = Annotated[int, typer.Option(metavar="N", min=0, help="Of what is drawn at random.")]


def group(wanted: str | None, context: dict[str, Any]) -> typer.Typer:
    """The commands of the experiments: of the one that is wanted, or of all where none of them is named so.

    context: settings of each command.
    """
    app = typer.Typer(context_settings=context)
    app.callback(invoke_without_command=True)(lab())
    for name in (wanted,) if wanted in EXPERIMENTS else EXPERIMENTS:
        app.command(name, context_settings=context)(globals()[name]())
    return app


@command
def lab(out: OutputOptions) -> None:
    """Small experiments, run by the engine, with what they depend on open to change.

    gptcli lab

    gptcli lab order t0 t1 t2 --causal
    """
    called = typer_context().invoked_subcommand
    if called is not None:
        given = [f"--{name}" for name in vars(out) if came_from(name, "COMMANDLINE")]
        if given:
            raise GptcliError(f"{given[0]} before {called}", f"write it after: gptcli lab {called} {given[0]}")
        return
    from gptcli.report.lab import experiments_report

    out.check()
    out.show(experiments_report())


@command
def attention(
    given: ModelOptions,
    how: RunOptions,
    read: TextOptions,
    out: OutputOptions,
    text: Annotated[
        list[str] | None, typer.Argument(metavar="[TEXT]...", help="Words, joined by spaces; - reads standard input.")
    ] = None,
    layer: Annotated[str, typer.Option(metavar="LAYER", help="1 to N; L0 counts from 0; -1 is the last.")] = "1",
    head: Annotated[str, typer.Option(metavar="HEAD", help="0 to H-1; -1 is the last.")] = "0",
    both_ways: Annotated[bool, typer.Option("--both-ways", help="Without a mask: every token sees every one.")] = False,
) -> None:
    """Attention in six steps, each matrix shown, checked against the fused kernel.

    gptcli lab attention

    gptcli lab attention -c cats "on sit Cats" --both-ways
    """
    from gptcli.lab.attention import attention_report
    from gptcli.report.view import heads_of, layers_of
    from gptcli.run import Run

    out.check()
    model = given.open(example="attention-by-hand")
    if "all" in (layer, head):
        raise GptcliError("--layer or --head all", "the steps are of one head: name one layer and one head")
    fed = read_ids(model, text, read)
    marks = {"added": fed.added, "source": fed.source, "source_added": fed.source_added, "segments": fed.segments}
    run = Run(model, fed.ids, how.dtype, how.device, how.threads, how.stream, **marks)
    [of_layer], [of_head] = layers_of(layer, model.spec), heads_of(head, model.spec)
    out.show(attention_report(run, of_layer, of_head, both_ways), model.notes)


@command
def order(
    out: OutputOptions,
    text: Words = None,
    permutation: Annotated[
        str | None, typer.Option(metavar="0,1,…", help="Where each word stood; random. Else: the last one first.")
    ] = None,
    causal: Annotated[bool, typer.Option("--causal", help="A token sees itself and what stands before it.")] = False,
    position: Annotated[Literal["none", "rope", "learned"], typer.Option(help="How positions are told.")] = "none",
    seed: Seed = 0,
) -> None:
    """Permute a text: without mask and positions, the outputs are only permuted.

    gptcli lab order

    gptcli lab order the cat sat --permutation 1,0,2 --position rope
    """
    from gptcli.lab.order import order_report

    out.check()
    out.show(order_report(_words(text), permutation, seed, causal, position))


@command
def positions(
    out: OutputOptions,
    text: Words = None,
    degrees: Annotated[float, typer.Option(metavar="X", help="What each position turns a word by.")] = 30.0,
    shift: Annotated[int, typer.Option(metavar="N", min=0, max=2048, help="Places to move the text along.")] = 5,
) -> None:
    """Tell positions by a learned table and by rotation: cat, chase, dog, in any order.

    gptcli lab positions

    gptcli lab positions dog chase cat --degrees 45 --shift 1
    """
    from gptcli.lab.positions import positions_report

    out.check()
    out.show(positions_report(_words(text), degrees, shift))


@command
def scaling(
    out: OutputOptions,
    dim: Annotated[str, typer.Option(metavar="D,…", help="Sizes of vectors.")] = "4,16,64,128,256,1024",
    samples: Annotated[int, typer.Option(metavar="N", min=2, max=10**6, help="Pairs of vectors for each size.")] = 4000,
    scores: Annotated[str, typer.Option(metavar="S,…", help="Scores for the softmax.")] = "10,0",
    divide_dim: Annotated[int, typer.Option(metavar="D", min=1, max=10**9, help="Divide them by √D.")] = 128,
    seed: Seed = 0,
) -> None:
    """Divide scores by √d: how they spread, and what a softmax lets through.

    gptcli lab scaling

    gptcli lab scaling --dim 8,32 --scores 1,2,3 --divide-dim 64
    """
    from gptcli.lab.scaling import scaling_report

    out.check()
    sizes = _sizes("--dim", dim)
    out.show(scaling_report(sizes, samples, seed, _numbers("--scores", scores), divide_dim))


@command
def norms(
    out: OutputOptions,
    values: Annotated[str, typer.Option(metavar="X,…", help="The vector.")] = "1,2,3,4",
    eps: Annotated[float, typer.Option(metavar="X", help="Added before the root.")] = 1e-5,
    weight: Annotated[str, typer.Option(metavar="X,…", help="Scales; one number does for all.")] = "1",
    bias: Annotated[str, typer.Option(metavar="X,…", help="Shifts, after LayerNorm; likewise.")] = "0",
) -> None:
    """Take LayerNorm apart, RMSNorm beside it.

    gptcli lab norms

    gptcli lab norms --values 3,-1,4,-6 --weight 2 --bias 1,0,0,0
    """
    from gptcli.lab.norms import norms_report

    out.check()
    numbers = [_numbers(f"--{name}", said) for name, said in (("values", values), ("weight", weight), ("bias", bias))]
    out.show(norms_report(numbers[0], eps, *numbers[1:]))


@command
def residual(
    out: OutputOptions,
    layers: Annotated[int, typer.Option(metavar="N", min=1, max=1000, help="Layers.")] = 48,
    dim: Annotated[int, typer.Option(metavar="C", min=2, max=4096, help="Hidden size.")] = 64,
    heads: Annotated[int, typer.Option(metavar="H", min=1, max=4096, help="Heads.")] = 4,
    tokens: Annotated[int, typer.Option(metavar="T", min=1, max=2048, help="Tokens, each another.")] = 16,
    norm: Annotated[Literal["layernorm", "rmsnorm"], typer.Option(help="The norm.")] = "layernorm",
    placement: Annotated[str, typer.Option(metavar="P,…", help="Of pre, post, output, sandwich.")] = "pre,post",
    std: Annotated[float | None, typer.Option(metavar="X", help="Of the random matrices. [default: 1/√C]")] = None,
    seed: Seed = 0,
) -> None:
    """Follow the residual stream's size through a deep model, normed before or after its sublayers.

    gptcli lab residual

    gptcli lab residual --layers 12 --placement pre,post,sandwich --full
    """
    from gptcli.lab.residual import residual_report

    out.check()
    places, known = [place.strip() for place in placement.split(",")], ("pre", "post", "output", "sandwich")
    if not set(places) <= set(known) or len(set(places)) < len(places):
        raise GptcliError(f"--placement {placement}: not some of {', '.join(known)}, each once", "such as pre,post")
    out.show(residual_report(layers, dim, heads, tokens, norm, places, seed, std))


@command
def heads(
    given: ModelOptions,
    out: OutputOptions,
    source: Annotated[str | None, typer.Argument(metavar="[MODEL]", help="As for --model.")] = None,
    tokens: Annotated[
        int | None, typer.Option(metavar="T", min=1, help="Tokens. [default: 1024, or the whole context]")
    ] = None,
    source_tokens: Annotated[
        int | None, typer.Option(metavar="S", min=1, help="Of an encoder's text. [default: as many]")
    ] = None,
    dtype: Annotated[
        str, typer.Option(metavar="TYPE", help="The type whose bytes are counted; auto is as stored.")
    ] = "bf16",
) -> None:
    """Count what many heads cost, beside one head of the same width.

    gptcli lab heads

    gptcli lab heads llama3-8b --tokens 4096
    """
    from gptcli.lab.heads import heads_report

    out.check()
    if source is None and given.model is None and given.config is None:
        from gptcli.families.shown import HEADS

        given.config = HEADS
    model = given.open(source, config_only=True)
    out.show(heads_report(model, tokens, source_tokens, dtype), model.notes)


@command
def routes(
    out: OutputOptions,
    text: Words = None,
    source: Annotated[str | None, typer.Option(metavar="TEXT", help="What an encoder beside a decoder reads.")] = None,
    configs: Annotated[str | None, typer.Option(metavar="C,…", help="Configs, by name or file.")] = None,
) -> None:
    """Draw who may see whom in an encoder, in a decoder, and in both together.

    gptcli lab routes

    gptcli lab routes "I like tea" --source "j'aime cela" --configs gpt2-small,transformer-2017-big
    """
    from gptcli.lab.routes import routes_report

    out.check()
    names = [] if configs is None else [name.strip() for name in configs.split(",")]
    if not all(names):
        raise GptcliError(f"--configs {configs!r}: an empty name", "give names with commas between them")
    out.show(routes_report(_words(text), _words([source] if source is not None else None), names))


def _words(said: list[str] | None) -> list[str]:
    """Words parted by blanks; none where nothing was given. Raises GptcliError where only blanks were."""
    words = " ".join(said or ()).split()
    if said and not words:
        raise GptcliError("the text is empty", "give a word at least", "empty")
    return words


def _numbers(option: str, said: str) -> list[float]:
    try:
        found = [float(part) for part in said.split(",")]
    except ValueError:
        found = []
    if not found or not all(map(math.isfinite, found)):
        raise GptcliError(f"{option} {said}: not numbers with commas between them", "such as 1,2,3")
    return found


def _sizes(option: str, said: str) -> list[int]:
    found = _numbers(option, said)
    if not all(x == int(x) and 1 <= x <= 2**20 for x in found):
        raise GptcliError(f"{option} {said}: not whole numbers from 1 to {2**20:,}", "such as 4,16,64")
    return [int(x) for x in found]
