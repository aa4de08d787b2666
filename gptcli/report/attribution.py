"""`trace --attribute`: a token's logit at a position, split over everything that the residual stream there is made of.

The stream is a sum, and the head reads it by a matrix, so the logit is a sum too once what isn't linear in between is
held at the run's own numbers: of every norm on the way its scale (1/std or 1/rms; the mean is linear), and where the
head has an activation, what it multiplies each number by. Read from the logit back to the embedding, that path is one
vector of weights a token, which each part is multiplied by.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from gptcli.errors import GptcliError
from gptcli.report import RunReport
from gptcli.report.proof import Check, check, findings, unwatched
from gptcli.report.topk import places
from gptcli.run import Run
from gptcli.spec import Dense, Experts, LayerNorm, Learned, NoMLP, NoNorm, Sinusoidal, Spec
from gptcli.tokens import Token
from gptcli.trace import Recorder

if TYPE_CHECKING:
    from torch import Tensor

    from gptcli.model.measure import Ranked
    from gptcli.model.weights import Weights

# Largest |sum of the parts - logit| that rounding explains, relative to the sum of the parts' sizes: half types round
# the residual stream at every step.
TOLERANCE = {"float64": 1e-9, "float32": 1e-5, "bfloat16": 2e-2, "float16": 5e-3}
LARGEST = 12  # parts that a person is shown
# The activations that a path is read from.
STREAM = ("resid_pre", "resid_mid", "resid_cross", "resid_post", "attn_out", "cross_out", "mlp_out")
INSIDE = (*STREAM, "attn_norm", "mlp_norm", "attn.z", "cross.z", "mlp.router")
WANTED = ("embed", "embed_norm", *(f"layers.*.{name}" for name in INSIDE), "lm_head.dense")

Kind = Literal["embedding", "head", "mlp", "bias", "remainder"]


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one part gives to the logit.

    kind: a row of a table (embedding), an attention's head, an MLP or one of its experts with its biases, a bias that
    stands alone, or what no part gives (remainder). path: the activation or the weight that it is made of; head:
    from 0; layer_index: from 0, None outside the layers.
    """

    label: str
    kind: Kind
    path: str
    layer_index: int | None
    head: int | None
    value: float


@dataclass(frozen=True, kw_only=True)
class Group:
    """Parts that stand together: the embedding, a layer, the head. parts: their places among all; value: their sum."""

    name: str
    layer_index: int | None
    parts: list[int]
    value: float


@dataclass(frozen=True, kw_only=True)
class Split:
    """One token's logit at one position. parts: in order of birth; sum: of them all.

    largest: places of the parts of largest size, in that order; rest: the sum of the others.
    """

    position: int
    token: str
    id: int
    target: str
    logit: float
    prob: float
    rank: int
    parts: list[Part]
    sum: float
    groups: list[Group]
    largest: list[int]
    rest: float


@dataclass(kw_only=True)
class AttributionReport(RunReport):
    """frozen: what was held at the run's own numbers: norms' scales, and an activation's factors."""

    schema = "gptcli.attribution/1"
    n_layers: int
    fills: bool
    frozen: list[str]
    splits: list[Split]
    proof: list[Check]


def attribution_report(run: Run, words: list[str], position: str, top: int = LARGEST) -> AttributionReport:
    """The logits of the tokens that `words` name, split, at each position that is meant. Raises GptcliError."""
    import torch

    from gptcli.model.measure import rank

    spec = run.model.spec
    if spec.lm_head is None:
        raise GptcliError(
            f"{run.model.shown} has no head: there is no logit to split", "trace shows its vectors", "head"
        )
    run.single("a logit is of one")
    queries = places(run, 0, position)
    ids = list(dict.fromkeys(map(run.find, words)))
    recorder = Recorder(*WANTED, note=lambda path, x: x[0, ..., queries, :].clone())
    watched = run.forward("all", recorder)
    splits = []
    with torch.inference_mode():
        for at, query in enumerate(queries):
            path = Path(run, {name: x[..., at, :] for name, x in recorder.kept.items()}, query, ids)
            ranked = {one.id: one for one in rank(watched[0, query], 1, tuple(ids))}
            splits += [_split(run, query, ranked[id_], parts, top) for id_, parts in zip(ids, zip(*path.parts))]
    proof = [_adds_up(run, splits), unwatched(run, watched)]
    return AttributionReport(
        **run.told(),
        n_layers=spec.n_layers,
        fills=run.model.fills,
        frozen=path.frozen,
        splits=splits,
        proof=proof,
        findings=findings(run, proof, watched[0, queries]),
    )


def _adds_up(run: Run, splits: list[Split]) -> Check:
    gaps = [abs(one.sum - one.logit) / max(math.fsum(abs(p.value) for p in one.parts), 1e-30) for one in splits]
    worst = max(gaps, key=lambda gap: (math.isnan(gap), gap))
    return check("parts sum to the logit (relative to their sizes)", worst, TOLERANCE[run.facts().dtype])


def _split(run: Run, query: int, ranked: "Ranked", parts: tuple[Part, ...], top: int) -> Split:
    order = sorted(range(len(parts)), key=lambda i: -abs(parts[i].value))
    return Split(
        position=query,
        token=run.tokens()[0][query].token,
        id=ranked.id,
        target=Token.of(ranked.id, run.labels).token,
        logit=ranked.logit,
        prob=ranked.prob,
        rank=ranked.rank,
        parts=list(parts),
        sum=math.fsum(part.value for part in parts),
        groups=list(_groups(parts)),
        largest=order[:top],
        rest=math.fsum(parts[i].value for i in order[top:]),
    )


def _groups(parts: Sequence[Part]) -> Iterator[Group]:
    first = next((i for i, part in enumerate(parts) if part.layer_index is not None), 0)
    places: dict[tuple[str, int | None], list[int]] = {}
    for i, layer in enumerate(part.layer_index for part in parts):
        name = f"layer {layer + 1}" if layer is not None else "embedding" if i < first else "head"
        places.setdefault((name, layer), []).append(i)
    for (name, layer), inside in places.items():
        yield Group(name=name, layer_index=layer, parts=inside, value=math.fsum(parts[i].value for i in inside))


class Path:
    """The way back from some tokens' logits at one position to the embedding, every norm's scale frozen.

    kept: the activations at that position, [C] or [H, D]. parts: what was found on the way, in order of birth, each as
    many times as there are tokens; frozen: what was held at the run's numbers.
    """

    def __init__(self, run: Run, kept: "dict[str, Tensor]", query: int, ids: list[int]):
        self.run, self.spec, self.weights, self.kept, self.query = run, run.model.spec, run.weights, kept, query
        self.parts: list[list[Part]] = []
        self.frozen: list[str] = []
        g = self.head(ids)  # [n, C]: what each of the n logits makes of each number of the stream
        for i in reversed(range(self.spec.n_layers)):
            g = self.layer(g, i)
        self.embedding(g)
        if self.spec.lm_head.softcap is not None:
            self.cap(self.spec.lm_head.softcap)
        self.parts.reverse()
        self.frozen.reverse()

    def add(self, label: str, kind: Kind, path: str, values: "Tensor", layer: int | None = None, head=None) -> None:
        """values [n]: of each token."""
        about = {"label": label, "kind": kind, "path": path, "layer_index": layer, "head": head}
        self.parts.append([Part(**about, value=value) for value in values.tolist()])

    def bias(self, g: "Tensor", label: str, path: str, layer: int | None = None) -> None:
        """What a bias gives, where there is one."""
        if path in self.weights:
            self.add(label, "bias", path, g @ _wide(self.weights[path]), layer)

    def through(self, g: "Tensor", path: str, x: "Tensor", layer: int | None = None) -> "Tensor":
        """Back through a norm of x [C] at its own scale: weights of what it gives [n, C] → of what it took [n, C]."""
        norm = self.spec.norm
        if isinstance(norm, NoNorm):
            return g
        self.frozen.append(path)
        name = path if layer is None else f"L{layer} {path.partition('.')[2].partition('.')[2]}"
        self.bias(g, f"{name} bias", f"{path}.bias", layer)
        x, weight = _wide(x), self.weights.get(f"{path}.weight")
        weight = 1.0 if weight is None else _wide(weight)
        if isinstance(norm, LayerNorm):
            x = x - x.mean()
            g = g * weight * (x.square().mean() + norm.eps).rsqrt()
            return g - g.mean(-1, keepdim=True)
        return g * (norm.offset + weight) * (x.square().mean() + norm.eps).rsqrt()

    def head(self, ids: list[int]) -> "Tensor":
        """The rows of the head [n, P], taken back to the stream after the last layer [n, C]."""
        head, w = self.spec.lm_head, self.weights
        if head.bias:
            self.add("head bias", "bias", "lm_head.bias", _wide(w["lm_head.bias"][ids]) * head.scale)
        g = _wide(w["lm_head.weight"][ids]) * head.scale  # [n, P]
        if "embed_out.weight" in w:
            g = g @ _wide(w["embed_out.weight"])  # [n, P] · [P, C] → [n, C]
        if head.transform is not None:
            from gptcli.model.ops import ACTIVATIONS

            before = _wide(self.kept["lm_head.dense"])
            after = ACTIVATIONS[head.transform.activation](before)
            g = self.through(g, "lm_head.norm", after)
            self.frozen.append(f"lm_head {head.transform.activation}")
            g = g * (after / before).nan_to_num(nan=0.0)  # 0 gives 0, whatever it is multiplied by
            self.bias(g, "head dense bias", "lm_head.dense.bias")
            g = g @ _wide(w["lm_head.dense.weight"])
        last = f"layers.{self.spec.n_layers - 1}.resid_post"
        return self.through(g, "final_norm", self.kept[last]) if self.spec.norm.final else g

    def layer(self, g: "Tensor", i: int) -> "Tensor":
        """Back through a layer: its sublayers from the last to the first, each of which was added to the stream."""
        spec, at = self.spec.at(i), f"layers.{i}"
        sublayers = [("attn", "resid_pre"), *([("cross", "resid_mid")] if spec.encoder is not None else [])]
        if not isinstance(spec.mlp, NoMLP):
            sublayers.append(("mlp", "resid_mid" if spec.encoder is None else "resid_cross"))
        for name, stream in reversed(sublayers):
            out, scale = self.kept[f"{at}.{name}_out"], spec.residual_scale
            if spec.norm.placement == "post":
                added = out if scale == 1.0 else out * scale
                g = self.through(g, f"{at}.{name}_norm", self.kept[f"{at}.{stream}"] + added, i)
            h = g * scale
            if spec.norm.placement in ("output", "sandwich"):
                h = self.through(h, f"{at}.{name}_out_norm", out, i)
            if name == "mlp":
                self.mlp(h, i, spec, stream)
            else:
                self.attention(h, i, name)
        return g

    def attention(self, h: "Tensor", i: int, name: str) -> None:
        """Each head's z through its columns of the output projection, and that projection's bias."""
        at, across = f"layers.{i}.{name}", " cross " * (name == "cross")
        self.bias(h, f"L{i} {name} bias", f"{at}.o.bias", i)
        z = _wide(self.kept[f"{at}.z"])  # [H, D]
        given = (h @ _wide(self.weights[f"{at}.o.weight"])).unflatten(-1, z.shape)  # [n, C] · [C, H·D] → [n, H, D]
        for head, values in reversed(list(enumerate((given * z).sum(-1).unbind(-1)))):
            self.add(f"L{i}{across}H{head}", "head", f"{at}.z", values, i, head)

    def mlp(self, h: "Tensor", i: int, spec: Spec, stream: str) -> None:
        """What the MLP gave, its biases with it; of experts, what each gave that the token took."""
        at = f"layers.{i}"
        if isinstance(spec.mlp, Dense):
            self.add(f"L{i} mlp", "mlp", f"{at}.mlp_out", h @ _wide(self.kept[f"{at}.mlp_out"]), i)
            return
        for label, path, out in reversed(list(self.experts(spec.mlp, self.weights.at(f"{at}.mlp"), i, spec, stream))):
            self.add(label, "mlp", path, h @ _wide(out), i)

    def experts(
        self, part: Experts, w: "Weights", i: int, spec: Spec, stream: str
    ) -> "Iterator[tuple[str, str, Tensor]]":
        """Label, path and what it gave [C] of every expert that this token took."""
        from gptcli.model.ops import one_expert, route, shared_expert

        at = f"layers.{i}"
        # Without a norm of its own it reads the stream, or what the attention's norm gave both.
        reads = "attn_norm" if spec.residual == "parallel_shared" else "mlp_norm"
        reads = reads if spec.norm.placement in ("pre", "sandwich") else stream
        x = self.kept[f"{at}.{reads}"][None]  # [1, C]
        weights, taken = route(self.kept[f"{at}.mlp.router"][None], part)  # two of [1, k]
        for weight, expert in sorted(zip(weights[0], taken[0].tolist()), key=lambda pair: pair[1]):
            given = one_expert(x, w.at(f"experts.{expert}"), part)[0]
            yield f"L{i} expert {expert}", f"{at}.mlp.experts.{expert}", weight * given
        if part.shared_size is not None:
            yield f"L{i} shared expert", f"{at}.mlp.shared", shared_expert(x, w, part)[0]

    def embedding(self, g: "Tensor") -> None:
        """The rows that the embedding is the sum of."""
        import torch

        from gptcli.model.ops import linear, sinusoids

        spec, w = self.spec, self.weights
        if spec.norm.embedding:
            g = self.through(g, "embed_norm", self.kept["embed"])
        position = spec.position
        if isinstance(position, Learned):
            row = w["pos_embed.weight"][self.query + position.offset]
            self.add("pos_embed", "embedding", "pos_embed.weight", g @ _wide(row))
        if isinstance(position, Sinusoidal):
            waves = sinusoids(torch.tensor([[self.query]]), spec.hidden_size, position)[0, 0]
            self.add("sinusoids", "embedding", "embed", g @ waves.to(g.device, self.kept["embed"].dtype).to(g.dtype))
        if spec.n_segments is not None:
            segment = 0 if self.run.segments is None else self.run.segments[0][self.query]
            self.add(
                "segment_embed", "embedding", "segment_embed.weight", g @ _wide(w["segment_embed.weight"][segment])
            )
        row = w["embed.weight"][self.run.ids[0][self.query]]
        row = linear(row, w, "embed_in") if "embed_in.weight" in w else row
        if spec.embed_scale != 1.0:
            row = row * torch.tensor(spec.embed_scale, dtype=row.dtype)
        self.add("embed", "embedding", "embed.weight", g @ _wide(row))

    def cap(self, cap: float) -> None:
        """What the soft cap takes off the sum of all parts."""
        import torch

        sums = [math.fsum(part.value for part in parts) for parts in zip(*self.parts)]
        sums = torch.tensor(sums, dtype=torch.float64)  # [n]
        self.add("soft cap", "remainder", "logits", cap * torch.tanh(sums / cap) - sums)
        self.parts.insert(0, self.parts.pop())


def _wide(x: "Tensor") -> "Tensor":
    from gptcli.model.measure import double

    return double(x)
