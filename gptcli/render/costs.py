"""What a run costs, in a terminal: FLOPs by part, the cache, attention matrices, memory, the longest text."""

from collections.abc import Iterator

from gptcli.checkpoint.patterns import ranges
from gptcli.render.screen import Part, Screen
from gptcli.report.costs import Cache, Costs, Flops, Longest, Matrices, Memory


def draw(costs: Costs, screen: Screen) -> None:
    """Prints a report's costs to the screen."""
    if costs.flops is not None:
        _flops(costs.flops, costs, screen)
        _cache(costs.cache, costs, screen)
        _matrices(costs.matrices, costs, screen)
        _memory(costs.memory, costs, screen)
    if costs.longest:
        _longest(costs.longest, costs, screen)
    if costs.devices is not None:
        from gptcli.render import devices

        devices.draw(costs.devices, run(costs), screen)


def run(costs: Costs) -> str:
    """B, T and S of the run."""
    said = [f"B = {costs.batch:,}", f"T = {costs.tokens:,}" if costs.tokens else "", ""]
    if costs.source_tokens is not None and costs.tokens:
        said[2] = f"S = {costs.source_tokens:,}"
    return ", ".join(filter(None, said))


def title(screen: Screen, name: str, *about: str) -> None:
    """The line above a section."""
    screen.line()
    screen.flow([[(name, "bold")], *([(chunk, "dim")] for chunk in about)], gap=" · ")


def size(count: int) -> str:
    """Bytes in the largest unit of 1024s that they fill: 36.00 MiB."""
    for unit, power in (("TiB", 40), ("GiB", 30), ("MiB", 20), ("KiB", 10)):
        if count >= 2**power:
            return f"{count / 2**power:,.2f} {unit}"
    return f"{count:,} bytes"


def scaled(count: int) -> str:
    """291,648,307,200 → 291.65 G."""
    for unit, letter in ((10**18, "E"), (10**15, "P"), (10**12, "T"), (10**9, "G"), (10**6, "M"), (10**3, "k")):
        if count >= unit:
            return f"{count / unit:,.2f} {letter}"
    return str(count)


def _flops(flops: Flops, costs: Costs, screen: Screen) -> None:
    """Exact numbers with shares where they fit; then without shares, then short, with and without."""
    title(screen, "FLOPs of a forward pass", run(costs), "2 × multiply-adds of its matrix products")
    both, later = flops.mask == "both ways", flops.total[0].next is not None
    header = ["part", "full attention", *([] if both else [flops.mask]), *(["next token"] if later else [])]
    stacks = len({part.stack for part in flops.parts}) > 1
    for shares, shown in ((True, "{:,}".format), (False, "{:,}".format), (True, scaled), (False, scaled)):
        rows: list[list[Part]] = []
        for part in (*flops.parts, *flops.total):
            # Where there are two stacks, a part's name says whose it is.
            name = f"{part.stack or 'decoder'}: {part.name}" if stacks and part in flops.parts else part.name
            numbers = [part.full, *([] if both else [part.masked]), *([part.next] if later else [])]
            style = "bold" if part in flops.total else ""
            share = [f"{100 * part.share:.2f} %"] if shares else []
            rows.append([(name, style), *((shown(number), style) for number in numbers), *share])
        columns = [*header, *(["of full"] if shares else [])]
        if screen.fits(rows, columns):
            break
    screen.table(rows, columns, right=range(1, len(columns)))
    screen.flow([[(note, "dim")] for note in _notes(flops, costs, shares)], gap=" · ")


def _notes(flops: Flops, costs: Costs, shares: bool) -> Iterator[str]:
    """What each column is."""
    yield "full attention: every query with every key"
    if flops.mask != "both ways":
        yield f"{flops.mask}: the pairs that the mask lets through"
    if flops.total[0].next is None:
        yield "no step for a next token: attention that sees both ways keeps nothing for one"
    else:
        yield f"next token: one more, with {costs.tokens:,} before it in the cache"
    if shares:
        yield f"of full: of {flops.total[0].name}"
    if flops.next_beyond_context:
        yield "the context is full: the model itself has no place for a next token"


def _cache(cache: Cache | None, costs: Costs, screen: Screen) -> None:
    if cache is None:
        return
    title(screen, "KV cache", run(costs), f"2 × kv heads × head size × kept, in {costs.dtype}")
    rows = []
    for alike in cache.layers:
        numbers = ranges(layer + 1 for layer in alike.layers).replace("-", "–").replace(",", ", ")
        numbers = numbers if len(numbers) <= 20 else f"{len(alike.layers)} layers"
        what = f"{numbers} cross" if alike.cross else f"{numbers} window {alike.window:,}" if alike.window else numbers
        heads = [f"{alike.kv_heads:,}", f"{alike.head_dim:,}", f"{alike.kept:,}"]
        rows.append([what, *heads, f"{alike.each:,}", f"{alike.bytes:,}"])
    header = ("layers", "kv heads", "head size", "kept", "a layer", "bytes")
    rows.append([("all", "bold"), "", "", "", "", (f"{cache.bytes:,}", "bold")])
    rows.append(["", "", "", "", "", (size(cache.bytes), "dim")])
    screen.table(rows, header, right=range(1, 6))


def _matrices(matrices: list[Matrices], costs: Costs, screen: Screen) -> None:
    title(screen, "attention matrices, if they were stored", f"[B,H,T,S] in {costs.dtype}")
    rows = []
    for one in matrices:
        shape = f"[{','.join(map(str, one.shape))}]"
        rows.append([f"{one.name} × {one.layers}", shape, f"{one.each:,}", f"{one.bytes:,}"])
    total = sum(one.bytes for one in matrices)
    rows.append([("all", "bold"), "", "", (f"{total:,}", "bold")])
    rows.append(["", "", "", (size(total), "dim")])
    screen.table(rows, ("layers", "shape", "a layer", "bytes"), right=(2, 3))


def _memory(memory: Memory, costs: Costs, screen: Screen) -> None:
    title(screen, "memory", run(costs), f"bytes in {costs.dtype}")
    header = ["", *(f"head on {one.head}" for one in memory.activations)]
    rows: list[list[Part]] = [["weights", *[f"{memory.weights:,}"] * len(memory.activations)]]
    rows.append(["KV cache", *[f"{memory.cache:,}"] * len(memory.activations)])
    rows.append(["activations at their peak", *(f"{one.bytes:,}" for one in memory.activations)])
    rows.append([("all", "bold"), *((f"{one.sum:,}", "bold") for one in memory.activations)])
    rows.append(["", *((size(one.sum), "dim") for one in memory.activations)])
    screen.table(rows, header, right=range(1, len(header)))
    for one in memory.activations:
        alive = [f"{part.name} {size(part.bytes)}" for part in sorted(one.alive, key=lambda part: -part.bytes)]
        where = f" with the head on {one.head}" if len(memory.activations) > 1 else ""
        said = [[(f"alive at the peak{where} ({one.moment}): {alive[0]}", "dim")]]
        screen.flow([*said, *([(chunk, "dim")] for chunk in alive[1:])], gap=" · ")
    screen.line(("activations: as the forward pass of gptcli holds them, with no text padded", "dim"))


def _longest(longest: list[Longest], costs: Costs, screen: Screen) -> None:
    room = f"longest text in {size(longest[0].memory)}"
    held = f"weights, KV cache and activations in {costs.dtype}"
    title(screen, room, f"{longest[0].memory:,} bytes", f"B = {costs.batch:,}", held)
    rows = [[f"head on {one.head}", *_verdict(one)] for one in longest]
    screen.table(rows, ("", "T", "bytes", ""), right=(1, 2), wrap=True)


def _verdict(one: Longest) -> tuple[Part, str, Part]:
    """T, what it needs, and what stands against one more."""
    if one.tokens == 0:
        lacking = f"even T = 1 needs {size(one.bytes - one.memory)} more"
        return ("none", "bold red"), f"{one.bytes:,}", (lacking, "red")
    limit = "the whole context" if one.limit == "context" else f"one more needs {one.beyond - one.memory:,} too many"
    return (f"{one.tokens:,}", "bold"), f"{one.bytes:,}", limit
