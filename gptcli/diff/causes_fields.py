"""What a Spec can say otherwise, as hypotheses: a table of its fields, where each shows first, what a side does by it,
and the values that are tried where B's own is not known.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import is_dataclass, replace
from typing import Any, NamedTuple, get_args

from gptcli.diff import causes_solve as solve
from gptcli.diff.causes_scene import ABSENT, Guess, Scene, differences, put, value_at
from gptcli.spec import Activation, LayerNorm, LinearScaling, NoPosition, NoScaling, RMSNorm, Rope, Spec

NORMS = (
    "embed_norm attn.q_norm attn.k_norm attn_norm attn_out_norm cross_norm cross_out_norm mlp_norm mlp_out_norm "
    "final_norm lm_head.norm"
)
TURNED = "attn.q_rot attn.k_rot"
WEIGHED = "attn.pattern attn.sink attn.z"
MIXED = f"attn.scores {WEIGHED}"
# Values that the field uses, by what uses them: eps of published models, and the smallest step of float32, which is
# what norms without a word on it take; bases of published models; caps of published models.
EPS = (1e-5, 1e-6, 1e-12, 1e-8, 0.0, 2.0**-23)
BASES = (10_000.0, 500_000.0, 1_000_000.0)
CAPS = (None, 50.0, 30.0, 15.0)
KINDS = {"rmsnorm": "RMSNorm", "layernorm": "LayerNorm"}


class Field(NamedTuple):
    """says: what a side does by a value, with {} for its word; words: of values that have one; tries: values to be
    tried, in the order of plainness; keys: what the keys of a config.json that decide it have in their names.
    """

    path: str
    code: str
    at: str
    says: str
    tries: Callable[[Scene], Iterable[Any]] = lambda scene: ()
    words: Mapping[Any, str] = {}
    keys: str = ""


def _other_kind(scene: Scene) -> Iterator[Any]:
    """The other norm, with the same eps and placement, and no bias that A hasn't."""
    norm = scene.spec.norm
    if isinstance(norm, LayerNorm | RMSNorm):
        kept = {name: getattr(norm, name) for name in ("weight", "placement", "embedding", "final", "eps")}
        yield RMSNorm(**kept) if isinstance(norm, LayerNorm) else LayerNorm(bias=False, **kept)


def _elsewhere(path: str) -> Callable[[Scene], Iterator[Any]]:
    """What A has there in other layers."""

    def values(scene: Scene) -> Iterator[Any]:
        whole = scene.whole
        yield from (value_at(part, path) for part in (whole, *whole.variants))

    return values


def _scales(scene: Scene) -> Iterator[float | None]:
    a, hidden = scene.spec.attention, scene.spec.hidden_size
    yield from (None, 1.0, hidden**-0.5, (hidden / a.n_heads) ** -0.5, 1 / a.head_dim)
    yield from solve.score_scale(scene)


def _windows(scene: Scene) -> Iterator[int | None]:
    window = scene.spec.attention.window
    yield from (None, *_elsewhere("attention.window")(scene))
    yield from () if window is None else (window - 1, window + 1)
    yield from solve.window(scene)


def _sizes(scene: Scene) -> Iterator[int | None]:
    size = scene.spec.attention.head_dim
    yield from (None, size // 2, size // 4, *solve.size(scene))


def _other_positions(scene: Scene) -> Iterator[Any]:
    """Those of another kind that A has in other layers; and none."""
    here = type(scene.spec.position)
    yield from (part for part in _elsewhere("position")(scene) if not isinstance(part, here | None))
    yield NoPosition()


NORMED = {True: "norms", False: "doesn't norm"}
FIELDS = (
    Field("embed_scale", "embedding-scale", "embed", "multiplies token embeddings by {}",
          lambda s: (1.0, s.spec.hidden_size**0.5, *solve.factor(s, "embed_scale", "embed")), keys="embed"),
    Field("position", "position", f"embed {TURNED} {MIXED}", "tells positions by {}", _other_positions),
    Field("position.offset", "position-offset", "embed", "reads the table of positions from row {} on",
          lambda s: (0, 2)),
    Field("position.pairs", "rotary-pairs", f"embed {TURNED} {MIXED}", "{}", lambda s: ("halves", "neighbours"),
          {"halves": "turns halves (i, i + R/2)", "neighbours": "turns neighbours (2i, 2i + 1)"}),
    Field("position.rotary_dim", "rotary-size", f"{TURNED} {MIXED}", "turns {} numbers of a head", _sizes,
          {None: "all"}, keys="partial|pct|rotary_dim"),
    Field("position.direction", "rotary-direction", f"{TURNED} {MIXED}", "{}", lambda s: ("forward", "backward"),
          {"forward": "turns forward", "backward": "turns backward"}),
    Field("position.theta", "rotary-base", f"embed {TURNED} {MIXED}", "turns by the base {}",
          lambda s: (*BASES, *_elsewhere("position.theta")(s), *solve.base(s)), keys="theta|base"),
    Field("position.scaling", "rotary-scaling", f"{TURNED} {MIXED}", "scales rotary frequencies by {}",
          lambda s: (NoScaling(), *_elsewhere("position.scaling")(s), *solve.linear(s)),
          keys="rope_scaling|rope_parameters"),
    Field("norm", "norm-kind", NORMS, "norms by {}", _other_kind),
    Field("norm.eps", "norm-eps", NORMS, "adds {} under the root of its norms", lambda s: (*EPS, *solve.eps(s)),
          keys="eps"),
    Field("norm.offset", "norm-offset", NORMS, "scales what it norms by {}", words={0.0: "w", 1.0: "1 + w"}),
    Field("norm.placement", "norm-placement", f"attn.q attn.k attn.v {NORMS} mlp.up", "{}",
          lambda s: ("pre", "post", "output"),
          {"pre": "norms before its sublayers", "post": "norms the sums after them",
           "output": "norms what sublayers give", "sandwich": "norms before sublayers and what they give"},
          keys="before"),
    Field("norm.embedding", "embedding-norm", "embed_norm layers.0.resid_pre", "{} the embedding",
          lambda s: (True, False), NORMED),
    Field("norm.final", "final-norm", "final_norm lm_head.dense embed_out logits", "{} before the head",
          lambda s: (False,), NORMED, keys="final"),
    Field("attention.normed", "attention-norm", "attn_norm attn.q attn.k attn.v", "{} what attention reads",
          lambda s: (False,), NORMED),
    Field("attention.qk_norm", "qk-norm", f"attn.q_norm attn.k_norm {TURNED} {MIXED}", "{}",
          lambda s: ("none", "head", "whole"),
          {"none": "doesn't norm queries and keys", "head": "norms each head's queries and keys by the same weights",
           "each": "norms each head's queries and keys by its own", "whole": "norms queries and keys as a whole"}),
    Field("attention.qk_norm_place", "qk-norm-place", f"attn.q_norm attn.k_norm {TURNED} {MIXED}", "{}",
          lambda s: ("before", "after"),
          {"before": "norms queries and keys before they turn", "after": "norms queries and keys once turned"}),
    Field("attention.scale", "score-scale", MIXED, "multiplies scores by {}", _scales, {None: "1/√D"},
          keys="scal|multiplier"),
    Field("cross.scale", "score-scale", "cross.scores cross.pattern cross.z", "multiplies scores by {}",
          lambda s: (None, 1.0, *solve.factor(s, "cross.scale", "cross.scores")), {None: "1/√D"}),
    Field("attention.softcap", "score-cap", MIXED, "caps scores at {}",
          lambda s: (*CAPS, *solve.cap(s, "attention.softcap", "attn.scores")), {None: "nothing"}, keys="softcap"),
    Field("attention.causal", "mask", WEIGHED, "{}", lambda s: (True, False),
          {True: "attends to what came before", False: "attends to both sides"}, keys="causal|bidirectional"),
    Field("attention.window", "window", WEIGHED, "has a window of {} tokens", _windows, {None: "all"},
          keys="window$|window_size|layer_types"),
    Field("residual", "residual-order", "mlp_norm mlp.router mlp.up mlp.gate mlp.act", "{}",
          lambda s: ("sequential", "parallel", "parallel_shared"),
          {"sequential": "lets the MLP read what attention left",
           "parallel": "lets the MLP read what attention read, by a norm of its own",
           "parallel_shared": "lets the MLP read what attention read, by its norm"}, keys="parallel"),
    Field("residual_scale", "residual-scale", "resid_mid resid_post", "multiplies what sublayers add by {}",
          lambda s: (1.0, *solve.factor(s, "residual_scale", "resid_mid")), keys="residual"),
    Field("mlp.activation", "activation", "mlp.act mlp_out", "has the activation {}", lambda s: get_args(Activation),
          {"gelu": "gelu (exact, by erf)", "gelu_tanh": "gelu by tanh", "gelu_sigmoid": "gelu by a sigmoid"},
          keys="act"),
    Field("mlp.top_k", "experts", "mlp_out", "takes {} experts a token", keys="per_tok"),
    Field("mlp.normalized", "experts", "mlp_out", "{}", lambda s: (True, False),
          {True: "scales the weights of the experts taken to a sum of 1", False: "leaves them as they are"},
          keys="topk"),
    Field("mlp.limit", "experts", "mlp_out", "clamps gate and up at {}", words={None: "nothing"}, keys="limit"),
    Field("lm_head.transform.activation", "activation", "lm_head.norm logits", "has the activation {} in its head",
          lambda s: get_args(Activation)),
    Field("lm_head.scale", "logit-scale", "logits", "multiplies logits by {}",
          lambda s: (1.0, *solve.factor(s, "lm_head.scale", "logits", "lm_head.softcap")), keys="logit"),
    Field("lm_head.softcap", "logit-cap", "logits", "caps logits at {}",
          lambda s: (*CAPS, *solve.cap(s, "lm_head.softcap", "logits")), {None: "nothing"}, keys="softcap"),
)  # fmt: skip
# Fields that change which weights there are, which hypotheses on weights tell.
KIND = Field("variants", "layer-kind", "", "", keys="layer_types|pattern|attention_types|attention_layers|max_window")
HEADS = Field("attention.n_heads", "heads", f"{MIXED} attn_out", "", keys="head")
PARTS = ("position", "attention", "mlp")  # which a layer may have of its own
OF_WEIGHTS = ("bias", "o_bias", "weight", "tied", "router_bias", "sinks")


def guesses(scene: Scene, b_stack: Spec | None, mend: Callable[[Field], str]) -> Iterator[Guess]:
    """Each field that differs by itself; where B's architecture isn't known, each value that may be meant.

    b_stack: B's of the part's stack, whole.
    """
    b_spec, known = b_stack and _at(b_stack, scene.part.layer), []
    if b_spec is not None:
        known = list(_known(scene.spec, b_spec))
        of_parts = [path for path in known if path.partition(".")[0] in PARTS]
        if _of_another_kind(scene, b_stack, len(of_parts)):
            yield _kind(scene, b_spec, of_parts, mend)
            known = [path for path in known if path not in of_parts]
        else:
            yield from _heads(scene, b_spec, mend)
    for field in FIELDS:
        if not scene.window.intersection(field.at.split()) or value_at(scene.spec, field.path) is ABSENT:
            continue
        if b_spec is None:
            yield from _tries(scene, field, mend)
        elif field.path in known:
            yield guess_of(scene.spec, field, value_at(b_spec, field.path), mend)


def together(scene: Scene, b_stack: Spec, mend: Callable[[Field], str], *weights: Guess) -> list[Guess]:
    """All the fields that differ and can show here, and these weights: each as a guess that changes them all."""
    from gptcli.model.part import Change

    found = [*guesses(scene, b_stack, mend), *weights]
    others = {name: x for guess in found for name, x in guess.change.weights.items()}

    def changed(spec: Spec) -> Spec:
        for guess in found:
            spec = guess.change.spec(spec)
        return spec

    every = Change(spec=changed, weights=others)
    told = f"; it takes {len(found)} such changes together"
    return [guess._replace(said=guess.said + told, change=every) for guess in found] if len(found) > 1 else []


def _at(stack: Spec, layer: int | None) -> Spec:
    return stack if layer is None else stack.at(layer)


def _parts(spec: Spec) -> list[Any]:
    return [getattr(spec, part) for part in PARTS]


def _of_another_kind(scene: Scene, b_stack: Spec, apart: int) -> bool:
    """Is B's layer of a kind that other layers of A are, and A's of one that others of B are? Either is enough where
    it is in several fields that they differ; one field may well have another value of its own.
    """
    if scene.part.layer is None or not apart:
        return False
    stacks = ((scene.whole, b_stack.at(scene.part.layer)), (b_stack, scene.spec))
    known = [_parts(here) in [_parts(stack.at(i)) for i in range(stack.n_layers)] for stack, here in stacks]
    return all(known) if apart == 1 else any(known)


def _kind(scene: Scene, b_spec: Spec, paths: list[str], mend: Callable[[Field], str]) -> Guess:
    """B's layer is of another kind: in all these fields."""
    from gptcli.model.part import Change

    parts = dict(zip(PARTS, _parts(b_spec)))
    does = [one.says.format(_word(one, value_at(b_spec, one.path))) for one in FIELDS if one.path in paths]
    said = f"B's layer {scene.part.layer} is of another kind than A's: it {' and '.join(does)}"
    return Guess(KIND.code, said, mend(KIND), Change(spec=lambda spec: replace(spec, **parts)))


def _of_heads(heads: int, kv_heads: int, size: int) -> str:
    return f"{heads} heads of {size}{f' ({kv_heads} of keys and values)' if kv_heads != heads else ''}"


def _heads(scene: Scene, b_spec: Spec, mend: Callable[[Field], str]) -> Iterator[Guess]:
    """The same rows cut into another number of heads."""
    from gptcli.model.part import Change

    names = ("n_heads", "n_kv_heads", "head_dim")
    ours, theirs = ({name: getattr(spec.attention, name) for name in names} for spec in (scene.spec, b_spec))
    if ours != theirs and scene.window.intersection(HEADS.at.split()):
        words = [_of_heads(*one.values()) for one in (theirs, ours)]
        change = Change(spec=lambda spec: replace(spec, attention=replace(spec.attention, **theirs)))
        yield Guess(HEADS.code, f"B has {words[0]} where A has {words[1]}", mend(HEADS), change)


def _known(ours: Spec, theirs: Spec) -> Iterator[str]:
    """The rows of the table in which two architectures differ."""
    rows = {field.path for field in FIELDS}
    for path in differences(ours, theirs):
        if path.rpartition(".")[2] in OF_WEIGHTS:
            continue
        while path and path not in rows:
            path = path.rpartition(".")[0]
        yield from (path,) if path else ()


def _tries(scene: Scene, field: Field, mend: Callable[[Field], str]) -> Iterator[Guess]:
    tried = [value_at(scene.spec, field.path)]
    for value in field.tries(scene):
        if value not in tried and value is not ABSENT:
            tried.append(value)
            yield guess_of(scene.spec, field, value, mend)


def guess_of(spec: Spec, field: Field, value: Any, mend: Callable[[Field], str]) -> Guess:
    """The guess that B has this value of a field."""
    from gptcli.model.part import Change

    def change(spec: Spec) -> Spec:
        if isinstance(value, NoPosition) and isinstance(spec.position, Rope):  # so that there is something turned by 0
            return put(spec, "position.scaling", LinearScaling(factor=1e300))
        return put(spec, field.path, value)

    theirs, ours = (_word(field, one) for one in (value, value_at(spec, field.path)))
    has = "" if field.says.startswith("{}") else "has "
    return Guess(field.code, f"B {field.says.format(theirs)} where A {has}{ours}", mend(field), Change(spec=change))


def _word(field: Field, value: Any) -> str:
    """How a value is called: a mechanism by its kind and what it is set to."""
    if not is_dataclass(value):
        return field.words.get(value, _number(value))
    if value.kind in KINDS:
        return KINDS[value.kind]
    told = [f"{name} {_number(getattr(value, name))}" for name in ("theta", "factor") if hasattr(value, name)]
    return ", ".join([value.kind, *told])


def _number(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) and math.isfinite(value) else str(value)
