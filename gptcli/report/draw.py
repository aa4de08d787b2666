"""`draw`: an architecture's structure as boxes and arrows, from its Spec and its layout alone. Loads no torch.

A drawing is a tree. A box stands for what its weights or its step do; inside a stack, a layer, an attention or an MLP
stand further boxes. `branches` holds them: one list is a sequence, several run side by side and read the same, an empty
one hands on what it reads. What leaves a box is its `gives`. The edges say the same as a flat graph.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import field, replace
from typing import Literal

from gptcli import count
from gptcli.checkpoint.patterns import runs
from gptcli.data import data, mutable
from gptcli.layout import AXES, Param, Place
from gptcli.report import ModelFacts, Report
from gptcli.report import traits as words
from gptcli.report.traits import Traits, amount, figure
from gptcli.source import Model
from gptcli.spec import Experts, Learned, NoMLP, NoNorm, Relative, Rope, Sinusoidal, Spec
from gptcli.trace import LAYER_POINTS, POINTS, sizes

Kind = Literal[
    "stack", "layer", "folded", "residual", "split",  # what holds others, or stands for many
    "attention", "cross", "mlp", "experts",
    "input", "output", "table", "aside", "norm", "matrix", "step", "add", "head",
]  # fmt: skip


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
    if len(models) < 2:
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
    spec, params = model.spec, model.layout
    stacks = [_Stack(spec, params, full, "encoder.").stack()] if spec.encoder is not None else []
    stacks.append(_Stack(spec, params, full, "").stack())
    known = {"N": spec.n_layers} | sizes(spec, 0, 0, 0)
    letters = {letter: known[letter] for letter in "NCPVHGDFE" if letter in known}
    edges = list(_edges(stacks))
    return Figure(model=model.facts(model.stored_dtype), letters=letters, stacks=stacks, edges=edges)


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


class _Stack:
    """Builds the boxes of one stack. at: `encoder.` for the encoder beside a decoder, else nothing."""

    def __init__(self, whole: Spec, params: Iterable[Param], full: bool, at: str):
        self.whole, self.full, self.at = whole, full, at
        self.spec = whole.encoder if at else whole
        self.params: dict[int | None, list[Param]] = {}
        for param in params:
            place = Place.of(param.name)
            if bool(place.stack) == bool(at):
                self.params.setdefault(place.layer, []).append(param)

    # Leaves

    def flow(self, axes: str, path: str = "", here: Spec | None = None, across: bool = False) -> Flow:
        """A tensor of these axes, in the letters of this stack. here: the layer; across: keys are the source's."""
        length = "S" if self.at else "T"
        letters = sizes(here or self.spec, 0, 0, 0) | {"B": "B", "T": length, "S": "S" if across else length}
        shape = [letters[axis] for axis in axes]
        return Flow(path=path and self.at + path, axes=list(axes.replace("T", length)), shape=shape)

    def leaf(self, kind: Kind, path: str, title: str, lines: Iterable[str] = (), gives: Flow | None = None,
             holds: tuple[str, ...] = (), times: int = 1) -> Box:  # fmt: skip
        """A box, with the weights whose names are those in `holds` or stand below them (its own path, if none)."""
        stems = [self.at + stem for stem in holds or (path,)]
        inside = self.params.get(Place.of(f"{path}.").layer, [])
        held = [p for p in inside if any(p.name == stem or p.name.startswith(f"{stem}.") for stem in stems)]
        tied = next((p.tied_to.rpartition(".")[0] for p in held if p.tied_to), "")
        listed = [Weight(name=p.name, axes=[AXES[axis] for axis in p.axes], shape=list(p.shape)) for p in held]
        return Box(
            id=self.at + path,
            kind=kind,
            title=title,
            lines=list(lines),
            parameters=count.total(held),
            times=times,
            weights=listed,
            tied_to=tied,
            gives=gives,
        )

    def matrix(self, path: str, title: str, gives: Flow) -> Box:
        """A linear map; its line says whether it has a bias."""
        box = self.leaf("matrix", path, title, gives=gives)
        return replace(box, lines=["bias"] * any(w.name.endswith(".bias") for w in box.weights))

    def norm(self, path: str, gives: Flow, title: str = "") -> Box:
        name = words.NORM_NAMES[self.spec.norm.kind]
        return self.leaf("norm", path, title or name, words.norm_details(self.spec), gives)

    def holder(self, kind: Kind, path: str, title: str, lines: Iterable[str], inside: list[Box]) -> Box:
        """A box around a sequence."""
        total = sum(box.parameters * box.times for box in inside)
        return Box(id=self.at + path, kind=kind, title=title, lines=list(lines), parameters=total,
                   gives=inside[-1].gives, branches=[inside])  # fmt: skip

    def beside(self, kind: Literal["split", "residual"], path: str, branches: list[list[Box]]) -> Box:
        """Branches that read the same; of a residual, what they give is added to what they read."""
        total = sum(box.parameters * box.times for branch in branches for box in branch)
        return Box(id=f"{self.at}{path}.{kind}", kind=kind, parameters=total, branches=branches)

    # A stack, from ids to what comes out

    def stack(self) -> Box:
        two, norm = self.whole.encoder is not None, self.spec.norm
        title = "encoder" if self.at else "decoder" if two else ""
        ids = "source ids" if self.at else "target ids" if two else "ids"
        inside = [Box(id=f"{self.at}ids", kind="input", title=ids, gives=self.flow("BT"))]
        inside += [*self.embedding(), *self.layers()]
        if norm.final:
            final = f"final {words.NORM_NAMES[norm.kind]}"
            inside.append(self.norm("final_norm", self.flow("BTC", "final_norm"), final))
        return self.holder("stack", "stack", title, [], [*inside, *self.head()])

    def embedding(self) -> list[Box]:
        spec = self.spec
        size, scale = spec.embed_size or spec.hidden_size, []
        if spec.embed_scale != 1:
            scale = [f"× {words.factor(spec.embed_scale, spec.hidden_size)}"]
        found = [self.leaf("table", "embed", "token table", [f"{amount(spec.vocab_size, 'row')} of {size:,}"])]
        if found[0].tied_to:
            found = [replace(found[0], lines=[*found[0].lines, "the decoder's table"])]
        if spec.embed_size is None:
            found = [replace(found[0], lines=found[0].lines + scale)]
        else:
            found = [replace(found[0], gives=self.flow("BTP"))]
            box = self.matrix("embed_in", "to the hidden size", self.flow("BTC"))
            found.append(replace(box, lines=[f"{size:,} → {spec.hidden_size:,}", *box.lines, *scale]))
        if spec.n_segments is not None:
            rows = f"{amount(spec.n_segments, 'row')} of {spec.hidden_size:,}"
            found.append(self.leaf("table", "segment_embed", "+ segment table", [rows]))
        if isinstance(spec.position, Learned):
            rows = [f"{amount(spec.context_length, 'row')} of {spec.hidden_size:,}"]
            rows += [f"{spec.position.offset} more, unused"] * (spec.position.offset > 0)
            found.append(self.leaf("table", "pos_embed", "+ position table", rows))
        if isinstance(spec.position, Sinusoidal):
            waves = {"neighbours": "each sine beside its cosine", "halves": "all sines, then all cosines"}
            how = [f"of position × {figure(spec.position.theta)}^(-2i/C)", waves[spec.position.pairs]]
            found.append(self.leaf("table", "sinusoids", "+ sines and cosines", how))
        *before, last = found
        found = [box if box.gives else replace(box, gives=self.flow("BTC")) for box in before]
        found.append(replace(last, gives=self.flow("BTC", "embed")))
        if spec.norm.embedding:
            found.append(self.norm("embed_norm", self.flow("BTC", "embed_norm")))
        if isinstance(spec.position, Relative):
            part = spec.position
            table = f"{amount(part.buckets, 'bucket')} × {amount(spec.attention.n_heads, 'head')}"
            said = [table, f"distances up to {part.max_distance:,}", "added to every layer's scores"]
            found.append(self.leaf("aside", "rel_bias", "distance table", said, self.flow("BHTS")))
        return found

    def head(self) -> list[Box]:
        spec, head = self.spec, self.spec.lm_head
        if head is None:
            return [] if self.at else [Box(id="out", kind="output", title="final vectors")]
        found, size = [], spec.embed_size or spec.hidden_size
        if head.transform is not None:
            box = self.matrix("lm_head.dense", "head transform", self.flow("BTC", "lm_head.dense"))
            lines = [
                f"{spec.hidden_size:,} → {spec.hidden_size:,}",
                *box.lines,
                f"then {words.activation(head.transform)}",
            ]
            found.append(replace(box, lines=lines))
            if not isinstance(spec.norm, NoNorm):
                found.append(self.norm("lm_head.norm", self.flow("BTC", "lm_head.norm")))
        if spec.embed_size is not None:
            box = self.matrix("embed_out", "to the rows' size", self.flow("BTP", "embed_out"))
            found.append(replace(box, lines=[f"{spec.hidden_size:,} → {size:,}", *box.lines]))
        lines = [f"{size:,} → {spec.vocab_size:,}"]
        lines += ["tied to the token table"] * head.tied + ["bias"] * head.bias
        lines += [f"× {words.factor(head.scale, spec.hidden_size)}"] * (head.scale != 1)
        lines += [f"capped at {figure(head.softcap)}"] if head.softcap is not None else []
        holds = ("lm_head.weight", "lm_head.bias")
        found.append(self.leaf("head", "lm_head", "lm_head", lines, self.flow("BTV", "logits"), holds))
        return [*found, Box(id="logits", kind="output", title="logits")]

    # Layers

    def layers(self) -> list[Box]:
        """Each kind of layer once, where its first layer stands: the commonest opened, the others by what differs."""
        kinds = kinds_of_layers(self.spec)
        opened = max(kinds, key=lambda kind: len(kinds[kind]))
        total = self.spec.n_layers
        found: list[Box] = []
        for kind, layers in kinds.items():
            title = f"layer × {total:,}" if len(layers) == total > 1 else f"layer {layers[0] + 1}"
            if len(kinds) > 1:
                title = f"layer{'s' * (len(layers) > 1)} {numbered(layers)} of {total:,}"
            if self.full or kind == opened:
                box = self.holder("layer", f"layers.{layers[0]}", title, [], self.layer(kind, layers[0]))
                found.append(replace(box, times=len(layers), layers=layers))
            else:
                found.append(self.folded(title, kind, layers, opened))
        return list(_merged(found, total))

    def folded(self, title: str, kind: Spec, layers: list[int], opened: Spec) -> Box:
        """Layers that are told by how they differ from the opened ones."""
        theirs, ours = words.layer_traits(kind), words.layer_traits(opened)
        lines = [f"{name}: {theirs[name] or 'none'}" for name in theirs if theirs[name] != ours[name]]
        path = f"layers.{layers[0]}"
        box = self.leaf("folded", path, title, lines, self.flow("BTC", f"{path}.resid_post"))
        return replace(box, times=len(layers), layers=layers, weights=[])

    def layer(self, here: Spec, i: int) -> list[Box]:
        at = f"layers.{i}"
        attention = self.attention("attn", at, here)
        has_mlp = not isinstance(here.mlp, NoMLP)
        if here.residual != "sequential" and has_mlp:
            return self.side_by_side(at, here, attention)
        found = self.sublayer(at, "attn", attention, here, "resid_mid")
        if here.encoder is not None:
            found += self.sublayer(at, "cross", self.attention("cross", at, here.across), here, "resid_cross")
        return found + (self.sublayer(at, "mlp", self.mlp(at, here), here, "resid_post") if has_mlp else [])

    def sublayer(self, at: str, name: str, box: Box, here: Spec, stream: str) -> list[Box]:
        """x + sublayer(x), with the norms where this architecture has them."""
        placement = here.norm.placement
        inside = [*self.before(at, name, here), box]
        if placement in ("output", "sandwich"):
            path = f"{at}.{name}_out_norm"
            inside.append(self.norm(path, self.flow("BTC", path)))
        stream = f"{at}.{stream}"
        past = self.beside("residual", f"{at}.{name}", [inside])
        if placement != "post":
            return [past, self.add(f"{at}.{name}", stream)]
        return [past, self.add(f"{at}.{name}", ""), self.norm(f"{at}.{name}_norm", self.flow("BTC", stream))]

    def before(self, at: str, name: str, here: Spec) -> list[Box]:
        """The norm of what a sublayer reads, where there is one."""
        normed = here.norm.placement in ("pre", "sandwich") and (name != "attn" or here.attention.normed)
        path = f"{at}.{name}_norm"
        return [self.norm(path, self.flow("BTC", path))] if normed else []

    def add(self, at: str, stream: str) -> Box:
        scale = self.spec.residual_scale
        lines = [f"× {figure(scale)} before the sum"] * (scale != 1)
        return Box(id=f"{self.at}{at}_add", kind="add", title="⊕", lines=lines, gives=self.flow("BTC", stream))

    def side_by_side(self, at: str, here: Spec, attention: Box) -> list[Box]:
        """The MLP beside the attention: each by a norm of its own, or both by one."""
        mlp = self.mlp(at, here)
        norms = self.before(at, "attn", here)
        branches = [[*norms, attention], [*self.before(at, "mlp", here), mlp]]
        if here.residual == "parallel_shared":
            both = [[attention], [mlp]]
            branches = [[*norms, self.beside("split", at, both)]] if norms else both
        return [self.beside("residual", at, branches), self.add(f"{at}.mlp", f"{at}.resid_post")]

    def attention(self, name: str, layer: str, here: Spec) -> Box:
        """Queries, keys and values on their ways, scores, softmax, weighted values, output."""
        a, across, at = here.attention, name == "cross", f"{layer}.{name}"

        def gives(point: str) -> Flow:
            return self.flow(LAYER_POINTS[f"{name}.{point}"], f"{at}.{point}", here, across)

        ways: dict[str, list[Box]] = {}
        for letter in "qkv":
            ways[letter] = [self.matrix(f"{at}.{letter}", letter, gives(letter))]
        for letter in "qk":
            path = f"{at}.{letter}_norm"
            normed, turned = [], []
            if a.qk_norm != "none":
                normed = [self.leaf("norm", path, f"{letter} normed", gives=gives(f"{letter}_norm"))]
            if isinstance(here.position, Rope):
                path = f"{at}.{letter}_rot"
                turned = [self.leaf("step", path, f"{letter} rotated", gives=gives(f"{letter}_rot"))]
            ways[letter] += normed + turned if a.qk_norm_place == "before" else turned + normed
        biased = not across and isinstance(self.spec.position, Relative)  # the same in every layer
        scores = "q·k" + words.score_scale(a)
        scores = scores if a.softcap is None else f"{figure(a.softcap)}·tanh({scores}/{figure(a.softcap)})"
        scores += " + by distance" * biased
        masks = ["causal"] * a.causal + ([f"window {a.window:,}"] if a.window is not None else []) + ["sinks"] * a.sinks
        met = self.beside("split", f"{at}.qk", [ways["q"], ways["k"]])
        seen = ", ".join(["softmax", *masks])
        weigh = [
            met,
            self.leaf("step", f"{at}.scores", scores, gives=gives("scores")),
            self.leaf("step", f"{at}.pattern", seen, gives=gives("pattern"), holds=(f"{at}.sinks",)),
        ]
        inside = [
            self.beside("split", f"{at}.qkv", [weigh, ways["v"]]),
            self.leaf("step", f"{at}.z", "weights · v", gives=gives("z")),
            self.matrix(f"{at}.o", "o", self.flow("BTC", f"{layer}.{name}_out")),
        ]
        return self.holder("cross" if across else "attention", at, "cross attention" if across else "attention",
                           _attention_lines(here, across, biased), inside)  # fmt: skip

    def mlp(self, layer: str, here: Spec) -> Box:
        at, mlp, c = f"{layer}.mlp", here.mlp, here.hidden_size
        out = self.flow("BTC", f"{layer}.mlp_out")
        if isinstance(mlp, Experts):
            return self.experts(at, here, out)

        def gives(point: str) -> Flow:
            return self.flow(POINTS[f"layers.#.mlp.{point}"], f"{at}.{point}", here)

        act = words.activation(mlp)
        brief = act.partition(" ")[0]
        up = self.matrix(f"{at}.up", "up", gives("up"))
        inside = [up]
        if mlp.gated:
            inside = [self.beside("split", at, [[self.matrix(f"{at}.gate", "gate", gives("gate"))], [up]])]
        acted = f"{brief}(gate) · up" if mlp.gated else f"{brief}(up)"
        inside.append(self.leaf("step", f"{at}.act", acted, gives=gives("act")))
        inside.append(self.matrix(f"{at}.down", "down", out))
        lines = [f"{c:,} → {mlp.size:,} → {c:,}", act, *["gated"] * mlp.gated, "bias" if mlp.bias else "no bias"]
        return self.holder("mlp", at, "MLP", lines, inside)

    def experts(self, at: str, here: Spec, out: Flow) -> Box:
        """A router beside what it chooses for; the chosen experts' sum; what every token takes beside them."""
        mlp, c = here.mlp, here.hidden_size
        router = self.matrix(f"{at}.router", "router", self.flow("BTE", f"{at}.router", here))
        choice = f"softmax, best {mlp.top_k}" + ", scaled to sum 1" * mlp.normalized
        router = replace(router, lines=[choice, *router.lines])
        act = words.activation(mlp)
        size = f"{c:,} → {mlp.size:,} → {c:,}"
        way = [size, f"{act}, gated", *["bias"] * mlp.bias]
        way += [f"clamped at {figure(mlp.limit)}"] if mlp.limit is not None else []
        taken = f"{mlp.top_k} of {amount(mlp.n_experts, 'expert')}"
        first = self.leaf("experts", f"{at}.experts", taken, way, out, (f"{at}.experts.0",), times=mlp.n_experts)
        inside = [self.beside("split", f"{at}.experts", [[router], []]), first]
        if mlp.shared_size is not None:
            shared = self.leaf("experts", f"{at}.shared", "shared expert",
                               [f"{c:,} → {mlp.shared_size:,} → {c:,}", "weighed by a sigmoid"], self.flow("BTC"),
                               (f"{at}.shared", f"{at}.shared_router"))  # fmt: skip
            inside[-1] = replace(first, gives=self.flow("BTC"))
            inside = [self.beside("split", at, [inside, [shared]]),
                      Box(id=f"{self.at}{at}.sum", kind="step", title="sum", gives=out)]  # fmt: skip
        lines = [f"{taken} for each token", size, act, "gated", "bias" if mlp.bias else "no bias", f"router: {choice}"]
        lines += [f"clamped at {figure(mlp.limit)}"] if mlp.limit is not None else []
        lines += [f"a shared expert of {mlp.shared_size:,}"] if mlp.shared_size is not None else []
        return self.holder("mlp", at, "experts", lines, inside)


def _attention_lines(here: Spec, across: bool, biased: bool) -> list[str]:
    a = here.attention
    heads = f"{amount(a.n_heads, 'head')} of {a.head_dim}"
    if a.n_kv_heads != a.n_heads:
        heads = f"{amount(a.n_heads, 'head')} read {amount(a.n_kv_heads, 'key/value head')} of {a.head_dim}"
    lines = [heads, "reads the encoder" if across else "causal" if a.causal else "sees both ways"]
    if a.window is not None:
        lines.append(f"window {a.window:,}" + " each way" * (not a.causal))
    if isinstance(here.position, Rope):
        lines.append(f"rotation {words.turning(here.position)}")
    lines += ["distance table on the scores"] * biased
    lines += ["reads the stream unnormed"] * (not a.normed)
    if a.qk_norm != "none":
        lines.append(f"q and k normed, {words.QK_NORMS[a.qk_norm]}")
    lines += ["a sink for each head"] * a.sinks
    lines += [f"scores capped at {figure(a.softcap)}"] if a.softcap is not None else []
    lines.append({(True, True): "bias", (True, False): "bias on q, k, v", (False, True): "bias on o"}.get(
        (a.bias, a.o_bias), "no bias"))  # fmt: skip
    return lines


def _merged(found: list[Box], total: int, most: int = 3) -> Iterator[Box]:
    """Folded layers of one size that differ in the same things are one box where there are more than `most` of them."""

    def alike(box: Box) -> tuple:
        return box.kind, box.parameters, tuple(line.partition(":")[0] for line in box.lines)

    groups: dict[tuple, list[Box]] = {}
    for box in found:
        groups.setdefault(alike(box) if box.kind == "folded" else (box.id,), []).append(box)
    for group in groups.values():
        if len(group) <= most:
            yield from group
            continue
        layers = sorted(layer for box in group for layer in box.layers)
        lines = [f"{one} … {last.partition(': ')[2]}" for one, last in zip(group[0].lines, group[-1].lines)]
        title = f"layers {numbered(layers)} of {total:,}"
        yield replace(
            group[0], title=title, lines=[f"each its own {line}" for line in lines], times=len(layers), layers=layers
        )


# The same as a flat graph


def _edges(stacks: list[Box]) -> Iterator[Edge]:
    memory: Box | None = None
    for stack in stacks:
        aside = {box.id: box for box in boxes([stack]) if box.kind == "aside"}
        [inside] = stack.branches
        wires = _Wires(memory, next(iter(aside.values()), None))
        [memory] = wires.through([box for box in inside if box.id not in aside], [])
        yield from wires.edges
    for box in boxes(stacks):
        if box.tied_to:
            yield Edge(source=box.tied_to, target=box.id, kind="tie", carries=None)


class _Wires:
    """Walks a sequence of boxes and joins what gives to what reads."""

    def __init__(self, memory: Box | None, aside: Box | None):
        self.memory, self.aside = memory, aside
        self.edges: list[Edge] = []

    def join(self, sources: list[Box], target: Box, kind: str = "data") -> None:
        self.edges += [Edge(source=s.id, target=target.id, kind=kind, carries=s.gives) for s in sources]

    def through(self, sequence: list[Box], sources: list[Box]) -> list[Box]:
        """Joins them in a row, from what `sources` give on; returns the boxes that give what comes out."""
        stream: list[Box] = []
        for box in sequence:
            if box.kind in ("split", "residual"):
                stream = sources if box.kind == "residual" else stream
                sources = [end for branch in box.branches for end in self.through(branch, sources)]
            elif box.branches:
                sources = self.through(box.branches[0], sources)
            else:
                across = self.memory is not None and re.search(r"\.cross\.[kv]$", box.id)
                self.join([self.memory] if across else sources, box, "memory" if across else "data")
                if box.kind == "add":
                    self.join(stream, box, "residual")
                if self.aside is not None and (box.kind == "folded" or box.id.endswith(".attn.scores")):
                    self.join([self.aside], box, "bias")
                if self.memory is not None and box.kind == "folded":
                    self.join([self.memory], box, "memory")
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
