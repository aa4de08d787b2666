"""`trace` in a terminal: the walk through a head and its proof."""

from typing import TYPE_CHECKING

from gptcli.render.common import fed, title
from gptcli.render.screen import Screen
from gptcli.report.trace import KeyStep, Step, TraceReport, Walk

if TYPE_CHECKING:
    from gptcli.report.edits import EditsReport


def draw(report: TraceReport, screen: Screen) -> None:
    """Prints the report to the screen."""
    title(screen, report.model)
    fed(screen, report.tokens, report.source)
    walks_and_proof(screen, report)


def walks_and_proof(screen: Screen, report: "TraceReport | EditsReport") -> None:
    """Every walk of the report, and what is proved of them."""
    for walk in report.walks:
        _walk(screen, walk)
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


def verdict(report: TraceReport) -> str:
    """What `-q` prints."""
    return "ok" if report.status == "ok" else "; ".join(finding.message for finding in report.findings)


def _walk(screen: Screen, walk: Walk) -> None:
    layer, kv = walk.layer_index, f" · kv head {walk.kv_head}" if walk.kv_head != walk.head else ""
    kind = {"self": "", "cross": "Cross attention · ", "encoder": "Encoder · "}[walk.attention]
    screen.line(
        (f"{kind}Layer {layer + 1} of {walk.n_layers} ({walk.path}) · Head {walk.head} of {walk.n_heads}", "bold"),
        (f" = L{layer}H{walk.head}{kv} · query {walk.position} ", "bold"),
        (f'"{walk.token}"' if walk.token else "", "bold cyan"),
    )
    width = max(len(step.label) for step in walk.before + walk.after)
    for step in walk.before:
        _step(screen, step, width)
    biased = walk.keys[0].bias is not None
    seen = [f"score = {walk.score}"] if walk.softcap is not None or biased else []
    sides = "" if walk.causal else " to each side"
    seen += [f"a window of {walk.window} keys{sides}"] if walk.window is not None else []
    seen += ["the softmax has a sink beside the keys"] if walk.sink is not None else []
    if seen:
        screen.line((" · ".join(seen), "dim"))
    for edit in walk.edited:
        screen.line((f"edited {edit}", "yellow"))
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
    short, biased = len(walk.keys[0].k) <= 4 or screen.full, walk.keys[0].bias is not None
    kept = walk.keys if screen.full else [walk.keys[position] for position in walk.heaviest]
    gap = [""] * (4 + biased)  # between the key and its weight
    rows = [_key(key, screen, short) for key in kept]
    rest = len(walk.keys) - len(kept)
    if rest:
        rows.append([(f"… {rest} keys more", "dim"), *gap, (screen.number(walk.rest_weight), "dim"), ""])
    z = next(step for step in walk.after if step.path.endswith(".z"))
    if walk.sink is not None:
        rows.append([("sink", "dim"), *gap, screen.number(walk.sink), ""])
    summed = screen.vector(z.values) if short else screen.number(z.norm)
    rows.append([("sum", "dim"), *gap, screen.number(walk.weights), summed])
    names = (s.label.partition(".")[2] for s in reversed(walk.before))
    k = next((name for name in names if name.startswith("k")), "k")
    score = "score" if walk.softcap is not None or biased else walk.score.removeprefix("q·k")
    products = ("q·k", "+ bias") if biased else ("q·k",)
    header = ("key", k if short else f"|{k}|", *products, score, "mask", "weight")
    header += ("weight·v" if short else "|weight·v|",)
    numbers, weight = range(1, len(header)), len(header) - 2
    if screen.fits(rows, header):
        screen.table(rows, header, right=numbers)
        return
    screen.table([row[: weight + 1] for row in rows[:-1]], header[: weight + 1], right=numbers[:-1])
    screen.table([[row[0], *row[weight:]] for row in rows], ("key", *header[weight:]), right=(1, 2))


def _key(key: KeyStep, screen: Screen, short: bool) -> list:
    return [
        (f"{key.position} {key.token or key.id}", "cyan"),
        screen.vector(key.k) if short else screen.number(key.norm_k),
        screen.number(key.product),
        *([] if key.bias is None else [screen.number(key.bias)]),
        screen.number(key.scaled),
        "0" if key.visible else "−∞",
        screen.number(key.weight),
        screen.vector(key.weighted) if short else screen.number(key.norm_weighted),
    ]
