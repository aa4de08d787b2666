"""`inspect` in a terminal: the verdict, what it is, its tensors by pattern, its config value by value."""

from collections.abc import Iterator
from typing import Any

from gptcli.checkpoint.patterns import ranges
from gptcli.render.screen import Part, Screen, exact, number
from gptcli.render.signs import harmless
from gptcli.report import amount
from gptcli.report.inspect import Digests, Inspected, InspectReport, StatisticsRow, TensorRow, Tie
from gptcli.report.inspect_config import ConfigValue

ORIGINS = {
    "config": "said by {config}",
    "derived": "follow from that",
    "default": "defaults, not said",
    "family": "fixed",
    "shape": "told by shapes",
}
LISTED = 20  # findings, and what else a line would list, unless --full


def draw(report: InspectReport, screen: Screen) -> None:
    """Prints the report to the screen."""
    for i, one in enumerate(report.checkpoints):
        if i:
            screen.line("")
        _verdict(one, screen)
        _findings(one, screen)
        screen.table(list(_facts(one, screen)), wrap=True)
        if one.statistics is None and one.digests is None:
            _tensors(one.tensors, screen, report.where)
            if report.fits is None:
                _config(one, screen)
        if one.statistics is not None:
            _statistics(one.statistics, screen)
        if one.digests is not None:
            _digests(one.digests, screen)
    for one in report.unopened:
        screen.line(("not opened", "bold red"), f": {one.message}")


def verdict(report: InspectReport) -> str:
    """What `-q` prints: a line for each path."""
    lines = [f"{one.verdict}: {one.source} · {one.said}" for one in report.checkpoints]
    return "\n".join(map(harmless, lines + [f"not opened: {one.message}" for one in report.unopened]))


def _verdict(one: Inspected, screen: Screen) -> None:
    color = "bold green" if one.verdict == "whole" else "bold red"
    screen.table([[(f"{one.verdict}:", color), f"{one.source} · {one.said}"]], gap=1, wrap=True)


def _findings(one: Inspected, screen: Screen) -> None:
    if len(one.findings) < 2:
        return
    shown = one.findings if screen.full else one.findings[:LISTED]
    rows: list[list[Part]] = [[(finding.code, "red"), finding.message] for finding in shown]
    if len(shown) < len(one.findings):
        rows.append([("…", "dim"), f"{len(one.findings) - len(shown)} more: --full or --json shows all"])
    screen.table(rows, wrap=True)


# What it is


def _facts(one: Inspected, screen: Screen) -> Iterator[list[Part]]:
    """Rows of a label and what it is."""

    def row(label: str, *parts: str) -> Iterator[list[Part]]:
        if text := " · ".join(part for part in parts if part):
            yield [(label, "dim"), text]

    several = len(one.files) != 1 or one.index
    where = f"{len(one.files)} files{f' by {one.index}' if one.index else ''}" if several else one.files[0].name
    absent = f"{len(one.absent)} absent" if one.absent else ""
    yield from row("format", one.format, where if one.files else "", absent)
    for file in one.files if screen.full and len(one.files) > 1 else ():
        yield from row("file", file.name, amount(file.tensors, "tensor"), _bytes(file.bytes))
    told = f"by {one.config}" if one.config else "by its names"
    yield from row("family", f"{' or '.join(one.families)}, {told}" if one.families else "")
    yield from row("model", *one.summary)
    if one.parameters is not None:
        counts = one.parameters
        said = "" if counts.described in (None, counts.total) else f"the config says {counts.described:,}"
        stored = f"{counts.stored:,} numbers stored" if counts.stored != counts.total else ""
        buffers = f"{counts.buffers:,} in buffers, not counted" if counts.buffers else ""
        yield from row("parameters", exact(counts.total), said, stored, buffers)
    yield from row("types", *(f"{d.dtype} {amount(d.tensors, 'tensor')}, {_bytes(d.bytes)}" for d in one.dtypes))
    if one.quantised is not None:
        yield from _quantised(one)
    if one.adapter is not None:
        yield from _adapter(one.adapter)
    taken = f"wrappers taken off: {' '.join(f'{word}.' for word in one.wrappers)}" if one.wrappers else ""
    yield from row("names", f"begin with {one.prefix}" if one.prefix else "", taken)
    yield from row("head", _head(one.tie))
    if one.vocabulary is not None:
        yield from row("vocabulary", *_vocabulary(one))
    full = [f"{s.name} {amount(s.tensors, 'tensor')}, {_bytes(s.bytes)}" for s in one.sections if s.tensors]
    bare = [s.name for s in one.sections if not s.tensors]
    yield from row("sections", *full, f"no tensors in {', '.join(_some(bare, screen))}" if bare else "")
    yield from row("settings", *_some([f"{key} {value}" for key, value in one.settings.items()], screen))
    yield from row("one storage", *_some([" = ".join(names) for names in one.shared], screen))
    yield from row("opaque", *_some([f"{path or 'the whole'}: {text}" for path, text in one.opaque.items()], screen))
    yield from row("metadata", *_some([f"{key}: {' / '.join(said)}" for key, said in one.metadata.items()], screen))
    yield from row("not read", ", ".join(_some(one.beside, screen)))
    yield from row("a trainer's", ", ".join(_some(one.leftovers, screen)))
    for note in one.notes:
        yield from row("note", note)


def _some(texts: list[str], screen: Screen) -> list[str]:
    """As many as a person reads, unless --full."""
    if screen.full or len(texts) <= LISTED:
        return texts
    return [*texts[:LISTED], f"… {len(texts) - LISTED} more"]


def _bytes(count: int) -> str:
    """151,040 bytes (147.5 KiB)."""
    for size, unit in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if count >= size:
            return f"{count:,} bytes ({count / size:,.1f} {unit})"
    return f"{count:,} bytes"


def _head(tie: Tie | None) -> str:
    if tie is None:
        return ""
    if not tie.config:
        return f"{tie.head}, of its own" if tie.head else ""
    if not tie.head:
        return "tied to the embedding, not stored"
    compared = f"in {_bytes(tie.compared)} of each that were compared"
    words = {
        True: f"tied, and {tie.head} repeats the embedding {compared}",
        False: f"{tie.head} differs from the embedding that the config ties it to",
        None: f"tied, and {tie.head} is stored in another type or shape",
    }
    return words[tie.same]


def _vocabulary(one: Inspected) -> Iterator[str]:
    v = one.vocabulary
    if v.rows is not None:
        yield f"{v.rows:,} rows"
    if v.config is not None:
        yield f"vocab_size {v.config:,}"
    if v.tokenizer is not None:
        yield f"{v.tokenizer:,} ids in {v.file}"
        if v.rows is not None and v.rows > v.tokenizer:
            yield f"the {v.rows - v.tokenizer:,} rows beyond are padding"


def _quantised(one: Inspected) -> Iterator[list[Part]]:
    q = one.quantised
    schemes = " · ".join(f"{scheme}: {count} weights" for scheme, count in q.schemes.items())
    yield [("quantised", "dim"), schemes]
    counts = f"{q.numbers:,} numbers in {q.stored:,} stored ones, {_bytes(q.bytes)}"
    yield [("packed", "dim"), f"{counts} · {q.bits_a_weight:.2f} bits a number, scales included"]
    beside = " · ".join(f"{role.replace('_', ' ')} × {count}" for role, count in q.sidecars.items())
    yield [("sidecars", "dim"), beside]


def _adapter(a: Any) -> Iterator[list[Part]]:
    yield [("adapter", "dim"), a.said]
    ranks = " · ".join(f"rank {rank} in {count} modules" for rank, count in a.ranks.items())
    more = [word for word, there in (("DoRA", a.dora), ("rank-stabilised", a.rslora)) if there]
    yield [("rank", "dim"), " · ".join([f"r {a.rank}, alpha {a.alpha:g}", ranks, *more, f"biases: {a.bias}"])]
    yield [("targets", "dim"), ", ".join(a.targets)]
    for t in a.touched:
        layers = f"layers {{{ranges(t.layers)}}} " if t.layers else ""
        change = f"[{', '.join(map(str, t.shape))}] rank {t.rank}, times {t.scale:g}"
        yield [("changes", "dim"), f"{layers}{t.module} {change}: {t.parameters:,} parameters"]
    for module, count in a.saved.items():
        yield [("brings", "dim"), f"{module} whole: {count:,} parameters"]


# Tensors


def _tensors(rows: list[TensorRow], screen: Screen, where: bool) -> None:
    """A row a pattern; where two names don't fit beside one another, the file's own stands below ours."""
    if not rows:
        return
    table: list[list[Part]] = []
    for one in rows:
        times = f" × {one.times}" if one.times > 1 else ""
        ours = (one.name + times, "cyan") if one.name else (f"({one.kind}){times}", "dim")
        shape = f"[{', '.join(map(str, one.shape))}]"
        if one.logical is not None:
            shape += f" for [{', '.join(map(str, one.logical))}]"
        line: list[Part] = [ours, (one.stored, ""), one.dtype, shape]
        if where:
            line += [one.file, f"{one.start:,}" if one.start is not None else "", f"{one.bytes:,}"]
        table.append(line)
    header = ["tensor", "stored as", "type", "shape", *(["file", "byte", "bytes"] if where else [])]
    right = (5, 6)
    if screen.fits(table, header):
        screen.table(table, header, right)
        return
    names, types = (max(map(len, column)) for column in zip(*((row[0][0], row[2]) for row in table)))
    for ours, (stored, _), dtype, shape, *place in table:
        screen.line(ours, f"{' ' * (names - len(ours[0]))}  {dtype:<{types}}  {shape}")
        screen.line((f"  {stored}", "dim"))
        if where:
            screen.line(("  {} from byte {}, {} bytes".format(*place), "dim"))


# The config


def _config(one: Inspected, screen: Screen) -> None:
    """Values by where they come from, then the keys that are not among them."""
    for origin, title in ORIGINS.items():
        said = [value for value in one.values if value.origin == origin]
        shown: list[list[Part]] = []
        for value, following in zip(said, [*said[1:], None]):
            # Values of one part that the same keys decide name them once, behind the last.
            keys = "" if following and _alike(value, following) else _keys(value)
            shown.append([(value.path, "cyan"), f" {_value(value.value, screen)}", (keys, "dim")])
        _flow(title.format(config=one.config or "its config"), shown, screen)
    for title, keys in (("change nothing", one.idle), ("as implemented", one.checked), ("unknown keys", one.unknown)):
        _flow(title, [[key] for key in keys], screen)


def _alike(value: ConfigValue, other: ConfigValue) -> bool:
    """Whether two values of one part come from the same keys."""
    return value.keys == other.keys and value.path.partition(".")[0] == other.path.partition(".")[0]


def _flow(title: str, chunks: list[list[Part]], screen: Screen) -> None:
    """Chunks behind a title, if there are any."""
    if chunks:
        screen.flow([[(f"{title}: ", "bold"), *chunks[0]], *chunks[1:]], gap=" · ")


def _keys(value: ConfigValue) -> str:
    """The keys that say it, where they have another name than the value."""
    last = value.path.rpartition(".")[2]
    keys = [key for key in value.keys if key != last]
    if value.origin == "shape":
        return f" ({keys[0]})"
    return f" ({', '.join(keys)})" if 0 < len(keys) == len(value.keys) < 4 else ""


def _value(value: Any, screen: Screen) -> str:
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list) and all(type(one) is int for one in value):
        return f"{{{ranges(value)}}}"
    if isinstance(value, list):
        texts = [f"{one:g}" if isinstance(one, float) else str(one) for one in value]
        texts = texts if screen.full or len(texts) < 6 else [*texts[:2], "…", texts[-1]]
        return f"[{', '.join(texts)}]"
    return f"{value:,}" if type(value) is int else f"{value:g}" if isinstance(value, float) else str(value)


# What reading all of it tells


def _digests(digests: Digests, screen: Screen) -> None:
    """As sha256sum lists files: digits, then a name."""
    missing = "none of the model, for some of its tensors are not there"
    screen.line(f"{digests.model}  " if digests.model else "", ("the model" if digests.model else missing, "bold"))
    for name, digits in digests.tensors.items():
        screen.line(f"{digits}  ", (name, "cyan"))


def _statistics(rows: list[StatisticsRow], screen: Screen) -> None:
    """A row a tensor, its name above where the two don't fit side by side."""
    if not rows:
        return
    spectral = any(row.spectral is not None for row in rows)
    more = ["zero rows"] * any(row.zero_rows for row in rows) + ["spectral"] * spectral
    header = ["", "mean", "std", "min", "max", "zeros", "equal rows", *more]
    table = []
    for one in rows:
        figures = [number(x, screen.digits) for x in (one.mean, one.std, one.min, one.max)]
        words = {"zero rows": f"{one.zero_rows:,}", "spectral": number(one.spectral, screen.digits)}
        bad = [f"{count:,} {word}" for count, word in ((one.nan, "NaN"), (one.inf, "Inf")) if count]
        name: Part = (one.stored + (f"  {', '.join(bad)}" if bad else ""), "bold red" if bad else "cyan")
        table.append([name, *figures, f"{one.zeros:,}", f"{one.equal_rows:,}", *map(words.get, more)])
    right = range(1, len(header))
    if screen.fits(table, header):
        screen.table(table, header, right)
        return
    numbers = [["", *row[1:]] for row in table]
    widths = [max(len(str(row[i])) for row in [header, *numbers]) for i in range(1, len(header))]
    screen.line(("  ".join(f"{title:>{width}}" for title, width in zip(header[1:], widths)), "dim"))
    for row in table:
        screen.line(row[0])
        screen.line("  ".join(f"{cell:>{width}}" for cell, width in zip(row[1:], widths)))
