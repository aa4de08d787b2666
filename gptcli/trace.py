"""Watching a forward pass: the names of its activations, and the probes that see them go by.

forward calls `x = probe("resid_mid", x)` where a tensor is born. A probe may note it; it hands it back. What no tensor
of the fused pass holds (scores, softmax weights) is computed on the side, only for the heads and queries that a probe
asks for by `selection`. Imports no torch: a probe only hands on what it is given.
"""

from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from gptcli.spec import Dense, Rope, Spec

# Every activation in order of birth, with its axes. B texts, T queries, S keys, C hidden size, H heads, G key/value
# heads, D head size, F MLP size, V vocabulary. `#` is the layer, from 0.
POINTS = {
    "embed": "BTC",
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
    "layers.#.attn.z": "BHTD",
    "layers.#.attn_out": "BTC",
    "layers.#.resid_mid": "BTC",
    "layers.#.mlp_norm": "BTC",
    "layers.#.mlp.up": "BTF",
    "layers.#.mlp.gate": "BTF",
    "layers.#.mlp.act": "BTF",
    "layers.#.mlp_out": "BTC",
    "layers.#.resid_post": "BTC",
    "final_norm": "BTC",
    "logits": "BTV",
}


def points(spec: Spec) -> Iterator[tuple[str, str]]:
    """(path, axes) of every activation that this architecture has, in order of birth."""
    absent = set()
    if not isinstance(spec.position, Rope):
        absent |= {"attn.q_rot", "attn.k_rot"}
    if not spec.attention.qk_norm:
        absent |= {"attn.q_norm", "attn.k_norm"}
    if spec.norm.placement == "none":
        absent |= {"attn_norm", "mlp_norm"}
    if not isinstance(spec.mlp, Dense):
        absent |= {"mlp_norm", "mlp.up", "mlp.gate", "mlp.act", "mlp_out"}
    elif not spec.mlp.gated:
        absent |= {"mlp.gate"}
    inside = [(p.removeprefix("layers.#."), a) for p, a in POINTS.items() if p.startswith("layers.#.")]
    inside = [(p, a) for p, a in inside if p not in absent]
    if spec.norm.placement == "post":
        inside = _norms_after_sums(inside)
    yield "embed", POINTS["embed"]
    for i in range(spec.n_layers):
        yield from ((f"layers.{i}.{point}", axes) for point, axes in inside)
    if spec.norm.final:
        yield "final_norm", POINTS["final_norm"]
    yield "logits", POINTS["logits"]


def _norms_after_sums(inside: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """A layer's points in order of birth where each norm takes the sum that its sublayer ends in."""
    norms = {"attn_norm": "resid_mid", "mlp_norm": "resid_post"}
    order = [point for point, _ in inside if point not in norms]
    for norm, follows in norms.items():
        if (norm, "BTC") in inside:
            order.insert(order.index(follows), norm)
    axes = dict(inside)
    return [(point, axes[point]) for point in order]


def sizes(spec: Spec, batch: int, queries: int, keys: int) -> dict[str, int]:
    """What each letter of POINTS stands for in one run."""
    mlp = spec.mlp.size if isinstance(spec.mlp, Dense) else 0
    a = spec.attention
    letters = {"B": batch, "T": queries, "S": keys, "C": spec.hidden_size, "V": spec.vocab_size, "F": mlp}
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
