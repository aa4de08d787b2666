"""Reading a Spec: strict, with defaults stated here, and every fault named by the path of its field."""

import copy
import dataclasses
import math
import time
from types import NoneType, UnionType
from typing import Literal, Union, get_args, get_origin

import pytest
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st

from gptcli import shipped
from gptcli.config import read_config
from gptcli.spec import (
    Attention,
    Dense,
    Learned,
    LinearScaling,
    Llama3Scaling,
    NoMLP,
    NoNorm,
    NoPosition,
    NoScaling,
    RMSNorm,
    Rope,
    Spec,
    SpecError,
    decode,
    read_spec,
    to_dict,
)

RAW = {
    "vocab_size": 100,
    "context_length": 32,
    "hidden_size": 24,
    "n_layers": 2,
    "position": {"kind": "rope"},
    "norm": {"kind": "rmsnorm"},
    "attention": {"n_heads": 4},
    "mlp": {"kind": "dense", "size": 48, "activation": "silu"},
    "lm_head": {},
}


def changed(path: str, value) -> dict:
    """RAW with the field at that path set."""
    raw = copy.deepcopy(RAW)
    *parents, last = path.split(".")
    part = raw
    for parent in parents:
        part = part.setdefault(parent, {})
    part[last] = value
    return raw


def without(path: str) -> dict:
    raw = copy.deepcopy(RAW)
    *parents, last = path.split(".")
    part = raw
    for parent in parents:
        part = part[parent]
    del part[last]
    return raw


def fault(raw) -> SpecError:
    with pytest.raises(SpecError) as caught:
        read_spec(raw)
    return caught.value


# Round trip


@pytest.mark.parametrize("name", shipped.configs())
def test_every_shipped_config_survives_a_round_trip(name):
    spec = read_config(shipped.configs()[name]).spec
    assert read_spec(to_dict(spec)) == spec
    assert hash(read_spec(to_dict(spec))) == hash(spec)


def values(kind):
    """Any legal value of a field's type; a part is drawn field by field, so that new fields are drawn too."""
    origin, args = get_origin(kind), get_args(kind)
    if origin in (Union, UnionType):
        return st.one_of(*(st.none() if a is NoneType else values(a) for a in args))
    if origin is Literal:
        return st.sampled_from(args)
    if origin is tuple:
        return st.lists(values(args[0]), min_size=1, max_size=3).map(tuple)
    if dataclasses.is_dataclass(kind):
        return parts(kind)
    return {
        int: st.integers(1, 12) | st.integers(1, 10**9),
        float: st.floats(1e-9, 1e9) | st.floats(allow_nan=False, allow_infinity=False),
        bool: st.booleans(),
        str: st.text(max_size=8),
    }[kind]


@st.composite
def parts(draw, kind):
    drawn = {}
    for field in dataclasses.fields(kind):
        try:
            drawn[field.name] = draw(values(field.type))
        except KeyError:  # a type that this test does not know stays at its default
            continue
    if kind is Attention:
        drawn["n_heads"] = drawn["n_kv_heads"] * draw(st.integers(1, 8))
    if kind is Spec and isinstance(drawn["position"], Rope):
        drawn["attention"] = dataclasses.replace(drawn["attention"], head_dim=2 * drawn["attention"].head_dim)
    try:
        return kind(**drawn)
    except SpecError:  # a combination that can't be
        reject()


@settings(derandomize=True, deadline=None, max_examples=150, suppress_health_check=list(HealthCheck))
@given(parts(Spec))
def test_any_spec_survives_a_round_trip(spec):
    raw = to_dict(spec)
    before = copy.deepcopy(raw)
    assert read_spec(raw) == spec
    assert raw == before  # reading changes nothing of what it reads


def test_to_dict_states_every_value_and_every_kind():
    raw = to_dict(read_spec(RAW))
    rope = {"kind": "rope", "theta": 10000.0, "pairs": "halves", "rotary_dim": None, "direction": "forward"}
    assert raw["position"] == rope | {"scaling": {"kind": "none"}}
    assert raw["norm"] == raw["norm"] | {"kind": "rmsnorm", "eps": 1e-6, "offset": 0.0, "placement": "pre"}
    assert raw["attention"]["scale"] is None and raw["attention"]["head_dim"] == 6


# Defaults


def test_what_is_left_out_takes_its_default():
    spec = read_spec(RAW)
    a = spec.attention
    assert (a.n_heads, a.n_kv_heads, a.head_dim) == (4, 4, 6)  # 24 / 4
    assert (a.bias, a.o_bias, a.causal, a.qk_norm, a.scale, a.window) == (False, False, True, "none", None, None)
    assert spec.norm == RMSNorm(eps=1e-6, offset=0.0, placement="pre", final=True)
    assert spec.position == Rope(theta=10000.0, pairs="halves", scaling=NoScaling())
    assert (spec.name, spec.tokenizer, spec.embed_scale) == ("", "", 1.0)
    assert (spec.lm_head.tied, spec.lm_head.bias) == (False, False)
    assert (spec.mlp.gated, spec.mlp.bias) == (False, False)


def test_o_bias_follows_bias_until_it_speaks_for_itself():
    assert read_spec(changed("attention.bias", True)).attention.o_bias is True
    raw = changed("attention", {"n_heads": 4, "bias": True, "o_bias": False})
    assert read_spec(raw).attention.bias is True and read_spec(raw).attention.o_bias is False


def test_a_stated_head_dim_wins_over_hidden_size_by_heads():
    raw = changed("attention", {"n_heads": 5, "head_dim": 10})  # 5 does not divide 24, and need not
    assert read_spec(raw).attention.head_dim == 10


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_final_norm_stands_before_the_head_unless_norms_come_after(kind):
    assert read_spec(changed("norm", {"kind": kind})).norm.final is True
    assert read_spec(changed("norm", {"kind": kind, "placement": "post"})).norm.final is False
    assert read_spec(changed("norm", {"kind": kind, "placement": "post", "final": True})).norm.final is True
    assert read_spec(changed("norm", {"kind": kind, "final": False})).norm.final is False


@pytest.mark.parametrize(
    "field,word,part",
    [
        ("position", "none", NoPosition()),
        ("position", "learned", Learned()),
        ("position", "rope", Rope()),
        ("norm", "none", NoNorm()),
        ("norm", "rmsnorm", RMSNorm()),
        ("mlp", "none", NoMLP()),
    ],
)
def test_a_word_is_short_for_a_mapping_with_that_kind(field, word, part):
    assert getattr(read_spec(changed(field, word)), field) == part
    assert getattr(read_spec(changed(field, {"kind": word})), field) == part


def test_whole_numbers_serve_as_numbers_and_null_where_nothing_is_an_answer():
    spec = read_spec(changed("position", {"kind": "rope", "theta": 500000}))
    assert spec.position.theta == 500000.0 and type(spec.position.theta) is float
    assert read_spec(changed("attention.scale", 1)).attention.scale == 1.0
    assert read_spec(changed("attention.scale", None)).attention.scale is None
    assert read_spec(changed("attention.window", None)).attention.window is None
    assert read_spec(changed("attention.window", 1)).attention.window == 1


def test_scalings_are_told_apart_by_kind():
    linear = changed("position", {"kind": "rope", "scaling": {"kind": "linear", "factor": 4}})
    assert read_spec(linear).position.scaling == LinearScaling(factor=4.0)
    llama3 = changed("position", {"kind": "rope", "scaling": {"kind": "llama3", "factor": 8}})
    assert read_spec(llama3).position.scaling == Llama3Scaling(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=8192
    )


def test_reading_leaves_what_it_reads_alone():
    raw = changed("norm.placement", "post")
    before = copy.deepcopy(raw)
    read_spec(raw)
    assert raw == before


# Faults, each by its path

UNKNOWN = [
    ("hiden_size", 24, 'did you mean "hidden_size"?'),
    ("attention.n_head", 4, 'did you mean "n_heads"?'),
    ("norm.epsi", 1e-5, 'did you mean "eps"?'),
    ("position.thetta", 1.0, 'did you mean "theta"?'),
    ("mlp.activations", "relu", 'did you mean "activation"?'),
    ("lm_head.tie", True, 'did you mean "tied"?'),
]


@pytest.mark.parametrize("path,value,hint", UNKNOWN)
def test_unknown_field(path, value, hint):
    error = fault(changed(path, value))
    assert error.message == f"{path}: unknown field"
    assert error.hint == hint
    assert error.code == "spec"


def test_unknown_field_like_nothing_known_lists_what_is():
    error = fault(changed("lm_head.zzzz", 1))
    assert error.message == "lm_head.zzzz: unknown field"
    assert error.hint.startswith("known: tied, bias")


def test_unknown_field_of_another_kind():
    """`offset` belongs to RMSNorm, `theta` to rotation: not known elsewhere."""
    layernorm = fault(changed("norm", {"kind": "layernorm", "offset": 1.0}))
    assert layernorm.message == "norm.offset: unknown field"
    assert fault(changed("position", {"kind": "learned", "theta": 1e4})).message == "position.theta: unknown field"


@pytest.mark.parametrize("key", [1, None, 1.5, True])
def test_a_key_that_is_no_text_is_an_unknown_field(key):
    assert fault(RAW | {key: 1}).message == f"{key}: unknown field"


MISSING = [
    *["vocab_size", "context_length", "hidden_size", "n_layers", "position", "norm", "attention", "mlp", "lm_head"],
    *["attention.n_heads", "mlp.size", "mlp.activation", "position.kind", "norm.kind", "mlp.kind"],
]


@pytest.mark.parametrize("path", MISSING)
def test_missing_field(path):
    assert fault(without(path)).message.startswith(f"{path}: missing")


def test_missing_field_of_a_scaling():
    raw = changed("position.scaling", {"kind": "linear"})
    assert fault(raw).message == "position.scaling.factor: missing"


WRONG_TYPE = [
    ("vocab_size", "100", "a whole number"),
    ("vocab_size", True, "a whole number"),  # to Python, True is an int
    ("vocab_size", 100.0, "a whole number"),
    ("vocab_size", None, "a whole number"),
    ("n_layers", [2], "a whole number"),
    ("embed_scale", "1.0", "a number"),
    ("embed_scale", True, "a number"),
    ("embed_scale", None, "a number"),
    ("position.theta", "1e4", "a number"),
    ("norm.eps", "1e-5", "a number"),
    ("attention.causal", 1, "true or false"),
    ("attention.bias", "true", "true or false"),
    ("attention.bias", None, "true or false"),
    ("attention.window", 4.0, "a whole number"),
    ("attention.window", True, "a whole number"),
    ("attention.scale", "small", "a number"),
    ("mlp.gated", 0, "true or false"),
    ("lm_head.tied", "yes", "true or false"),
    ("name", 3, "text"),
    ("tokenizer", None, "text"),
]


@pytest.mark.parametrize("path,value,what", WRONG_TYPE)
def test_wrong_type(path, value, what):
    assert fault(changed(path, value)).message == f"{path}: {value!r} is not {what}"


@pytest.mark.parametrize("value", [0, -4, "4", True, None, 4.0])
def test_wrong_n_heads_is_named_itself(value):
    """Not head_dim, which follows from it."""
    assert fault(changed("attention.n_heads", value)).message.startswith("attention.n_heads: ")


@pytest.mark.parametrize("value", [0, "24", True, None])
def test_wrong_hidden_size_is_named_itself(value):
    raw = changed("hidden_size", value)
    attention = raw.pop("attention")
    assert fault({"attention": attention} | raw).message.startswith("hidden_size: ")


CLOSED = [
    ("norm.placement", "middle", {"pre", "post"}),
    ("norm.placement", None, {"pre", "post"}),
    ("norm.placement", ["pre"], {"pre", "post"}),
    ("position.pairs", "halfs", {"halves", "neighbours"}),
    ("mlp.activation", "swoosh", {"relu", "gelu", "gelu_tanh", "silu"}),
]


@pytest.mark.parametrize("path,value,words", CLOSED)
def test_not_in_the_closed_set(path, value, words):
    start, said = fault(changed(path, value)).message.split(" is not one of ")
    assert start == f"{path}: {value!r}"
    assert words <= set(said.split(", "))


@pytest.mark.parametrize("field", ["position", "norm", "mlp"])
@pytest.mark.parametrize("kind", ["ropee", "", None, 3, ["none"], {"kind": "none"}])
def test_kind_unknown(field, kind):
    start, said = fault(changed(field, {"kind": kind})).message.split(" is not one of ")
    assert start == f"{field}.kind: {kind!r}"
    assert "none" in said.split(", ")


def test_kind_unknown_deep_down():
    assert fault(changed("position.scaling", "yarny")).message.startswith(
        "position.scaling.kind: 'yarny' is not one of"
    )


@pytest.mark.parametrize("field", ["position", "norm", "mlp"])
def test_kind_missing(field):
    assert fault(changed(field, {})).message.startswith(f"{field}.kind: missing (one of ")


@pytest.mark.parametrize("field", ["position", "norm", "mlp"])
@pytest.mark.parametrize("value", [None, 3, [], True, [{"kind": "none"}]])
def test_a_part_that_is_no_mapping(field, value):
    assert fault(changed(field, value)).message.startswith(f"{field}: {value!r} is not a mapping")


@pytest.mark.parametrize("field", ["attention", "lm_head"])
@pytest.mark.parametrize("value", [None, 3, [], "none"])
def test_an_untagged_part_that_is_no_mapping(field, value):
    if (field, value) == ("lm_head", None):  # null is no head at all
        assert read_spec(changed(field, value)).lm_head is None
        return
    assert fault(changed(field, value)).message == f"{field}: {value!r} is not a mapping"


@pytest.mark.parametrize("value", [None, [], 3, "spec"])
def test_a_config_that_is_no_mapping(value):
    assert fault(value).message == f"the config: {value!r} is not a mapping"


SIZES = [
    *["vocab_size", "context_length", "hidden_size", "n_layers", "mlp.size"],
    *["attention.n_kv_heads", "attention.head_dim", "attention.window"],
]


@pytest.mark.parametrize("value", [0, -1])
@pytest.mark.parametrize("path", SIZES)
def test_size_below_one(path, value):
    raw = changed(path, value)
    raw["attention"].setdefault("head_dim", 6)
    assert fault(raw).message == f"{path}: {value} is below 1"


def test_original_context_below_one():
    raw = changed("position.scaling", {"kind": "llama3", "factor": 8.0, "original_context": 0})
    assert fault(raw).message == "position.scaling.original_context: 0 is below 1"


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("path", ["embed_scale", "position.theta", "norm.eps", "norm.offset", "attention.scale"])
def test_number_that_is_not_finite(path, value):
    assert fault(changed(path, value)).message == f"{path}: {value} is not a finite number"


@pytest.mark.parametrize("path", ["embed_scale", "position.theta", "norm.eps", "attention.scale"])
def test_whole_number_too_large_for_a_number(path):
    """1 and 400 zeros: a whole number in JSON and in Python, infinite in floating point."""
    assert fault(changed(path, 10**400)).message.startswith(f"{path}: ")


@pytest.mark.parametrize("theta", [0, -1.0])
def test_theta_not_positive(theta):
    assert fault(changed("position.theta", theta)).message == f"position.theta: {theta:g} is not positive"


def test_n_kv_heads_does_not_divide():
    raw = changed("attention", {"n_heads": 8, "n_kv_heads": 3})
    assert fault(raw).message == "attention.n_kv_heads: 3 does not divide n_heads: 8"


def test_more_kv_heads_than_heads():
    raw = changed("attention", {"n_heads": 4, "n_kv_heads": 8})
    assert fault(raw).message == "attention.n_kv_heads: 8 does not divide n_heads: 4"


def test_hidden_size_not_divisible():
    message = fault(changed("attention.n_heads", 5)).message
    assert message == "attention.n_heads: 5 does not divide hidden_size: 24 (or give attention.head_dim)"


def test_odd_head_dim_with_rotation():
    message = fault(changed("attention.head_dim", 5)).message
    assert message == "attention.head_dim: 5 is odd, and rotation turns pairs"
    raw = changed("attention.head_dim", 5) | {"position": "learned"}
    assert read_spec(raw).attention.head_dim == 5  # without rotation it may be odd


def test_qk_norm_without_a_norm():
    raw = changed("attention.qk_norm", "head") | {"norm": "none"}
    assert fault(raw).message.startswith("attention.qk_norm: head, but norm.kind: none")


def test_frequency_marks_in_order():
    for high in (1.0, 0.5):
        scaling = {"kind": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": high}
        message = fault(changed("position.scaling", scaling)).message
        assert message.startswith("position.scaling.high_freq_factor: ")


def test_a_norm_that_is_none_has_no_placement():
    """The field at fault is the one that was written."""
    raw = changed("norm", {"kind": "none", "placement": "post"})
    assert fault(raw).message == "norm.placement: unknown field"


@pytest.mark.parametrize(
    "value",
    [
        "x" * 10_000,
        list(range(10_000)),
        eval("[" * 80 + "]" * 80),  # noqa: S307
        10**4000,  # as JSON may hold it
    ],
    ids=["text", "list", "nested", "huge"],
)
@pytest.mark.parametrize("path", ["n_layers", "position", "norm.placement", "mlp.kind", "attention", "lm_head.tied"])
def test_a_large_value_is_shown_in_short(path, value):
    error = fault(changed(path, value))
    assert error.message.startswith(path)
    assert len(error.message) < 200


def test_a_value_nested_to_the_limit_of_the_reader_is_shown_in_short():
    nested = []
    for _ in range(5000):
        nested = [nested]
    assert len(fault(changed("name", nested)).message) < 200


def test_a_value_that_repeats_itself_is_shown_in_short_and_at_once():
    """Eight aliases of eight of eight …: a few hundred bytes of YAML, sixteen million numbers when written out."""
    value = 1
    for _ in range(8):
        value = [value] * 8
    begun = time.perf_counter()
    assert len(fault(changed("name", value)).message) < 200
    assert time.perf_counter() - begun < 1


def test_decode_names_the_path_it_is_given():
    with pytest.raises(SpecError, match=r"^a\.b: 'x' is not a whole number"):
        decode(int, "x", "a.b")
    assert decode(int | None, None, "a") is None
    assert decode(Dense, {"size": 3, "activation": "relu"}, "m") == Dense(size=3, activation="relu")


# Frozen


def test_a_spec_and_its_parts_are_frozen():
    spec = read_spec(changed("position.scaling", {"kind": "linear", "factor": 2.0}))
    for part in (spec, spec.position, spec.position.scaling, spec.norm, spec.attention, spec.mlp, spec.lm_head):
        for field in dataclasses.fields(part):
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(part, field.name, None)
    with pytest.raises(TypeError):
        Learned(1)  # by name only
