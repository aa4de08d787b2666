"""`bench`: how fast a model runs on this machine, beside its matrix products alone, and where the time goes."""

from dataclasses import dataclass
from statistics import median

from gptcli import count
from gptcli.errors import GptcliError
from gptcli.memory import Rows
from gptcli.report import ModelFacts, Report
from gptcli.run import Run
from gptcli.source import Model

LENGTH = 128  # T, where none is given


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A stage of the pass, over all layers: seconds in one pass (mean), and its share of the pass."""

    name: str
    seconds: float
    share: float


@dataclass(kw_only=True)
class BenchReport(Report):
    """seconds: of each pass, after one that isn't counted; flops: of one pass, over the pairs that the mask lets
    through; flops_per_second: reached in the fastest pass; product_flops_per_second: of the fastest large matrix
    product in the same type; peak_bytes: the most that the process held.
    """

    schema = "gptcli.bench/1"
    model: ModelFacts
    tokens: int
    batch: int
    source_tokens: int | None
    rows: Rows
    threads: int
    seconds: list[float]
    least: float
    median: float
    tokens_per_second: float
    flops: int
    flops_per_second: float
    product_flops_per_second: float
    peak_bytes: int | None
    stages: list[Stage]


def bench_run(model: Model, tokens: int | None, batch: int, **how: object) -> Run:
    """A run over texts of evenly spread ids. tokens None: LENGTH, or the context if shorter. Raises GptcliError."""
    stacks = [stack for stack in (model.spec, model.spec.encoder) if stack is not None]
    reads = min(stack.most_tokens for stack in stacks)
    if tokens is not None and tokens > reads:
        raise GptcliError(f"--seq-len {tokens:,}: {model.shown} reads {reads:,}", "give a shorter one", "context")
    length = min(LENGTH, *(stack.context_length for stack in stacks)) if tokens is None else tokens

    def texts(spec) -> list[list[int]]:
        return [[(7919 * (text + 1) + 104729 * i) % spec.vocab_size for i in range(length)] for text in range(batch)]

    source = None if model.spec.encoder is None else texts(model.spec.encoder)
    return Run(model, texts(model.spec), source=source, **how)


def bench_report(run: Run, rows: Rows, repeat: int) -> BenchReport:
    """Times the run. Raises GptcliError as Run.forward does."""
    import torch

    from gptcli.model.clock import Clock, peak_bytes, product_rate, waiting

    run.forward(rows)
    seconds, wait = [], waiting(run.device)
    for _ in range(repeat):
        run.forward(rows)
        seconds.append(run.seconds)
    held = peak_bytes(run.device)
    spent: dict[str, float] = {}
    for _ in range(repeat):
        clock = Clock(wait)
        run.forward(rows, clock)
        spent = {stage: spent.get(stage, 0.0) + taken / repeat for stage, taken in clock.spent.items()}
    least, tokens = min(seconds), len(run.ids) * run.width
    flops = _flops(run, rows)
    return BenchReport(
        model=run.facts(),
        tokens=run.width,
        batch=len(run.ids),
        source_tokens=run.source_width or None,
        rows=rows,
        threads=torch.get_num_threads(),
        seconds=seconds,
        least=least,
        median=median(seconds),
        tokens_per_second=tokens / least,
        flops=flops,
        flops_per_second=flops / least,
        product_flops_per_second=product_rate(run.dtype, run.device, repeat),
        peak_bytes=held,
        stages=[
            Stage(name=name, seconds=taken, share=taken / sum(spent.values())) for name, taken in spent.items() if taken
        ],
    )


def _flops(run: Run, rows: Rows) -> int:
    spec, sizes = run.model.spec, (run.width, len(run.ids), True)
    if rows == "all":
        return count.flops_forward(spec, *sizes, source=run.source_width)
    return count.flops_forward(spec, *sizes, 1, run.source_width) - count.flops_spared(spec, *sizes, run.source_width)
