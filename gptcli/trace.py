"""Watching a forward pass: the names of its activations, and the probes that see them go by.

forward calls `x = probe("resid_mid", x)` where a tensor is born. A probe may note it; it hands it back. What no tensor
of the fused pass holds (scores, softmax weights) is computed on the side, only for the heads and queries that a probe
asks for by `selection`. Imports no torch: a probe only hands on what it is given.
"""

from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from gptcli.spec import Dense, Experts, NoMLP, Rope, Spec

# Every activation in order of birth, with its axes. B texts, T queries, S keys, C hidden size, P the size of a token's
# row where it is not C, H heads, G key/value heads, D head size, F MLP size, E experts, V vocabulary. `#` is the layer,
# from 0.
POINTS = {
    "embed": "BTC",
    "embed_norm": "BTC",
    "layers.#.resid_pre": "BTC",
    "layers.#.attn_norm": "BTC",
    "layers.#.attn.q": "BHTD",
    "layers.#.attn.k": "BGSD",
    "layers.#.attn.v": "BGSD",
    "layers.#.attn.q_norm": "BHTD",
    "layers.#.attn.k_norm": "BGSD",
    "layers.#.attn.q_rot": "BHTD",
    "layers.#.attn.k_rot": "BGSD",
    "layers.#.attn.scores": "BHTS",
    "layers.#.attn.pattern": "BHTS",
    "layers.#.attn.sink": "BHT",
    "layers.#.attn.z": "BHTD",
    "layers.#.attn_out": "BTC",
    "layers.#.attn_out_norm": "BTC",
    "layers.#.resid_mid": "BTC",
    "layers.#.mlp_norm": "BTC",
    "layers.#.mlp.router": "BTE",
    "layers.#.mlp.up": "BTF",
    "layers.#.mlp.gate": "BTF",
    "layers.#.mlp.act": "BTF",
    "layers.#.mlp_out": "BTC",
    "layers.#.mlp_out_norm": "BTC",
    "layers.#.resid_post": "BTC",
    "final_norm": "BTC",
    "embed_out": "BTP",
    "logits": "BTV",
}

# What no tensor of the fused pass holds: computed on the side for who asks.
ON_THE_SIDE = ("layers.#.attn.scores", "layers.#.attn.pattern", "layers.#.attn.sink")


def points(spec: Spec) -> Iterator[tuple[str, str]]:
    """(path, axes) of every activation that this architecture has, in order of birth."""
    yield "embed", POINTS["embed"]
    if spec.norm.embedding:
        yield "embed_norm", POINTS["embed_norm"]
    for i in range(spec.n_layers):
        yield from ((f"layers.{i}.{point}", POINTS[f"layers.#.{point}"]) for point in _inside(spec.at(i)))
    if spec.norm.final:
        yield "final_norm", POINTS["final_norm"]
    if spec.embed_size is not None:
        yield "embed_out", POINTS["embed_out"]
    yield "logits", POINTS["logits"]


def _inside(spec: Spec) -> Iterator[str]:
    """The points of one layer, in order of birth."""
    placement, a = spec.norm.placement, spec.attention
    before, output, post = placement in ("pre", "sandwich"), placement in ("output", "sandwich"), placement == "post"
    normed = ("attn.q_norm", "attn.k_norm") if a.qk_norm != "none" else ()
    turned = ("attn.q_rot", "attn.k_rot") if isinstance(spec.position, Rope) else ()
    yield "resid_pre"
    yield from ("attn_norm",) * before
    yield from ("attn.q", "attn.k", "attn.v")
    yield from (*normed, *turned) if a.qk_norm_place == "before" else (*turned, *normed)
    yield from ("attn.scores", "attn.pattern")
    yield from ("attn.sink",) * a.sinks
    yield from ("attn.z", "attn_out")
    yield from ("attn_out_norm",) * output
    yield from ("attn_norm",) * post
    yield "resid_mid"
    if not isinstance(spec.mlp, NoMLP):
        yield from ("mlp_norm",) * (before and spec.residual != "parallel_shared")
        if isinstance(spec.mlp, Dense):
            yield from ("mlp.up", "mlp.gate", "mlp.act") if spec.mlp.gated else ("mlp.up", "mlp.act")
        else:
            yield "mlp.router"
        yield "mlp_out"
        yield from ("mlp_out_norm",) * output
        yield from ("mlp_norm",) * post
    yield "resid_post"


def sizes(spec: Spec, batch: int, queries: int, keys: int) -> dict[str, int]:
    """What each letter of POINTS stands for in one run and one layer (`spec.at(i)`)."""
    a, mlp = spec.attention, spec.mlp
    letters = {"B": batch, "T": queries, "S": keys, "C": spec.hidden_size, "V": spec.vocab_size}
    letters |= {"F": mlp.size} if isinstance(mlp, Dense) else {"E": mlp.n_experts} if isinstance(mlp, Experts) else {}
    letters |= {} if spec.embed_size is None else {"P": spec.embed_size}
    return letters | {"H": a.n_heads, "G": a.n_kv_heads, "D": a.head_dim}


class Selection(NamedTuple):
    """Heads and queries whose scores and softmax weights are wanted: slices of the H and T axes."""

    heads: slice = slice(None)
    queries: slice = slice(None)


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
