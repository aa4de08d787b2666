"""What a run costs, before it runs: FLOPs by part, the cache of keys and values, memory, the longest text that fits.

Arithmetic over the Spec (count.py, memory.py). A FLOP is a multiplication or an addition of a matrix product. Sizes are
bytes. A run is a forward pass over B texts of T tokens; where an encoder reads a source, of S tokens each.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator

from gptcli import count
from gptcli.data import data, entry
from gptcli.errors import GptcliError
from gptcli.memory import Rows, peak
from gptcli.report.devices import Devices, devices_of
from gptcli.source import Model
from gptcli.spec import Attention, Spec

ENDLESS = 1 << 60  # tokens: more than any memory holds


@data
class Workload:
    """A run as it is asked for: T (None: only what the memory holds is wanted), B, S (None: as T), bytes of memory, and
    the ranks that run it together (None: one alone).
    """

    tokens: int | None = None
    batch: int = 1
    source_tokens: int | None = None
    memory: int | None = None
    devices: int | None = None


@data
class PartFlops:
    """FLOPs of one part of the pass. stack: `encoder`, or empty.

    full: over all pairs of queries and keys; masked: over those that the mask lets through; next: one token more, with
    T before it in the cache (None where nothing can be kept). share: of `full` in the pass with the head on all.
    """

    name: str
    stack: str
    full: int
    masked: int
    next: int | None
    share: float


@data
class Flops:
    """parts: the head twice where there is one, on all positions and on the last; total: likewise.

    mask: what it says, in words; next_beyond_context: the token after T has no place in the context.
    """

    mask: str
    parts: list[PartFlops]
    total: list[PartFlops]
    next_beyond_context: bool


@data
class CacheLayers:
    """Layers (from 0) that keep alike: the latest `kept` of their positions, or a source's in cross attention."""

    layers: list[int]
    cross: bool
    kv_heads: int
    head_dim: int
    window: int | None
    kept: int
    each: int
    bytes: int


@data
class Cache:
    """Keys and values of B texts after T tokens."""

    layers: list[CacheLayers]
    bytes: int


@data
class Matrices:
    """Attention weights of a kind of layers, if they were stored: [B, H, T, S] each. layers: how many."""

    name: str
    shape: list[int]
    layers: int
    each: int
    bytes: int


@data
class Alive:
    """One of the things that live at the peak."""

    name: str
    bytes: int


@data
class Activations:
    """What the forward pass holds beside the weights, at the moment when it holds most."""

    head: str
    moment: str
    alive: list[Alive]
    bytes: int
    sum: int


@data
class Memory:
    """weights, cache and activations (with the head on all positions, and on the last), and their sums."""

    weights: int
    cache: int
    activations: list[Activations]


@data
class Longest:
    """The longest texts (T) that a memory holds: 0 where it doesn't hold one token.

    limit: `memory`, or `context` where the model reads no more. bytes: what is needed at T (at T = 1 where that is too
    much); beyond: what is needed at T + 1, which does not fit.
    """

    head: str
    memory: int
    tokens: int
    limit: str
    bytes: int
    beyond: int | None


@data
class Costs:
    """batch: B; tokens: T; source_tokens: S; the dtype is that of weights, activations and cache."""

    tokens: int | None
    batch: int
    source_tokens: int | None
    dtype: str
    flops: Flops | None
    cache: Cache | None
    matrices: list[Matrices]
    memory: Memory | None
    longest: list[Longest]
    devices: Devices | None


HEADS: dict[Rows, str] = {"all": "all positions", "last": "the last position"}


def costs_of(model: Model, workload: Workload, dtype: str, weights: int) -> Costs:
    """What the run costs in that type, whose weights take so many bytes. Raises GptcliError for one that can't be."""
    spec, tokens, batch = model.spec, workload.tokens, workload.batch
    source = _source(model, workload)
    run = _Run(spec, batch, dtype, weights)
    whole, room, ranks = tokens is not None, workload.memory, workload.devices
    return Costs(
        tokens=tokens,
        batch=batch,
        source_tokens=source if spec.encoder is not None else None,
        dtype=dtype,
        flops=_flops(spec, tokens, batch, source) if whole else None,
        cache=run.cache(tokens, source) if whole and _keeps(spec) else None,
        matrices=list(run.matrices(tokens, source)) if whole else [],
        memory=run.memory(tokens, source) if whole else None,
        longest=[run.longest(rows, room, workload.source_tokens) for rows in _rows(spec)] if room is not None else [],
        devices=devices_of(spec, ranks, tokens, batch, source, dtype, room) if ranks is not None else None,
    )


def _source(model: Model, workload: Workload) -> int:
    """S: as it was given, else T; 0 without an encoder. Raises GptcliError for a text that is longer than a context."""
    spec, tokens, source = model.spec, workload.tokens, workload.source_tokens
    if source is not None and spec.encoder is None:
        raise GptcliError(f"--source-len {source:,}: {model.shown} has no encoder", "leave it out", "inputs")
    if tokens is not None and tokens > spec.most_tokens:
        said = f"--seq-len {tokens:,}: more than the context of {spec.context_length:,} that {model.shown} reads"
        raise GptcliError(said, "give a shorter one", "context")
    if spec.encoder is None:
        return 0
    reads = spec.encoder.most_tokens
    if max(source or 0, tokens or 0 if source is None else 0) > reads:
        option = "--seq-len" if source is None else "--source-len"
        said = f"{option} {source or tokens:,}: more than the {reads:,} that the encoder of {model.shown} reads"
        raise GptcliError(said, "--source-len gives the source its own length", "context")
    return source or tokens or 0


def _rows(spec: Spec) -> list[Rows]:
    """Where the head may be: on all positions or on the last; nowhere without one, whose vectors all come out."""
    return ["all", "last"] if spec.lm_head is not None else ["all"]


def _keeps(spec: Spec) -> bool:
    """Can keys and values be kept for a next token? Not where a query sees those to its right."""
    return all(here.attention.causal for here, _ in count.kinds(spec))


def _flops(spec: Spec, tokens: int, batch: int, source: int) -> Flops:
    full, masked = (count.flops_by_part(spec, tokens, batch, mask, None, source) for mask in (False, True))
    one = count.flops_by_part(spec, 1, batch, True, None, source, before=tokens) if _keeps(spec) else None
    whole = sum(full.values())

    def part(name: str, stack: str, full: int, masked: int, later: int | None) -> PartFlops:
        return PartFlops(name=name, stack=stack, full=full, masked=masked, next=later, share=full / whole)

    parts: list[PartFlops] = []
    for (stack, name), flops in full.items():
        # The encoder has read its text before a next token comes.
        later = None if one is None else one.get((stack, name), 0)
        if name != count.HEAD:
            parts.append(part(name, stack, flops, masked[stack, name], later))
            continue
        for rows, part_of in (("all", flops), ("last", flops // tokens)):  # each position costs the head the same
            parts.append(part(f"head, {HEADS[rows]}", stack, part_of, part_of, later))
    later, sums, head = None if one is None else sum(one.values()), [], full.get(("", count.HEAD), 0)
    for rows in _rows(spec):
        saved = 0 if rows == "all" else head * (tokens - 1) // tokens
        name = "all" if spec.lm_head is None else f"all, head on {HEADS[rows]}"
        sums.append(part(name, "", whole - saved, sum(masked.values()) - saved, later))
    beyond = one is not None and tokens == spec.most_tokens
    return Flops(mask=_mask(spec, tokens), parts=parts, total=sums, next_beyond_context=beyond)


def _mask(spec: Spec, tokens: int) -> str:
    """What the masks of the text's own attention say."""
    parts = [here.attention for here, _ in count.kinds(spec)]
    ways = "causal" if all(a.causal for a in parts) else "both ways" if not any(a.causal for a in parts) else "mixed"
    windowed = any(a.window is not None and a.window < tokens for a in parts)
    return f"{ways}, windows" if windowed else ways


@entry
class _Run:
    """What depends on B and on the type."""

    spec: Spec
    batch: int
    dtype: str
    weights: int

    @property
    def item(self) -> int:
        return count.ITEM_BYTES[self.dtype]

    def cache(self, tokens: int, source: int) -> Cache:
        alike: dict[tuple[Attention, bool], list[int]] = {}
        for here, layers in count.kinds(self.spec):
            for part, cross in ((here.attention, False), (here.cross, True)):
                if part is not None:
                    alike.setdefault((part, cross), []).extend(layers)
        found = []
        for (part, cross), layers in alike.items():
            kept = source if cross else count.kept(part, tokens)
            each = 2 * self.batch * kept * part.n_kv_heads * part.head_dim * self.item
            found.append(
                CacheLayers(
                    layers=sorted(layers),
                    cross=cross,
                    kv_heads=part.n_kv_heads,
                    head_dim=part.head_dim,
                    window=part.window,
                    kept=kept,
                    each=each,
                    bytes=each * len(layers),
                )
            )
        return Cache(layers=found, bytes=self.cache_bytes(tokens, source))

    def cache_bytes(self, tokens: int, source: int) -> int:
        if not _keeps(self.spec):
            return 0
        return count.kv_cache_bytes(self.spec, tokens, self.item, self.batch, source)

    def matrices(self, tokens: int, source: int) -> Iterator[Matrices]:
        kinds: Counter[tuple[str, int, int, int]] = Counter()
        for name, stack, length in (("encoder", self.spec.encoder, source), ("self-attention", self.spec, tokens)):
            for here, layers in count.kinds(stack) if stack is not None else ():
                for kind, part, keys in ((name, here.attention, length), ("cross-attention", here.cross, source)):
                    if part is not None:
                        kinds[kind, part.n_heads, length, keys] += len(layers)
        for (name, heads, queries, keys), layers in kinds.items():
            each = self.batch * heads * queries * keys * self.item
            shape = [self.batch, heads, queries, keys]
            yield Matrices(name=name, shape=shape, layers=layers, each=each, bytes=each * layers)

    def memory(self, tokens: int, source: int) -> Memory:
        cache, found = self.cache_bytes(tokens, source), []
        for rows in _rows(self.spec):
            most = peak(self.spec, tokens, self.dtype, self.batch, rows, source)
            found.append(
                Activations(
                    head=HEADS[rows],
                    moment=most.name,
                    alive=[Alive(name=name, bytes=size) for name, size in most.alive.items()],
                    bytes=most.bytes,
                    sum=self.weights + cache + most.bytes,
                )
            )
        return Memory(weights=self.weights, cache=cache, activations=found)

    def needed(self, tokens: int, source: int | None, rows: Rows) -> int:
        """Bytes of weights, cache and activations. source None: as many tokens as the text."""
        source = 0 if self.spec.encoder is None else tokens if source is None else source
        activations = peak(self.spec, tokens, self.dtype, self.batch, rows, source).bytes
        return self.weights + self.cache_bytes(tokens, source) + activations

    def longest(self, rows: Rows, room: int, source: int | None) -> Longest:
        """By halving, for what is needed grows with T."""
        most = self.spec.most_tokens
        if self.spec.encoder is not None and source is None:
            most = min(most, self.spec.encoder.most_tokens)

        def lacks(tokens: int) -> bool:
            return self.needed(tokens, source, rows) > room

        tokens = bisect_left(range(1, min(most, ENDLESS) + 1), True, key=lacks)
        return Longest(
            head=HEADS[rows],
            memory=room,
            tokens=tokens,
            limit="context" if tokens == most else "memory",
            bytes=self.needed(max(tokens, 1), source, rows),
            beyond=None if tokens == most else self.needed(tokens + 1, source, rows),
        )
