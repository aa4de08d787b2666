"""`gptcli bench`."""

from typing import Annotated, Literal

import typer

from gptcli.cli.options import ModelOptions, OutputOptions, Repeat, RunOptions, Source, command


@command
def bench(
    given: ModelOptions,
    how: RunOptions,
    out: OutputOptions,
    source: Source = None,
    tokens: Annotated[
        int | None, typer.Option("--seq-len", metavar="T", min=1, help="Tokens of each text (128).")
    ] = None,
    batch: Annotated[int, typer.Option("--batch", metavar="B", min=1, max=10**6, help="So many texts.")] = 1,
    repeat: Repeat = 5,
    rows: Annotated[Literal["last", "all"], typer.Option("--logits", help="Of the last position, or of all.")] = "last",
) -> None:
    """Time a model on this machine: tokens a second, share of the matrix-product peak, memory, each stage.

    gptcli bench tiny-gpt2 --seq-len 64

    gptcli bench -m ./gpt2 --dtype bf16 --repeat 10 --json
    """
    from gptcli.report.bench import bench_report, bench_run

    out.check()
    model = given.open(source, configs_first=True)
    options = {"dtype_name": how.dtype, "device_name": how.device, "threads": how.threads, "stream": how.stream}
    out.show(bench_report(bench_run(model, tokens, batch, **options), rows, repeat), model.notes)
