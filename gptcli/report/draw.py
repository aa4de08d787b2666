"""`draw`: an architecture's structure as boxes and arrows, from its Spec and its layout alone. Loads no torch.

A drawing is a tree. A box stands for what its weights or its step do; inside a stack, a layer, an attention or an MLP
stand further boxes. `branches` holds them: one list is a sequence, several run side by side and read the same, an empty
one hands on what it reads. What leaves a box is its `gives`. The edges say the same as a flat graph.
"""

import re
from collections.abc import Generator, Iterable, Iterator
from dataclasses import field, replace
from typing import Literal

from gptcli import count
from gptcli.checkpoint.patterns import runs
from gptcli.data import data, entry, mutable
from gptcli.layout import AXES, Param, Place
from gptcli.report import ModelFacts, Report
from gptcli.report import traits as words
from gptcli.report.traits import Traits, amount, figure
from gptcli.source import Model
from gptcli.spec import Experts, Learned, NoMLP, NoNorm, Relative, Rope, Sinusoidal, Spec
from gptcli.trace import POINTS, sizes

Kind = Literal[
    "stack", "layer", "folded", "residual", "split",  # what holds others, or stands for many
    "attention", "cross", "mlp", "experts",
    "input", "output", "table", "aside", "norm", "matrix", "step", "add", "head",
]  # fmt: skip
SIDE_BY_SIDE = ("split", "residual")  # kinds whose branches read the same; past a residual's, that is led on


@data
class Flow:
    """What an arrow carries: the activation of that path (empty where it has no name of its own).

    axes: letters. shape: sizes, or letters where a run decides: B texts, T tokens, S tokens of the source.
    """

    path: str
    axes: list[str]
    shape: list[int | str]

    def said(self, brief: bool = False) -> str:
        """`[B,T,C] = [B,T,768]`, or the sizes alone: in brief, and where all are letters."""
        letters, sizes = _bracket(self.axes), _bracket(self.shape)
        return sizes if brief or letters == sizes else f"{letters} = {sizes}"


@data
class Weight:
    """A weight that a box holds; axes: letters of layout.AXES."""

    name: str
    axes: list[str]
    shape: list[int]

    @property
    def said(self) -> str:
        """`W[768,768]`, `b[768]`."""
        return f"{'b' if self.name.endswith('bias') else 'W'}{_bracket(self.shape)}"


@data
class Box:
    """One stage. parameters: distinct numbers of its own and of all inside; `times` such boxes stand in a row or, of
    experts, side by side. layers: from 0, of a layer the ones that it stands for. weights: of experts, the first's.
    tied_to: the box whose table it uses.
    """

    id: str
    kind: Kind
    title: str = ""
    lines: list[str] = field(default_factory=list)
    parameters: int = 0
    times: int = 1
    layers: list[int] = field(default_factory=list)
    weights: list[Weight] = field(default_factory=list)
    tied_to: str = ""
    gives: Flow | None = None
    branches: list[list["Box"]] = field(default_factory=list)


@data
class Edge:
    """An arrow between two boxes that hold no other.

    data: what one gives the other reads; residual: it is added, past the sublayer; memory: the encoder's vectors, read
    across; tie: the second uses the first one's table; bias: what is added to the scores of every layer.
    """

    source: str
    target: str
    kind: Literal["data", "residual", "memory", "tie", "bias"]
    carries: Flow | None


@data
class Figure:
    """One model's drawing. letters: what sizes they stand for; stacks: an encoder's before its decoder's; differing:
    boxes that the other model of a comparison has not, or not so, sizes aside.
    """

    model: ModelFacts
    letters: dict[str, int]
    stacks: list[Box]
    edges: list[Edge]
    differing: list[str] = field(default_factory=list)

    @property
    def legend(self) -> list[str]:
        """What each letter stands for."""
        source = ["S source tokens"] if len(self.stacks) > 1 else []
        return ["B texts", "T tokens", *source, *(f"{letter} {size:,}" for letter, size in self.letters.items())]


@data
class Row:
    """One choice of each model, in words; null where a model has no such thing."""

    name: str
    values: list[str | None]
    same: bool


@mutable
class DrawReport(Report):
    """figures: one a model; rows: of two, their choices side by side."""

    schema = "gptcli.draw/1"
    figures: list[Figure]
    rows: list[Row]


def draw_report(models: list[Model], full: bool = False) -> DrawReport:
    """One model's drawing, or two and how they differ. full: every kind of layer is opened, not the commonest alone."""
    figures = [_figure(model, full) for model in models]
    if len(figures) < 2:
        return DrawReport(figures=figures, rows=[])
    one, other = figures
    marked = [replace(one, differing=_differing(one, other)), replace(other, differing=_differing(other, one))]
    return DrawReport(figures=marked, rows=list(_rows(models)))


def _bracket(items: Iterable[int | str]) -> str:
    return f"[{','.join(map(str, items))}]"


def boxes(several: Iterable[Box]) -> Iterator[Box]:
    """These boxes and all that stand inside, in order."""
    for box in several:
        yield box
        for branch in box.branches:
            yield from boxes(branch)


def _figure(model: Model, full: bool) -> Figure:
    spec, params = model.spec, {}
    for param in model.layout:
        params.setdefault(Place.of(param.name)[:2], []).append(param)
    paths = ["encoder.", ""] if spec.encoder is not None else [""]
    stacks = [_stack(_Scope(spec, params, path), full) for path in paths]
    known = {"N": spec.n_layers} | sizes(spec, 0, 0, 0)
    letters = {letter: known[letter] for letter in "NCPVHGDFE" if letter in known}
    facts = model.facts(model.stored_dtype)
    return Figure(model=facts, letters=letters, stacks=stacks, edges=list(_edges(stacks)))


def kinds_of_layers(spec: Spec) -> dict[Spec, list[int]]:
    """Layers (from 0) that are alike, by what they are; kinds in the order of their first layers."""
    kinds: dict[Spec, list[int]] = {}
    for here, layers in count.kinds(spec):
        kinds.setdefault(replace(here, variants=()), []).extend(layers)
    return {kind: sorted(layers) for kind, layers in sorted(kinds.items(), key=lambda one: min(one[1]))}


def numbered(layers: list[int]) -> str:
    """Layers (from 0) as a person counts them: `2, 4, 6 … 26`, `1–5, 7–11`."""
    said = [f"{a + 1}" if a == b else f"{a + 1}–{b + 1}" for a, b in runs(layers)]
    return ", ".join(said) if len(said) <= 4 else f"{', '.join(said[:3])} … {said[-1]}"


Lines = Iterable[str | Literal[False] | None]  # what a box says; what is no text is left out


@entry
class _Scope:
    """Makes the boxes of one part, as `weights.at(part)` reads its weights.

    path: the part's, with a dot behind it; empty for the stack that is no encoder. params: by stack and layer.
    """

    whole: Spec
    params: dict[tuple[str, int | None], list[Param]]
    path: str

    def at(self, name: str) -> "_Scope":
        """A part of this part."""
        return replace(self, path=f"{self.path}{name}.")

    @property
    def here(self) -> Spec:
        """The architecture of this stack, and in it of this layer."""
        return Place.of(self.path).spec(self.whole)

    def flow(self, name: str) -> Flow:
        """An activation by its name or, where it has none, by its axes; its sizes in letters where a run decides."""
        path = self.path + name
        place, axes = Place.of(path), POINTS.get(re.sub(r"layers\.\d+", "layers.#", path))
        if axes is None:
            path, axes = "", name.replace("T", "S") if place.stack else name
        across = place.name.startswith("cross.")
        known = sizes(self.here.across if across else self.here, 0, 0, 0)
        known |= {"B": "B", "T": "T", "S": "S" if across or place.stack else "T"}
        return Flow(path=path, axes=list(axes), shape=[known[axis] for axis in axes])

    def leaf(self, kind: Kind, name: str, title: str, lines: Lines = (), gives: str = "",
             holds: Iterable[str] = (), times: int = 1) -> Box:  # fmt: skip
        """A box that holds no other. gives: as `flow` takes it; if nothing is said, what is called as the box is.

        Its weights are those whose names are one of `holds` (its own name, if none), or stand below one.
        """
        stems = tuple(f"{self.path}{stem}." for stem in holds or [name])
        path = self.path + name
        held = [p for p in self.params.get(Place.of(f"{path}.")[:2], ()) if f"{p.name}.".startswith(stems)]
        return Box(
            id=path,
            kind=kind,
            title=title,
            lines=[line for line in lines if line],
            parameters=count.total(held),
            times=times,
            weights=[Weight(name=p.name, axes=[AXES[axis] for axis in p.axes], shape=list(p.shape)) for p in held],
            tied_to=next((p.tied_to.rpartition(".")[0] for p in held if p.tied_to), ""),
            gives=self.flow(gives or name),
        )

    def matrix(self, name: str, title: str, *lines: str, gives: str = "") -> Box:
        """A linear map; its last line says whether it has a bias."""
        box = self.leaf("matrix", name, title, lines, gives)
        return replace(box, lines=box.lines + ["bias"] * any(w.name.endswith(".bias") for w in box.weights))

    def norm(self, name: str, title: str = "{}", gives: str = "") -> Box:
        """title: how the norm's kind is called in it."""
        kind = words.NORM_NAMES[self.here.norm.kind]
        return self.leaf("norm", name, title.format(kind), words.norm_details(self.here), gives)

    def group(self, kind: Kind, name: str, *branches: list[Box], title: str = "", lines: Lines = ()) -> Box:
        """A box around a sequence, or around several that read the same."""
        total = sum(box.parameters * box.times for branch in branches for box in branch)
        gives = None if kind in SIDE_BY_SIDE else branches[0][-1].gives
        return Box(id=self.path + name, kind=kind, title=title, lines=[line for line in lines if line],
                   parameters=total, gives=gives, branches=list(branches))  # fmt: skip


# A stack, from ids to what comes out


def _stack(at: _Scope, full: bool) -> Box:
    norm = at.here.norm
    title, ids = "", "ids"
    if at.whole.encoder is not None:
        title, ids = ("encoder", "source ids") if at.path else ("decoder", "target ids")
    inside = [at.leaf("input", "ids", ids, gives="BT"), *_embedding(at), *_layers(at, full)]
    if norm.final:
        inside.append(at.norm("final_norm", "final {}"))
    return at.group("stack", "stack", [*inside, *_head(at)], title=title)


def _embedding(at: _Scope) -> list[Box]:
    """Tables whose rows are summed; what the last of them gives is `embed`."""
    spec, position = at.here, at.here.position
    size = spec.embed_size or spec.hidden_size
    rows = _rows_of(spec.vocab_size, size)
    lent = at.path != "" and at.whole.encoder_embed == "shared" and "the decoder's table"
    scale = spec.embed_scale != 1 and f"× {words.factor(spec.embed_scale, spec.hidden_size)}"
    if spec.embed_size is None:
        found = [at.leaf("table", "embed", "token table", [rows, lent, scale], "BTC")]
    else:
        found = [at.leaf("table", "embed", "token table", [rows, lent], "BTP")]
        found.append(at.matrix("embed_in", "to the hidden size", _sizes(size, spec.hidden_size), scale, gives="BTC"))
    if spec.n_segments is not None:
        lines = [_rows_of(spec.n_segments, spec.hidden_size)]
        found.append(at.leaf("table", "segment_embed", "+ segment table", lines, "BTC"))
    if isinstance(position, Learned):
        unused = position.offset > 0 and f"{position.offset} more, unused"
        lines = [_rows_of(spec.context_length, spec.hidden_size), unused]
        found.append(at.leaf("table", "pos_embed", "+ position table", lines, "BTC"))
    if isinstance(position, Sinusoidal):
        waves = {"neighbours": "each sine beside its cosine", "halves": "all sines, then all cosines"}
        lines = [f"of position × {figure(position.theta)}^(-2i/C)", waves[position.pairs]]
        found.append(at.leaf("table", "sinusoids", "+ sines and cosines", lines, "BTC"))
    found[-1] = replace(found[-1], gives=at.flow("embed"))
    if spec.norm.embedding:
        found.append(at.norm("embed_norm"))
    if isinstance(position, Relative):
        table = f"{amount(position.buckets, 'bucket')} × {amount(spec.attention.n_heads, 'head')}"
        lines = [table, f"distances up to {position.max_distance:,}", "added to every layer's scores"]
        found.append(at.leaf("aside", "rel_bias", "distance table", lines, "BHTS"))
    return found


def _head(at: _Scope) -> list[Box]:
    spec, head = at.here, at.here.lm_head
    if head is None:
        return [] if at.path else [Box(id="out", kind="output", title="final vectors")]
    hidden, size, found = spec.hidden_size, spec.embed_size or spec.hidden_size, []
    if head.transform is not None:
        box = at.matrix("lm_head.dense", "head transform", _sizes(hidden, hidden))
        found.append(replace(box, lines=[*box.lines, f"then {words.activation(head.transform)}"]))
        if not isinstance(spec.norm, NoNorm):
            found.append(at.norm("lm_head.norm"))
    if spec.embed_size is not None:
        found.append(at.matrix("embed_out", "to the rows' size", _sizes(hidden, size)))
    lines = [
        _sizes(size, spec.vocab_size),
        head.tied and "tied to the token table",
        head.bias and "bias",
        head.scale != 1 and f"× {words.factor(head.scale, hidden)}",
        head.softcap is not None and f"capped at {figure(head.softcap)}",
    ]
    holds = ("lm_head.weight", "lm_head.bias")
    found.append(at.leaf("head", "lm_head", "lm_head", lines, "logits", holds))
    return [*found, Box(id="logits", kind="output", title="logits")]


def _rows_of(rows: int, columns: int) -> str:
    return f"{amount(rows, 'row')} of {columns:,}"


def _sizes(*sizes: int) -> str:
    """`768 → 3,072 → 768`."""
    return " → ".join(f"{size:,}" for size in sizes)


# Layers


def _layers(at: _Scope, full: bool) -> Iterable[Box]:
    """Each kind of layer once, where its first layer stands: the commonest opened, the others by what differs."""
    kinds, total, found = kinds_of_layers(at.here), at.here.n_layers, []
    opened = max(kinds, key=lambda kind: len(kinds[kind]))
    ours = words.layer_traits(opened)
    for kind, layers in kinds.items():
        path = f"layers.{layers[0]}"
        title = f"layer × {total:,}" if total > 1 else "layer 1"
        if len(kinds) > 1:
            title = f"layer{'s' * (len(layers) > 1)} {numbered(layers)} of {total:,}"
        if full or kind == opened:
            box = at.group("layer", path, _layer(at.at(path)), title=title)
        else:
            theirs = words.layer_traits(kind)
            lines = [f"{name}: {theirs[name] or 'none'}" for name in theirs if theirs[name] != ours[name]]
            box = replace(at.leaf("folded", path, title, lines, f"{path}.resid_post"), weights=[])
        found.append(replace(box, times=len(layers), layers=layers))
    return _merged(found, total)


MERGED_FROM = 4  # boxes


def _merged(found: list[Box], total: int) -> Iterator[Box]:
    """Many folded layers of one size that differ in the same things become one box."""
    groups: dict[tuple, list[Box]] = {}
    for box in found:
        alike = (box.parameters, *(line.partition(":")[0] for line in box.lines))
        groups.setdefault(alike if box.kind == "folded" else (box.id,), []).append(box)
    for group in groups.values():
        if len(group) < MERGED_FROM:
            yield from group
            continue
        layers = sorted(layer for box in group for layer in box.layers)
        spans = [f"{one} … {last.partition(': ')[2]}" for one, last in zip(group[0].lines, group[-1].lines)]
        title, lines = f"layers {numbered(layers)} of {total:,}", [f"each its own {span}" for span in spans]
        yield replace(group[0], title=title, lines=lines, times=len(layers), layers=layers)


def _layer(layer: _Scope) -> list[Box]:
    here = layer.here
    has_mlp = not isinstance(here.mlp, NoMLP)
    if has_mlp and here.residual != "sequential":
        return _side_by_side(layer)
    inside = _sublayer(layer, "attn", _attention(layer, "attn"), "resid_mid")
    if here.encoder is not None:
        inside += _sublayer(layer, "cross", _attention(layer, "cross"), "resid_cross")
    return inside + (_sublayer(layer, "mlp", _mlp(layer), "resid_post") if has_mlp else [])


def _sublayer(layer: _Scope, name: str, box: Box, stream: str) -> list[Box]:
    """x + sublayer(x), with the norms where this architecture has them."""
    placement = layer.here.norm.placement
    after = [layer.norm(f"{name}_out_norm")] if placement in ("output", "sandwich") else []
    past = layer.group("residual", f"{name}.residual", [*_before(layer, name), box, *after])
    if placement != "post":
        return [past, _add(layer, name, stream)]
    return [past, _add(layer, name, "BTC"), layer.norm(f"{name}_norm", gives=stream)]


def _side_by_side(layer: _Scope) -> list[Box]:
    """The MLP beside the attention: each by a norm of its own, or both by one."""
    norms, branches = _before(layer, "attn"), [[_attention(layer, "attn")], [_mlp(layer)]]
    if layer.here.residual == "parallel":
        branches = [[*norms, *branches[0]], [*_before(layer, "mlp"), *branches[1]]]
    elif norms:
        branches = [[*norms, layer.group("split", "split", *branches)]]
    return [layer.group("residual", "residual", *branches), _add(layer, "mlp", "resid_post")]


def _before(layer: _Scope, name: str) -> list[Box]:
    """The norm of what a sublayer reads, where there is one."""
    here = layer.here
    normed = here.norm.placement in ("pre", "sandwich") and (name != "attn" or here.attention.normed)
    return [layer.norm(f"{name}_norm")] if normed else []


def _add(layer: _Scope, name: str, gives: str) -> Box:
    scale = layer.here.residual_scale
    return layer.leaf("add", f"{name}_add", "⊕", [scale != 1 and f"× {figure(scale)} before the sum"], gives)


def _attention(layer: _Scope, name: Literal["attn", "cross"]) -> Box:
    """Queries, keys and values on their ways, scores, softmax, weighted values, output."""
    at, across = layer.at(name), name == "cross"
    here = layer.here.across if across else layer.here
    a, rotated, biased = here.attention, isinstance(here.position, Rope), isinstance(here.position, Relative)
    steps = [("norm", "norm", "normed")] * (a.qk_norm != "none") + [("rot", "step", "rotated")] * rotated
    if a.qk_norm_place == "after":
        steps.reverse()
    q, k, v = ([at.matrix(letter, letter)] for letter in "qkv")
    for letter, way in (("q", q), ("k", k)):
        way += [at.leaf(kind, f"{letter}_{point}", f"{letter} {said}") for point, kind, said in steps]
    scores = "q·k" + words.score_scale(a)
    if a.softcap is not None:
        scores = f"{figure(a.softcap)}·tanh({scores}/{figure(a.softcap)})"
    masks = [a.causal and "causal", a.window and f"window {a.window:,}", a.sinks and "sinks"]
    weigh = [
        at.group("split", "qk.split", q, k),
        at.leaf("step", "scores", scores + " + by distance" * biased),
        at.leaf("step", "pattern", ", ".join(["softmax", *filter(None, masks)]), holds=["sinks"]),
    ]
    inside = [
        at.group("split", "qkv.split", weigh, v),
        at.leaf("step", "z", "weights · v"),
        layer.matrix(f"{name}.o", "o", gives=f"{name}_out"),
    ]
    groups = f" read {amount(a.n_kv_heads, 'key/value head')}" * (a.n_kv_heads != a.n_heads)
    has_bias = {(True, True): "bias", (True, False): "bias on q, k, v", (False, True): "bias on o"}
    lines = [
        f"{amount(a.n_heads, 'head')}{groups} of {a.head_dim}",
        "reads the encoder" if across else "causal" if a.causal else "sees both ways",
        a.window and f"window {a.window:,}" + " each way" * (not a.causal),
        rotated and f"rotation {words.turning(here.position)}",
        biased and "distance table on the scores",
        not a.normed and "reads the stream unnormed",
        a.qk_norm != "none" and f"q and k normed, {words.QK_NORMS[a.qk_norm]}",
        a.sinks and "a sink for each head",
        a.softcap is not None and f"scores capped at {figure(a.softcap)}",
        has_bias.get((a.bias, a.o_bias), "no bias"),
    ]
    kind, title = ("cross", "cross attention") if across else ("attention", "attention")
    return layer.group(kind, name, inside, title=title, lines=lines)


def _mlp(layer: _Scope) -> Box:
    at, mlp, c = layer.at("mlp"), layer.here.mlp, layer.here.hidden_size
    if isinstance(mlp, Experts):
        return _experts(layer)
    act = words.activation(mlp)
    brief, up = act.partition(" ")[0], at.matrix("up", "up")
    inside = [layer.group("split", "mlp.split", [at.matrix("gate", "gate")], [up])] if mlp.gated else [up]
    inside.append(at.leaf("step", "act", f"{brief}(gate) · up" if mlp.gated else f"{brief}(up)"))
    inside.append(layer.matrix("mlp.down", "down", gives="mlp_out"))
    lines = [_sizes(c, mlp.size, c), act, mlp.gated and "gated", "bias" if mlp.bias else "no bias"]
    return layer.group("mlp", "mlp", inside, title="MLP", lines=lines)


def _experts(layer: _Scope) -> Box:
    """A router beside what it chooses for; the chosen experts' sum; what every token takes beside them."""
    at, mlp, c = layer.at("mlp"), layer.here.mlp, layer.here.hidden_size
    act, size, bias = words.activation(mlp), _sizes(c, mlp.size, c), "bias" if mlp.bias else "no bias"
    taken = f"{mlp.top_k} of {amount(mlp.n_experts, 'expert')}"
    choice = f"softmax, best {mlp.top_k}" + ", scaled to sum 1" * mlp.normalized
    clamp = mlp.limit is not None and f"clamped at {figure(mlp.limit)}"
    lines = [f"{taken} for each token", size, act, "gated", bias, f"router: {choice}", clamp]
    way, alone = [size, f"{act}, gated", mlp.bias and "bias", clamp], mlp.shared_size is None
    given, first = "mlp_out" if alone else "BTC", ["mlp.experts.0"]
    inside = [
        at.group("split", "experts.split", [at.matrix("router", "router", choice)], []),
        layer.leaf("experts", "mlp.experts", taken, way, given, first, mlp.n_experts),
    ]
    if not alone:
        always = [_sizes(c, mlp.shared_size, c), "weighed by a sigmoid"]
        shared = at.leaf("experts", "shared", "shared expert", always, "BTC", ["shared", "shared_router"])
        both = layer.group("split", "mlp.split", inside, [shared])
        inside = [both, layer.leaf("step", "mlp.sum", "sum", gives="mlp_out")]
        lines.append(f"a shared expert of {mlp.shared_size:,}")
    return layer.group("mlp", "mlp", inside, title="experts", lines=lines)


# The same as a flat graph


def _edges(stacks: list[Box]) -> Iterator[Edge]:
    memory: list[Box] = []
    for stack in stacks:
        biases = [box for box in boxes([stack]) if box.kind == "aside"]
        memory = yield from _wires([stack], [], memory, biases)
    for box in boxes(stacks):
        if box.tied_to:
            yield Edge(source=box.tied_to, target=box.id, kind="tie", carries=None)


def _wires(
    sequence: list[Box], sources: list[Box], memory: list[Box], biases: list[Box]
) -> Generator[Edge, None, list[Box]]:
    """Arrows along boxes in a row, the first of which reads `sources`; returns the boxes that give what comes out."""
    stream: list[Box] = []  # what is led past a sublayer
    for box in sequence:
        if box.kind == "aside":
            continue
        if box.branches:
            stream, sources = sources, []
            for branch in box.branches:
                sources += yield from _wires(branch, stream, memory, biases)
            continue
        folded, across = box.kind == "folded", re.search(r"\.cross\.[kv]$", box.id)
        read = {
            "data": [] if across else sources,
            "residual": stream if box.kind == "add" else [],
            "bias": biases if folded or box.id.endswith(".attn.scores") else [],
            "memory": memory if folded or across else [],
        }
        for kind, several in read.items():
            yield from (Edge(source=one.id, target=box.id, kind=kind, carries=one.gives) for one in several)
        sources = [box]
    return sources


# Two models


def _role(box: Box) -> str:
    """What a box is in its model, whichever layer stands for the others."""
    return re.sub(r"layers\.\d+", "folded" if box.kind == "folded" else "layers.#", box.id)


def _said(several: Iterable[Box], holder: str = "") -> Iterator[tuple[str, tuple[str, str, tuple[str, ...]]]]:
    """Of every box that says something, by its role: what holds it, and its title and lines but for their numbers."""
    for box in several:
        if box.kind not in ("stack", "split", "residual", "add", "input", "output"):
            lines = tuple(re.sub(r"[\d,.]*\d", "#", line) for line in (box.title, *box.lines))
            yield _role(box), (holder, box.id, lines)
        for branch in box.branches:
            yield from _said(branch, box.kind)


def _differing(figure: Figure, other: Figure) -> list[str]:
    """Boxes that the other figure has not, or elsewhere, or of which it says something else; a table compares sizes."""
    theirs = {role: (holder, lines) for role, (holder, _, lines) in _said(other.stacks)}
    return [id_ for role, (holder, id_, lines) in _said(figure.stacks) if theirs.get(role) != (holder, lines)]


def _rows(models: list[Model]) -> Iterator[Row]:
    """Every choice that either of the models makes."""
    told = [_told(model) for model in models]
    for name in dict.fromkeys(name for one in told for name in one):
        values = [one.get(name) for one in told]
        if any(value is not None for value in values):
            yield Row(name=name, values=values, same=len(set(values)) == 1)


def _told(model: Model) -> Traits:
    spec = model.spec
    kinds = {kind: len(layers) for kind, layers in kinds_of_layers(spec).items()}
    told = words.traits(spec, kinds)
    layers = sum(p.size for p in model.layout if Place.of(p.name).layer is not None)
    return told | {"parameters": f"{count.total(model.layout):,}", "in the layers": f"{layers:,}"}
