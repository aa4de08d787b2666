"""`diff`: two sides of one computation, where they part, and whether it is a bug or rounding."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from gptcli.cli.options import OutputOptions, RunOptions, TextOptions, came_from, command
from gptcli.cli.text import parse_ids, read_ids, read_texts, refuse_a_model
from gptcli.count import dtype_name
from gptcli.errors import GptcliError

if TYPE_CHECKING:
    from gptcli.diff.sides import Side
    from gptcli.report.diff_weights import WeightsDiffReport
    from gptcli.source import Model

Words = Annotated[
    list[str],
    typer.Argument(metavar="A B [TEXT]...", help="Two sides; then words, joined by spaces."),
]


@dataclass
class OpeningOptions:
    """How models are opened."""

    seed: Annotated[int, typer.Option(metavar="N", help="Seed of random weights.", min=0, rich_help_panel="Model")] = 0
    offline: Annotated[bool, typer.Option("--offline", help="Never touch the network.", rich_help_panel="Model")] = (
        False
    )
    strict: Annotated[
        bool, typer.Option("--strict", help="Refuse a config with unknown keys.", rich_help_panel="Model")
    ] = False

    def open(self, name: str) -> "Model":
        from gptcli.source import open_model

        return open_model(name, seed=self.seed, offline=self.offline, strict=self.strict)


@command
def diff(
    words: Words,
    opening: OpeningOptions,
    how: RunOptions,
    read: TextOptions,
    out: OutputOptions,
    dtype_b: Annotated[str | None, typer.Option(metavar="TYPE", help="B's type, where it is another.")] = None,
    reference: Annotated[
        Literal["transformers"] | None, typer.Option(help="B is A, run by that library; only A is named.")
    ] = None,
    map_: Annotated[
        Path | None, typer.Option("--map", metavar="FILE", help="Dumps: their names and ours, one pair a line.")
    ] = None,
    at: Annotated[
        list[str] | None, typer.Option("--at", metavar="PATH", help="Compare these activations only; a pattern.")
    ] = None,
    atol: Annotated[
        float | None, typer.Option(metavar="X", min=0, help="Agreement is |A-B| <= atol + rtol·|A|.")
    ] = None,
    rtol: Annotated[float | None, typer.Option(metavar="X", min=0, help="The same, beside the numbers' size.")] = None,
    weights: Annotated[bool, typer.Option("--weights", help="Compare the weights; run nothing.")] = False,
) -> None:
    """Find where two models part, and whether it is a bug or rounding.

    A side is a model, a trace that `trace -o` has written, or your own arrays (.npy, .npz, .safetensors, .pt).

    Exit status 0: identical, or equal within rounding; 1: they part; 2: they can't be compared.

    gptcli diff tiny-gpt2 tiny-gpt2 "The cat sat" --dtype-b bf16

    gptcli diff ./gpt2 ./gpt2.gguf "The cat sat on the mat"

    gptcli diff ./gpt2 ./my-dumps --ids 464,3797,3332

    gptcli diff ./gpt2 --reference transformers "The cat sat"

    gptcli diff ./gpt2 ./gpt2-tuned --weights
    """
    from gptcli.diff.rounding import Constants
    from gptcli.diff.sides import Request, open_side, pair
    from gptcli.report.diff import diff_report

    out.check()
    named = 1 if reference else 2
    if len(words) < named:
        raise GptcliError("one side", "name two: gptcli diff A B, or A and --reference transformers")
    sides, text = [open_side(word, opening.open) for word in words[:named]], words[named:]
    if reference:
        sides *= 2
    if weights:
        out.show(_weights(*sides, text))
        return
    if dtype_b is not None and sides[1].kind != "model":
        raise GptcliError(f"--dtype-b {dtype_b}: B is no model", "arrays have the type that they were written in")
    _check(text, reference, dtype_b, {"--atol": atol, "--rtol": rtol})
    if text == ["-"]:  # for both sides
        text = read_texts(text, read.batch)
    for option in ("ids", "source_ids", "segments"):
        if (said := getattr(read, option)) and said.startswith("@"):  # read once: it may be a pipe
            setattr(read, option, json.dumps(parse_ids(f"--{option.replace('_', '-')}", said)))
    given = bool(text or read.ids or read.source or read.source_ids)
    dtypes = how.dtype, how.dtype if dtype_b is None else dtype_b
    request = Request(
        lambda model: read_ids(model, text, read)._asdict(),
        given,
        dtypes,
        how.device,
        how.threads,
        map_,
        bool(reference),
    )
    a, b, told = pair(*sides, request)
    constants = None if atol is None and rtol is None else Constants(atol or 0.0, rtol or 0.0)
    report = diff_report(a, b, at or (), constants, told)
    notes = dict.fromkeys([*a.model.notes, *b.model.notes])
    out.show(report, list(notes))


def _check(text: list[str], reference: str | None, dtype_b: str | None, constants: dict[str, float | None]) -> None:
    """Refuses what this command's own options don't mean."""
    for option, value in constants.items():
        if value is not None and not math.isfinite(value):
            raise GptcliError(f"{option} {value}: no tolerance", "give a number from 0 on")
    try:
        dtype_name(dtype_b or "auto", "float32")
    except GptcliError as error:
        raise GptcliError(error.message.replace("--dtype", "--dtype-b"), error.hint, error.code) from None
    try:
        refuse_a_model(text[0] if text else "")
    except GptcliError as error:
        if "is a model" not in error.message:
            raise
        hint = "with --reference only A is named" if reference else "A and B are named before it"
        raise GptcliError(error.message, hint) from None


# What says how to run, and would be dropped where nothing is run.
OF_A_RUN = """
    at atol rtol batch bos chat device dtype dtype_b ids map_ reference segments source source_ids special threads
""".split()


def _weights(a: "Side", b: "Side", text: list[str]) -> "WeightsDiffReport":
    from gptcli.render.progress import progress
    from gptcli.report.diff_weights import weights_report

    said = [f"--{name.strip('_').replace('_', '-')}" for name in OF_A_RUN if came_from(name, "COMMANDLINE")]
    said += ["a text"] if text else [side.name for side in (a, b) if side.kind != "model"]
    if said:
        raise GptcliError(f"--weights beside {said[0]}", "it compares two models, and runs nothing")
    return weights_report(a.model, b.model, progress)
