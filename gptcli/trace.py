"""Watching a forward pass: the names of its activations, and the probes that see them go by.

forward calls `x = probe("resid_mid", x)` where a tensor is born. A probe may note it; it hands it back. What no tensor
of the fused pass holds (scores, softmax weights) is computed on the side, only for the heads and queries that a probe
asks for by `selection`. Imports no torch: a probe only hands on what it is given.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal, NamedTuple

from gptcli.layout import Place
from gptcli.memory import QUERY_BLOCK
from gptcli.spec import Dense, Experts, NoMLP, Rope, Spec

# Every activation in order of birth, with its axes. B texts, T queries, S keys, C hidden size, P the size of a token's
# row where it is not C, H heads, G key/value heads, D head size, F MLP size, E experts, V vocabulary. `#` is the layer,
# from 0.
ATTENTION_POINTS = {
    "q": "BHTD",
    "k": "BGSD",
    "v": "BGSD",
    "q_norm": "BHTD",
    "k_norm": "BGSD",
    "q_rot": "BHTD",
    "k_rot": "BGSD",
    "scores": "BHTS",
    "pattern": "BHTS",
    "sink": "BHT",
    "z": "BHTD",
}
LAYER_POINTS = {
    "resid_pre": "BTC",
    "attn_norm": "BTC",
    **{f"attn.{name}": axes for name, axes in ATTENTION_POINTS.items()},
    "attn_out": "BTC",
    "attn_out_norm": "BTC",
    "resid_mid": "BTC",
    "cross_norm": "BTC",
    **{f"cross.{name}": axes for name, axes in ATTENTION_POINTS.items() if not name.endswith("_rot")},
    "cross_out": "BTC",
    "cross_out_norm": "BTC",
    "resid_cross": "BTC",
    "mlp_norm": "BTC",
    "mlp.router": "BTE",
    "mlp.up": "BTF",
    "mlp.gate": "BTF",
    "mlp.act": "BTF",
    "mlp_out": "BTC",
    "mlp_out_norm": "BTC",
    "resid_post": "BTC",
}
STACK_POINTS = {
    "embed": "BTC",
    "embed_norm": "BTC",
    **{f"layers.#.{name}": axes for name, axes in LAYER_POINTS.items()},
    "final_norm": "BTC",
}
# An encoder's positions are the ones that a decoder's cross attention reads.
POINTS = {
    **{f"encoder.{n}": axes.replace("T", "S") for n, axes in STACK_POINTS.items() if "cross" not in n},
    **STACK_POINTS,
    "lm_head.dense": "BTC",
    "lm_head.norm": "BTC",
    "embed_out": "BTP",
    "logits": "BTV",
}

# What no tensor of the fused pass holds: computed on the side for who asks.
BESIDE = ("scores", "pattern", "sink")
ON_THE_SIDE = tuple(path for path in POINTS if path.rpartition(".")[2] in BESIDE)


def points(spec: Spec) -> Iterator[tuple[str, str]]:
    """(path, axes) of every activation that this architecture has, in order of birth."""
    if spec.encoder is not None:
        yield from ((f"encoder.{path}", axes.replace("T", "S")) for path, axes in points(spec.encoder))
    yield from ((path, POINTS[re.sub(r"^layers\.\d+", "layers.#", path)]) for path in _names(spec))


def _names(spec: Spec) -> Iterator[str]:
    yield "embed"
    yield from ("embed_norm",) * spec.norm.embedding
    for i in range(spec.n_layers):
        yield from (f"layers.{i}.{name}" for name in _inside(spec.at(i)))
    yield from ("final_norm",) * spec.norm.final
    if spec.lm_head is not None:
        yield from ("lm_head.dense", "lm_head.norm") if spec.lm_head.transform is not None else ()
        yield from ("embed_out",) * (spec.embed_size is not None)
        yield "logits"


def _inside(spec: Spec) -> Iterator[str]:
    """The points of one layer, in order of birth."""
    placement = spec.norm.placement
    before, post = placement in ("pre", "sandwich"), placement == "post"
    yield "resid_pre"
    yield from ("attn_norm",) * (before and spec.attention.normed)
    yield from _attending("attn", spec)
    yield from ("attn_norm",) * post
    yield "resid_mid"
    if spec.encoder is not None:
        yield from ("cross_norm",) * before
        yield from _attending("cross", spec.across)
        yield from ("cross_norm",) * post
        yield "resid_cross"
    if not isinstance(spec.mlp, NoMLP):
        yield from ("mlp_norm",) * (before and spec.residual != "parallel_shared")
        if isinstance(spec.mlp, Dense):
            yield from ("mlp.up", "mlp.gate", "mlp.act") if spec.mlp.gated else ("mlp.up", "mlp.act")
        else:
            yield "mlp.router"
        yield "mlp_out"
        yield from ("mlp_out_norm",) * (placement in ("output", "sandwich"))
        yield from ("mlp_norm",) * post
    yield "resid_post"


def _attending(at: str, spec: Spec) -> Iterator[str]:
    """The points of one attention and of what it gives."""
    a = spec.attention
    normed = ("q_norm", "k_norm") if a.qk_norm != "none" else ()
    turned = ("q_rot", "k_rot") if isinstance(spec.position, Rope) else ()
    later = (*normed, *turned) if a.qk_norm_place == "before" else (*turned, *normed)
    sink = ("sink",) * a.sinks
    yield from (f"{at}.{name}" for name in ("q", "k", "v", *later, "scores", "pattern", *sink, "z"))
    yield f"{at}_out"
    yield from (f"{at}_out_norm",) * (spec.norm.placement in ("output", "sandwich"))


def sizes(spec: Spec, batch: int, queries: int, keys: int) -> dict[str, int]:
    """What each letter of POINTS stands for in one run and one layer (`spec.at(i)`)."""
    a, mlp = spec.attention, spec.mlp
    letters = {"B": batch, "T": queries, "S": keys, "C": spec.hidden_size, "V": spec.vocab_size}
    letters |= {"F": mlp.size} if isinstance(mlp, Dense) else {"E": mlp.n_experts} if isinstance(mlp, Experts) else {}
    letters |= {} if spec.embed_size is None else {"P": spec.embed_size}
    return letters | {"H": a.n_heads, "G": a.n_kv_heads, "D": a.head_dim}


def shapes(spec: Spec, batch: int, length: int, source: int = 0) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """(path, axes, shape) of every activation, for texts of so many tokens and sources of so many."""
    for path, axes in points(spec):
        place = Place.of(path)
        here = place.spec(spec)
        across = place.name.startswith("cross.")
        letters = sizes(here.across if across else here, batch, length, source if across or place.stack else length)
        yield path, axes, tuple(letters[axis] for axis in axes)


class Selection(NamedTuple):
    """Heads and queries whose scores and softmax weights are wanted: slices of the H and T axes.

    by: what is computed and handed on at once, in order, for who holds none: one head, or some queries of all heads.
    """

    heads: slice = slice(None)
    queries: slice = slice(None)
    by: Literal["whole", "head", "queries"] = "whole"

    def parts(self, n_heads: int, n_queries: int) -> "Iterator[Selection]":
        """What is computed at once, one after the other."""
        match self.by:
            case "whole":
                yield self
            case "head":
                yield from (Selection(slice(head, head + 1), self.queries) for head in range(n_heads)[self.heads])
            case "queries":
                first, stop, _ = self.queries.indices(n_queries)
                for start in range(first, stop, QUERY_BLOCK):
                    yield Selection(self.heads, slice(start, min(start + QUERY_BLOCK, stop)))


EVERYTHING = Selection()


class Silent:
    """A probe that watches nothing, and costs nothing."""

    def __call__(self, name: str, x: Any) -> Any:
        return x

    def at(self, scope: str) -> "Silent":
        return self

    def selection(self, name: str) -> Selection | None:
        """Which part of `name` should be computed on the side; None: nobody asked."""
        return None

    def replaces(self, name: str) -> bool:
        """Does it hand back another tensor for `name`? Asked of scores and pattern, which only then are computed for
        the run itself.
        """
        return False

    def replace(self, name: str, x: Any) -> Any:
        """Scores or pattern, of every head and query, as the run goes on with them."""
        return x


SILENT = Silent()


class Recorder(Silent):
    """A probe that keeps what was asked for, in `kept`, by path, in order of birth.

    wanted: paths, or patterns of paths (`layers.3.*`). select: the part of scores and pattern to compute. note: what to
    keep of a tensor, `note(path, x)`; the tensor itself when left out.
    """

    def __init__(
        self,
        *wanted: str,
        select: Selection = EVERYTHING,
        note: Callable[[str, Any], Any] = lambda path, x: x,
    ):
        self.wanted, self.select, self.note, self.scope = wanted, select, note, ""
        self.kept: dict[str, Any] = {}

    def wants(self, name: str) -> bool:
        return any(fnmatchcase(self.scope + name, pattern) for pattern in self.wanted)

    def __call__(self, name: str, x: Any) -> Any:
        if self.wants(name):
            self.kept[self.scope + name] = self.note(self.scope + name, x)
        return x

    def at(self, scope: str) -> "Recorder":
        nested = Recorder(*self.wanted, select=self.select, note=self.note)
        nested.scope, nested.kept = f"{self.scope}{scope}.", self.kept
        return nested

    def selection(self, name: str) -> Selection | None:
        return self.select if self.wants(name) else None


Change = Callable[[Any], Any]


class Editor(Silent):
    """A probe that replaces what goes by: of each path, the changes that are made to it, one after the other.

    A change takes a tensor and gives a new one; the old one it leaves as it is, for other activations may be the same
    tensor.
    """

    def __init__(self, changes: Mapping[str, Sequence[Change]], scope: str = ""):
        self.changes, self.scope = changes, scope

    def __call__(self, name: str, x: Any) -> Any:
        # Of what is computed on the side, what is shown comes from what was replaced.
        return x if name in BESIDE else self.replace(name, x)

    def at(self, scope: str) -> "Editor":
        return Editor(self.changes, f"{self.scope}{scope}.")

    def replaces(self, name: str) -> bool:
        return self.scope + name in self.changes

    def replace(self, name: str, x: Any) -> Any:
        for change in self.changes.get(self.scope + name, ()):
            x = change(x)
        return x


class Both(Silent):
    """Two probes, one after the other: the second sees what the first hands back.

    At most one of them may ask for a part of scores and pattern: both would be shown the same part.
    """

    def __init__(self, first: Silent, second: Silent):
        self.first, self.second = first, second

    def __call__(self, name: str, x: Any) -> Any:
        return self.second(name, self.first(name, x))

    def at(self, scope: str) -> "Both":
        return Both(self.first.at(scope), self.second.at(scope))

    def selection(self, name: str) -> Selection | None:
        return self.first.selection(name) or self.second.selection(name)

    def replaces(self, name: str) -> bool:
        return self.first.replaces(name) or self.second.replaces(name)

    def replace(self, name: str, x: Any) -> Any:
        return self.second.replace(name, self.first.replace(name, x))
