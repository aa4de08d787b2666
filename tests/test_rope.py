"""Rotation and its scalings equal transformers in every spelling, within the trained context and beyond it."""

import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from gptcli.errors import GptcliError
from gptcli.families import FAMILIES
from gptcli.families.record import getter, resolve, rope
from gptcli.model.forward import Inputs, forward
from gptcli.model.ops import frequencies
from gptcli.source import open_model
from gptcli.spec import NoPosition, Rope, decode, read_spec, to_dict
from tests.oracle import CPU, assert_near, in_float64, save_toy

torch.set_num_threads(1)  # at toy size threads only wait for one another

LLAMA = {
    "model_type": "llama",
    "vocab_size": 53,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 10,
    "max_position_embeddings": 64,
}
SHORT, LONG = [1.0, 1.25, 1.5, 2.0, 2.5], [2.0, 3.0, 5.0, 7.0, 11.0]
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
MARKS = {"factor": 4.0, "original_max_position_embeddings": 16}
SETS = {"short_factor": SHORT, "long_factor": LONG, "original_max_position_embeddings": 16}
# (rope_type, the other words of its table, what else the config says)
KINDS = {
    "default": ("default", {}, {}),
    "linear": ("linear", {"factor": 3.0}, {}),
    "dynamic": ("dynamic", {"factor": 2.0}, {"max_position_embeddings": 16}),
    "llama3": ("llama3", LLAMA3 | {"original_max_position_embeddings": 16}, {}),
    "llama3, context of the config": ("llama3", LLAMA3, {"max_position_embeddings": 32}),
    "yarn": ("yarn", MARKS, {}),
    "yarn, attention factor": ("yarn", MARKS | {"attention_factor": 1.5}, {}),
    "yarn, magnitudes": ("yarn", MARKS | {"mscale": 1.3, "mscale_all_dim": 0.7}, {}),
    "yarn, ramp": ("yarn", MARKS | {"beta_fast": 4.0, "beta_slow": 0.5, "truncate": False}, {}),
    "longrope": ("longrope", SETS, {}),
    "longrope, factors": ("longrope", SETS | {"factor": 8.0}, {}),
    "longrope, attention factor": ("longrope", SETS | {"attention_factor": 1.5}, {}),
    "longrope, context of the config": ("longrope", SETS, {"original_max_position_embeddings": 20}),
}
SPELLINGS = {
    "rope_scaling, type": lambda kind, rest: {"rope_theta": 500.0, "rope_scaling": {"type": kind} | rest},
    "rope_scaling, rope_type": lambda kind, rest: {"rope_theta": 500.0, "rope_scaling": {"rope_type": kind} | rest},
    "rope_parameters": lambda kind, rest: {"rope_parameters": {"rope_type": kind, "rope_theta": 500.0} | rest},
    "all at once": lambda kind, rest: {
        "rope_theta": 7.0,
        "rope_scaling": {"rope_type": kind, "type": "none such", "rope_theta": 500.0} | rest,
        "rope_parameters": {"rope_type": "none such", "rope_theta": 3.0},
    },
}
WITHIN, BEYOND = 12, 24


def described(kind: str, spelling: str = "rope_parameters") -> dict:
    word, rest, others = KINDS[kind]
    return LLAMA | SPELLINGS[spelling](word, rest) | others


def spec_of(config: dict):
    return resolve(config, FAMILIES[config["model_type"]], "toy", "config.json").spec


def some_ids(*shape: int) -> torch.Tensor:
    return torch.randint(0, LLAMA["vocab_size"], shape, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_equals_transformers_in_every_spelling(kind, tmp_path):
    """Logits for one spelling; for the others, that they say the same here and there."""
    theirs = save_toy(described(kind), tmp_path)
    model = open_model(str(tmp_path))
    assert not model.notes
    weights = model.weights(torch.float64, CPU)
    for length in (WITHIN, BEYOND, WITHIN):
        ids = some_ids(2, length)
        with in_float64(), torch.no_grad():
            expected = theirs(ids, use_cache=False).logits
        assert_near(forward(Inputs(ids), weights, model.spec), expected, 1e-9)
        assert_near(forward(Inputs(ids, rows="last"), weights, model.spec), expected[:, -1:], 1e-9)
    for spelling in SPELLINGS:
        config = described(kind, spelling)
        assert spec_of(config) == spec_of(described(kind))
        library = AutoConfig.for_model(**described(kind, spelling))
        library.standardize_rope_params()  # as every model does
        heard = library.rope_parameters
        assert {k: v for k, v in heard.items() if k != "type"} == theirs.config.rope_parameters
        # What transformers writes back says it too.
        assert spec_of(config | {"rope_scaling": None, "rope_parameters": heard}) == spec_of(described(kind))


def test_the_lengths_straddle_what_each_kind_tells_apart():
    """Where the trained context counts at all, one length is within it and one beyond."""
    for kind in KINDS:
        scaling = spec_of(described(kind)).position.scaling
        if scaling.kind in ("dynamic", "longrope"):
            assert WITHIN < scaling.original_context < BEYOND
            part = spec_of(described(kind)).position
            assert not torch.equal(frequencies(part, 10, WITHIN)[0], frequencies(part, 10, BEYOND)[0])


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "yarn"])
def test_a_padded_batch_equals_each_text_alone(kind, tmp_path):
    """A short text keeps the frequencies of its own length beside a long one."""
    theirs = save_toy(described(kind), tmp_path)
    model = open_model(str(tmp_path))
    weights = model.weights(torch.float64, CPU)
    ids = some_ids(2, BEYOND)
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[0, : BEYOND - WITHIN] = False
    together = forward(Inputs(ids, mask=mask), weights, model.spec)
    for row, start in ((0, BEYOND - WITHIN), (1, 0)):
        alone = ids[row : row + 1, start:]
        with in_float64(), torch.no_grad():
            expected = theirs(alone, use_cache=False).logits
        assert_near(forward(Inputs(alone), weights, model.spec), expected, 1e-9)
        assert_near(together[row : row + 1, start:], expected, 1e-9)


numbers = st.floats(1.0, 40.0)
originals = {"original_max_position_embeddings": st.integers(2, 5000)}
optional = {
    "attention_factor": st.floats(0.5, 2.0),
    "mscale": numbers,
    "mscale_all_dim": numbers,
    "beta_fast": st.floats(4.0, 64.0),
    "beta_slow": st.floats(0.1, 3.9),
    "truncate": st.booleans(),
}
tables = st.one_of(
    st.fixed_dictionaries({"rope_type": st.just("linear"), "factor": numbers}),
    st.fixed_dictionaries({"rope_type": st.just("dynamic"), "factor": numbers}),
    st.fixed_dictionaries({"rope_type": st.just("yarn"), "factor": numbers, **originals}, optional=optional),
    st.fixed_dictionaries(
        {"rope_type": st.just("llama3"), "factor": numbers, "low_freq_factor": st.floats(0.1, 2.0), **originals}
        | {"high_freq_factor": st.floats(2.1, 9.0)}
    ),
    st.fixed_dictionaries(
        {"rope_type": st.just("longrope"), **originals}
        | {word: st.lists(numbers, min_size=5, max_size=5) for word in ("short_factor", "long_factor")},
        optional={"factor": numbers, "attention_factor": st.floats(0.5, 2.0)},
    ),
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(tables, st.floats(2.0, 1e7), st.integers(1, 9000), st.integers(16, 4096))
def test_frequencies_equal_transformers(table, theta, length, context):
    config = LLAMA | {"max_position_embeddings": context, "rope_parameters": table | {"rope_theta": theta}}
    part = spec_of(config).position
    with in_float64():
        theirs = AutoConfig.for_model(**config)
        expected, factor = ROPE_INIT_FUNCTIONS[table["rope_type"]](theirs, CPU, seq_len=length)
    found, ours = frequencies(part, 10, length)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=0)
    assert ours == pytest.approx(factor, rel=1e-12)


def test_scaling_that_stretches_the_context_admits_longer_texts(tmp_path):
    """factor × the trained context, which the config keeps for itself; no further."""
    assert spec_of(described("dynamic")).context_length == 32
    assert spec_of(described("yarn") | {"max_position_embeddings": 16}).context_length == 64
    assert spec_of(described("yarn") | {"max_position_embeddings": 100}).context_length == 100
    assert spec_of(described("linear")).context_length == 64
    save_toy(described("dynamic"), tmp_path)
    model = open_model(str(tmp_path))
    with pytest.raises(GptcliError, match="33 tokens are more than the context of 32"):
        forward(Inputs(some_ids(1, 33)), model.weights(torch.float64, CPU), model.spec)


def test_tables_by_layer_type():
    sliding, full = {"rope_type": "default", "rope_theta": 10.0}, {"type": "linear", "factor": 2.0}
    config = LLAMA | {
        "rope_theta": 77.0,
        "rope_parameters": {"sliding_attention": sliding, "full_attention": full, "other": None},
    }
    get = getter(config)
    assert rope(get, "sliding_attention") == rope(getter(LLAMA | {"rope_parameters": sliding}))
    assert rope(get, "full_attention") == rope(getter(LLAMA | {"rope_theta": 77.0, "rope_scaling": full}))
    assert decode(Rope, {k: v for k, v in rope(get, "full_attention").items() if k != "kind"}, "").theta == 77.0
    # A layer type that has no table turns by what the config says beside.
    assert rope(get, "other") == rope(getter(LLAMA | {"rope_theta": 77.0}))


REFUSED = {
    "rope_scaling.type: 'mrope'": {"rope_scaling": {"type": "mrope", "factor": 2.0}},
    "rope_scaling.rope_type: 'axial'": {"rope_scaling": {"rope_type": "axial", "type": "linear", "factor": 2.0}},
    "rope_parameters.rope_type: 'proportional'": {"rope_parameters": {"rope_type": "proportional"}},
    "rope_parameters.rope_type: 7": {"rope_parameters": {"rope_type": 7}},
    "rope_scaling.mrope_section: not implemented": {"rope_scaling": {"type": "default", "mrope_section": [2, 3]}},
    "rope_parameters.fraction, warp: not": {"rope_parameters": {"rope_type": "default", "fraction": 1, "warp": 2}},
    "rope_parameters: by layer type": {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
    "rope_parameters.factor: stands among": {
        "rope_parameters": {"full_attention": {"rope_type": "default"}, "factor": 2.0}
    },
    "rope_scaling: 2.0 is not a table": {"rope_scaling": 2.0},
    "rope_scaling.factor: missing": {"rope_scaling": {"type": "linear"}},
    "rope_scaling.low_freq_factor: missing": {"rope_scaling": {"type": "llama3", "factor": 2.0}},
    "rope_scaling.long_factor: missing": {"rope_scaling": {"type": "longrope", "short_factor": SHORT}},
    "position.scaling.short_factors: 5 numbers, but a head has 3 pairs": {
        "head_dim": 6,
        "rope_scaling": {"type": "longrope"} | SETS,
    },
    "position.scaling.factor: 0 is not positive": {"rope_scaling": {"type": "linear", "factor": 0}},
    "position.scaling.factor: '2' is not a number": {"rope_scaling": {"type": "dynamic", "factor": "2"}},
    "rope_scaling.factor: '2' is not a number": {"rope_scaling": {"type": "yarn", "factor": "2"}},
    "rope_scaling.mscale: 'x' is not a number": {
        "rope_scaling": {"type": "yarn", "mscale": "x", "mscale_all_dim": 1.0} | MARKS
    },
    "position.scaling.beta_slow: -1 is not positive": {"rope_scaling": {"type": "yarn", "beta_slow": -1} | MARKS},
    "original_max_position_embeddings: 1.5 is not a whole number": {
        "rope_scaling": {"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 1.5}
    },
    "position.theta: 1 turns all pairs alike": {"rope_theta": 1, "rope_scaling": {"type": "yarn"} | MARKS},
    "position.theta: 0 is not positive": {"rope_theta": 0},
    "position.scaling.kind: dynamic needs two pairs": {"head_dim": 2, "rope_scaling": {"type": "dynamic", "factor": 2}},
    "partial_rotary_factor: 0.5 is not implemented": {"partial_rotary_factor": 0.5},
    "attention.head_dim: 9 is odd": {"head_dim": 9},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_unknown_is_refused_by_name(message):
    with pytest.raises(GptcliError) as caught:
        spec_of(LLAMA | REFUSED[message])
    assert message in caught.value.message


def test_words_without_effect_are_known():
    """A word of another kind, and one that says how the model was trained, change nothing."""
    table = {"type": "linear", "factor": 2.0, "beta_fast": 3.0, "finetuned": True}
    assert spec_of(LLAMA | {"rope_scaling": table}).position.scaling.factor == 2.0
    assert spec_of(LLAMA | {"partial_rotary_factor": 1.0}) == spec_of(LLAMA)


def test_a_variant_must_fit_its_rotation_too():
    raw = to_dict(spec_of(described("longrope")))
    raw["variants"] = [{"layers": [1], "attention": {"head_dim": 6}}]
    with pytest.raises(GptcliError, match=r"variants.0.position.scaling.short_factors: 5 numbers"):
        read_spec(raw)
    raw["variants"] = [{"layers": [1], "attention": {"head_dim": 6}, "position": "none"}]
    assert isinstance(read_spec(raw).at(1).position, NoPosition)


def test_float32_as_the_library_comes():
    """Angles in float64 here, in float32 there: near each other at a far position all the same."""
    config = described("yarn") | {"max_position_embeddings": 2048}
    with tempfile.TemporaryDirectory() as folder:
        save_toy(config, Path(folder))
        theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
        model, ids = open_model(folder), some_ids(1, 1000)
        with torch.no_grad():
            expected = theirs(ids, use_cache=False).logits
        assert_near(forward(Inputs(ids), model.weights(torch.float32, CPU), model.spec), expected, 1e-3)
