"""Each report as a person reads it in a terminal."""

from functools import singledispatch
from itertools import groupby

from gptcli.render.screen import Screen, exact, short
from gptcli.report import ModelFacts, Report
from gptcli.report.forward import ForwardReport, Stage
from gptcli.report.listing import ConfigReport, ListReport, TokensReport
from gptcli.report.params import ParamsReport
from gptcli.report.score import ScoreReport
from gptcli.report.topk import Candidate, Next, TopkReport
from gptcli.report.trace import ActivationReport, KeyStep, PointsReport, Step, TraceReport, Walk
from gptcli.tokens import Token

BAR = 12  # columns of the longest bar


@singledispatch
def draw(report: Report, screen: Screen) -> None:
    """Prints a report to the screen."""
    raise TypeError(f"no rendering for {type(report).__name__}")


@singledispatch
def verdict(report: Report) -> str:
    """What `-q` prints of a report: the verdict or the values alone."""
    return report.status


def title(screen: Screen, model: ModelFacts) -> None:
    hand_written = ", hand-written weights" if model.weights == "hand-written" else ""
    said: list = [(model.name, "bold"), f" ({model.source}{hand_written})"]
    if model.seed is not None:
        said += [" ", (f"RANDOM WEIGHTS (seed {model.seed})", "bold yellow")]
    screen.flow([said, [f"{exact(model.parameters)} parameters"], [model.dtype], [str(model.device)]], gap=" · ")


def fed(screen: Screen, tokens: list[list[Token]]) -> None:
    """The ids as they went in, with their positions."""
    for text, ids in enumerate(tokens):
        label = "tokens" if len(tokens) == 1 else f"text {text}"
        shown = [
            [
                (f"{position} ", "dim"),
                (token.token, "cyan"),
                " " if token.token else "",
                str(token.id),
                (" added" if token.added else "", "dim"),
            ]
            for position, token in enumerate(ids)
        ]
        if len(shown) > 24 and not screen.full:
            shown[12:-12] = [[("…", "dim")]]
        screen.flow([[label, "  ", *shown[0]], *shown[1:]], gap="   ", indent=len(label) + 2)


@draw.register
def _(report: ForwardReport, screen: Screen) -> None:
    title(screen, report.model)
    fed(screen, report.tokens)
    last = report.tokens[0][-1]
    of_text = " of text 0" if len(report.tokens) > 1 else ""
    rows = []
    for stage in report.stages:
        shape = f"[{','.join(map(str, stage.shape))}]"
        numbers = ("", "", "")
        if stage.mean is not None:
            numbers = (screen.number(stage.mean), screen.number(stage.std), screen.number(stage.max_abs))
        rows.append([stage.name, f"[{','.join(stage.axes)}]", shape, *numbers])
    used = sum(max(len(row[i]) for row in rows) + 1 for i in range(6)) + 1
    room = None if screen.width is None else screen.width - used
    vectors = iter(screen.vectors([stage.last for stage in report.stages if _is_vector(stage)], room))
    for row, stage in zip(rows, report.stages):
        row.append(" " + (next(vectors) if _is_vector(stage) else str(stage.last[0]) if stage.last else "next token:"))
    label = f" last token{of_text} ({last.token or last.id})"
    screen.table(rows, ("stage", "shape", "", "mean", "std", "max", label), right=(3, 4, 5), gap=1)
    for found in report.next:
        if len(report.next) > 1:
            screen.line((f"text {found.text}, next token:", "dim"))
        next_table(screen, found)


def _is_vector(stage: Stage) -> bool:
    """Not the input ids, which are no numbers to compute with, nor the logits, which are listed as the next token."""
    return stage.mean is not None and bool(stage.last)


@verdict.register
def _(report: ForwardReport) -> str:
    return "\n".join(_best(found) for found in report.next)


def _best(found: Next) -> str:
    return "\n".join(f"{one.id}\t{one.token}" for one in found.top[:1])


def next_table(screen: Screen, found: Next) -> None:
    """Candidates by rank, ids that tie in one row. A bar's length is the probability beside the best one's."""
    best = max((one.prob for one in found.top), default=0.0)
    rows = [_candidate(group, best, screen) for group in _ties(found.top)]
    screen.table(rows, ("rank", "id", "token", "logit", "prob", "log-prob"), right=(0, 1, 3, 4, 5))


def _ties(top: list[Candidate]) -> list[Candidate]:
    """One candidate for every tie: the ones asked for by name, else the first in the order of ids."""
    kept = []
    for _, group in groupby(top, key=lambda one: one.tie or one.rank):
        group = list(group)
        kept += [one for one in group if one.asked] or group[:1]
    return kept


def _candidate(one: Candidate, best: float, screen: Screen) -> list:
    rank = f"{one.tie[0]}–{one.tie[1]}" if one.tie else str(one.rank)
    bar = "█" * round(BAR * one.prob / best) if best > 0 else ""
    ties = f"  {one.tie[1] - one.tie[0] + 1} ids tie" if one.tie else ""
    return [
        rank,
        str(one.id),
        (one.token, "cyan"),
        screen.number(one.logit),
        screen.number(one.prob),
        screen.number(one.logprob),
        (bar + ties, "green"),
    ]


@draw.register
def _(report: TopkReport, screen: Screen) -> None:
    title(screen, report.model)
    fed(screen, report.tokens)
    for found in report.next:
        token = report.tokens[found.text][found.position]
        text = f"text {found.text}, " if len(report.tokens) > 1 else ""
        heat = f", temperature {report.temperature:g}" if report.temperature != 1 else ""
        screen.line(
            (f"{text}after position {found.position} ", "dim"), (token.token or str(token.id), "cyan"), (heat, "dim")
        )
        next_table(screen, found)


@verdict.register
def _(report: TopkReport) -> str:
    return "\n".join(f"{one.id}\t{one.token}" for found in report.next for one in found.top)


@draw.register
def _(report: ScoreReport, screen: Screen) -> None:
    title(screen, report.model)
    for number, text in enumerate(report.texts):
        if len(report.texts) > 1:
            screen.line((f"text {number}", "dim"))
        rows = [
            [
                str(one.position),
                str(one.id),
                (one.token, "cyan"),
                screen.number(one.logprob) if one.rank else "–",
                f"{one.rank:,}" if one.rank else "–",
                screen.number(one.bits) if one.rank else "nothing precedes it",
            ]
            for one in text.tokens
        ]
        screen.table(rows, ("position", "id", "token", "log-prob", "rank", "bits"), right=(0, 1, 3, 4, 5))
        said = f"sum {screen.number(text.sum)} · mean {screen.number(text.mean)} · {screen.number(text.bits)} bits"
        screen.line(f"{text.scored} scored: {said} · perplexity {screen.number(text.perplexity)}")


@verdict.register
def _(report: ScoreReport) -> str:
    return "\n".join(f"{text.sum!r}" for text in report.texts)


@draw.register
def _(report: ParamsReport, screen: Screen) -> None:
    model, totals, tensors = report.model, report.parameters, report.by == "tensor"
    screen.line((model.name, "bold"), f" ({model.source})", f" · {model.dtype}" if tensors else "")
    unit, size = ("GiB", 2**30) if max(row.bytes for row in report.rows) >= 10 * 2**30 else ("MiB", 2**20)
    rows: list[list] = []
    for row in report.rows:
        name = "  " * row.indent + row.name + (f" → {row.tied_to.rsplit('.', 1)[0]} (tied)" if row.tied_to else "")
        style, stored = ("dim", "") if row.tied_to else ("", f"{row.bytes / size:,.2f}")
        if tensors:
            shape = f"[{','.join(row.axes)}] [{','.join(map(str, row.shape))}]"
            rows.append([(name, style), shape, f"{row.parameters:,}", stored])
        else:
            each, share = f"{row.each:,}" if row.times > 1 else "", "" if row.tied_to else f" {100 * row.share:.2f} %"
            rows.append([(name, style), f" {each}", f" {row.parameters:,}", share, f" {stored}"])
    views = (
        ("untied", totals.untied, "the head counted too"),
        ("non-embedding", totals.non_embedding, "layers and final norm"),
        ("nanoGPT's convention", totals.nanogpt, "no positions"),
    )
    views = [view for view in views if view[1] != totals.total]
    whole = f"{sum(row.bytes for row in report.rows if not row.indent) / size:,.2f}"
    for name, count, stored in (("total", totals.total, whole), *((name, count, "") for name, count, _ in views)):
        rounded = f"({short(count)})" if count >= 10**6 else ""
        counts = [rounded, f"{count:,}"] if tensors else ["", f" {count:,}", rounded]
        rows.append([(name, "bold" if name == "total" else "dim"), *counts, stored])
    if tensors:
        screen.table(rows, ("tensor", "shape", "parameters", unit), right=(2, 3))
    else:
        # Columns stand two blanks apart, but a count and its short form one: 124,439,808 (124.44M).
        header = (report.by, " each", " parameters", " share", f" {unit} ({model.dtype})")
        screen.table(rows, header, right=(1, 2, 3, 4), gap=1)
    if views:
        screen.flow([[(f"{name}: {what}", "dim")] for name, _, what in views], gap=" · ")
    if report.buffers:
        screen.line((f"buffers, not counted: {len(report.buffers)} ({report.buffers[0]} …)", "dim"))


@verdict.register
def _(report: ParamsReport) -> str:
    return str(report.parameters.total)


@draw.register
def _(report: TokensReport, screen: Screen) -> None:
    if report.text is not None:
        screen.verbatim("".join(f"{text}\n" for text in report.text))
        return
    screen.line((f"{report.tokenizer} · {report.size:,} tokens", "dim"))
    for number, tokens in enumerate(report.tokens):
        if len(report.tokens) > 1:
            screen.line((f"text {number}", "dim"))
        rows = [
            [
                str(position),
                str(token.id),
                (token.token + " (added)" * token.added, "cyan")
                if token.bytes is not None
                else ("no token has this id", "dim"),
                " ".join(f"{byte:02x}" for byte in token.bytes or ()),
            ]
            for position, token in enumerate(tokens)
        ]
        screen.table(rows, ("position", "id", "token", "bytes"), right=(0, 1))


@verdict.register
def _(report: TokensReport) -> str:
    return "\n".join(report.text or (" ".join(str(token.id) for token in tokens) for tokens in report.tokens))


@draw.register
def _(report: ConfigReport, screen: Screen) -> None:
    screen.verbatim(report.yaml.rstrip("\n") + "\n")


@verdict.register
def _(report: ConfigReport) -> str:
    return report.yaml.rstrip("\n")


@draw.register
def _(report: ListReport, screen: Screen) -> None:
    rows: list[list] = []
    for kind, named in (("config with weights", "-c"), ("config", "-c"), ("sample", "-m")):
        rows.append([(f"{kind} ({named})", "dim"), "", ""])
        rows += [[(one.name, "cyan"), f"{one.parameters:,}", one.about] for one in report.shipped if one.kind == kind]
    screen.table(rows, ("name", "parameters", ""), right=(1,), wrap=True)


@verdict.register
def _(report: ListReport) -> str:
    return "\n".join(one.name for one in report.shipped)


@draw.register
def _(report: PointsReport, screen: Screen) -> None:
    title(screen, report.model)
    rows = [[p.path, f"[{','.join(p.axes)}]", f"[{','.join(map(str, p.shape))}]"] for p in report.points]
    screen.table(rows, ("activation", "shape", ""))


@verdict.register
def _(report: PointsReport) -> str:
    return "\n".join(point.path for point in report.points)


@draw.register
def _(report: ActivationReport, screen: Screen) -> None:
    title(screen, report.model)
    letters = f"[{','.join(report.axes)}]"
    figures = f"mean {screen.number(report.mean)} std {screen.number(report.std)} max {screen.number(report.max_abs)}"
    screen.line((report.path, "bold"), f" {letters} [{','.join(map(str, report.shape))}] {figures}")
    names = {"H": "head", "G": "kv head"}
    for text, values in enumerate(report.values):
        heads = values if len(report.axes) == 4 else [values]
        for head, matrix in enumerate(heads):
            if len(report.values) > 1 or len(heads) > 1:
                of_head = f"{names[report.axes[1]]} {head}" if len(report.axes) == 4 else ""
                screen.line((f"text {text} {of_head}" if len(report.values) > 1 else of_head, "dim"))
            name = names.get(report.axes[-2])
            labels = [f"{name} {i}" for i in range(len(matrix))] if name else _labels(len(matrix), report.tokens[text])
            _matrix(screen, matrix, labels)


def _labels(rows: int, tokens: list[Token]) -> list[str]:
    """A label for every position: its token; padding, which stands first, has none."""
    padding = rows - len(tokens)
    return [f"{i - padding} {tokens[i - padding].token}" if i >= padding else "padding" for i in range(rows)]


def _matrix(screen: Screen, matrix: list[list[float]], labels: list[str]) -> None:
    width = max(map(len, labels))
    room = None if screen.width is None else screen.width - width - 1
    screen.table([[(label, "cyan"), screen.vector(row, room)] for label, row in zip(labels, matrix)], gap=1)


@verdict.register
def _(report: ActivationReport) -> str:
    return repr(report.values)


@draw.register
def _(report: TraceReport, screen: Screen) -> None:
    title(screen, report.model)
    fed(screen, report.tokens)
    for walk in report.walks:
        _walk(screen, walk, report)
    screen.line(
        ("proof ok" if report.status == "ok" else "proof FAILED", "bold green" if report.status == "ok" else "bold red")
    )
    rows = [
        [
            ("ok", "green") if check.ok else ("FAILED", "bold red"),
            check.claim,
            "exactly" if check.error == 0 else f"off by {check.error:.1e}",
            ("" if check.error == 0 else f"{'≤' if check.ok else '>'} {check.allowed:.0e}", "dim"),
        ]
        for check in report.proof
    ]
    screen.table(rows)


@verdict.register
def _(report: TraceReport) -> str:
    return "ok" if report.status == "ok" else "; ".join(finding.message for finding in report.findings)


def _walk(screen: Screen, walk: Walk, report: TraceReport) -> None:
    layer, kv = walk.layer_index, f" · kv head {walk.kv_head}" if walk.kv_head != walk.head else ""
    screen.line(
        (f"Layer {layer + 1} of {report.n_layers} ({walk.path}) · Head {walk.head} of {walk.n_heads}", "bold"),
        (f" = L{layer}H{walk.head}{kv} · query {walk.position} ", "bold"),
        (f'"{walk.token}"' if walk.token else "", "bold cyan"),
    )
    width = max(len(step.label) for step in walk.before + walk.after)
    for step in walk.before:
        _step(screen, step, width)
    seen = [f"score = {walk.score}"] if walk.softcap is not None else []
    sides = "" if walk.causal else " to each side"
    seen += [f"a window of {walk.window} keys{sides}"] if walk.window is not None else []
    seen += ["the softmax has a sink beside the keys"] if walk.sink is not None else []
    if seen:
        screen.line((" · ".join(seen), "dim"))
    _keys(screen, walk)
    for step in walk.after:
        _step(screen, step, width)


def _step(screen: Screen, step: Step, width: int) -> None:
    """A name, its numbers, its formula; a wide vector also its size, mean and norm."""
    about = ""
    if len(step.values) > 8:
        about = f"  [{len(step.values)}] mean {screen.number(step.mean)} norm {screen.number(step.norm)}"
    room = None if screen.width is None else screen.width - width - 1 - len(about)
    numbers = f" {screen.vector(step.values, room)}{about}"
    beside = screen.width is None or width + len(numbers) + 3 + len(step.formula) <= screen.width
    screen.line((f"{step.label:<{width}}", "cyan"), numbers, (f"   {step.formula}" if beside else "", "dim"))
    if not beside:
        screen.line((f"{'':<{width}}    {step.formula}", "dim"))


def _keys(screen: Screen, walk: Walk) -> None:
    """One row a key, the heaviest where there are many, and their sum, which is z."""
    short = len(walk.keys[0].k) <= 4 or screen.full
    kept = walk.keys if screen.full else [walk.keys[position] for position in walk.heaviest]
    rows = [_key(key, screen, short) for key in kept]
    rest = len(walk.keys) - len(kept)
    if rest:
        rows.append([(f"… {rest} keys more", "dim"), "", "", "", "", (screen.number(walk.rest_weight), "dim"), ""])
    z = next(step for step in walk.after if step.path.endswith(".attn.z"))
    if walk.sink is not None:
        rows.append([("sink", "dim"), "", "", "", "", screen.number(walk.sink), ""])
    summed = screen.vector(z.values) if short else screen.number(z.norm)
    rows.append([("sum", "dim"), "", "", "", "", screen.number(walk.weights), summed])
    k = next((s.label for s in reversed(walk.before) if s.label.startswith("attn.k")), "k").removeprefix("attn.")
    score = "score" if walk.softcap is not None else walk.score.removeprefix("q·k")
    header = ("key", k if short else f"|{k}|", "q·k", score, "mask", "weight", "weight·v" if short else "|weight·v|")
    if screen.fits(rows, header):
        screen.table(rows, header, right=(1, 2, 3, 4, 5, 6))
        return
    screen.table([row[:6] for row in rows[:-1]], header[:6], right=(1, 2, 3, 4, 5))
    screen.table([[row[0], *row[5:]] for row in rows], ("key", *header[5:]), right=(1, 2))


def _key(key: KeyStep, screen: Screen, short: bool) -> list:
    return [
        (f"{key.position} {key.token or key.id}", "cyan"),
        screen.vector(key.k) if short else screen.number(key.norm_k),
        screen.number(key.product),
        screen.number(key.scaled),
        "0" if key.visible else "−∞",
        screen.number(key.weight),
        screen.vector(key.weighted) if short else screen.number(key.norm_weighted),
    ]
