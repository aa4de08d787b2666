"""Config files: YAML 1.2's scalars, faults by line and column, and weights that a person wrote by hand."""

import math
import time

import numpy as np
import pytest
import torch

from gptcli import shipped
from gptcli.config import find_config, read_config, read_yaml
from gptcli.errors import GptcliError
from gptcli.layout import layout
from gptcli.model.forward import Inputs, forward
from gptcli.model.weights import Weights
from gptcli.model.written import written_weights
from gptcli.spec import SpecError
from gptcli.trace import Recorder

# A model of one layer that attends and does nothing else.
BASE = """\
vocab_size: 3
context_length: 5
hidden_size: 4
n_layers: 1
position: none
norm: none
attention: {n_heads: 1}
mlp: none
lm_head: {tied: true}
"""


def value(scalar: str):
    """What a plain scalar means, with its type."""
    return read_yaml(f"key: {scalar}", "test")["key"]


def refused(text: str) -> GptcliError:
    with pytest.raises(GptcliError) as caught:
        read_yaml(text, "some.yaml")
    return caught.value


def config_of(tmp_path, text: str):
    path = tmp_path / "some.yaml"
    path.write_text(text, encoding="utf-8")
    return read_config(path)


def config_fault(tmp_path, text: str) -> GptcliError:
    with pytest.raises(GptcliError) as caught:
        config_of(tmp_path, text)
    return caught.value


# YAML 1.2.2, section 10.3.2: what a plain scalar resolves to in the core schema.

NULL = ["null", "Null", "NULL", "~", ""]
BOOL = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
INT = {
    "0": 0, "-0": 0, "12": 12, "-19": -19, "+1": 1, "012": 12, "08": 8, "007": 7, "-012": -12,  # [-+]? [0-9]+
    "0o7": 7, "0o17": 15, "0o00": 0,  # 0o [0-7]+
    "0x1F": 31, "0x3A": 58, "0xdeadBEEF": 3735928559,  # 0x [0-9a-fA-F]+
}  # fmt: skip
FLOAT = {
    "0.": 0.0, "-0.0": -0.0, ".5": 0.5, "+12e03": 12000.0, "-2E+05": -200000.0,  # the section's own examples
    "1e-5": 1e-5, "1.0e-5": 1e-5, "1e5": 1e5, "1.": 1.0, "-.5": -0.5, "+.5E-3": 0.0005, "1.e2": 100.0, "3.14": 3.14,
    ".inf": math.inf, ".Inf": math.inf, ".INF": math.inf, "-.inf": -math.inf, "+.INF": math.inf,
}  # fmt: skip
NAN = [".nan", ".NaN", ".NAN"]
TEXT = [
    *["on", "On", "ON", "off", "Off", "OFF", "yes", "Yes", "YES", "no", "No", "NO", "y", "Y", "n", "N"],  # YAML 1.1's
    *["nULL", "none", "None", "tRUE", "falsE", "~~"],
    *["1_000", "0b101", "12:30:45", "1:30", "2001-12-14", "=", "<<", "0o8", "0x", "0x1G", "+0x1F", "-0o7", "0X1F"],
    *["1e", "e5", "1e+", "1e5.0", ".", "+", "+.", "-.e3", "1.5.2", "--1", "+-1", "1,5"],
    *["inf", "nan", "-.nan", "+.nan", ".Nan", ".iNF", "Infinity", "1.#INF"],
]


@pytest.mark.parametrize("scalar", NULL)
def test_null(scalar):
    assert value(scalar) is None


@pytest.mark.parametrize("scalar", BOOL)
def test_bool(scalar):
    assert value(scalar) is BOOL[scalar]


@pytest.mark.parametrize("scalar", INT)
def test_int(scalar):
    assert type(value(scalar)) is int and value(scalar) == INT[scalar]


@pytest.mark.parametrize("scalar", FLOAT)
def test_float(scalar):
    assert type(value(scalar)) is float and value(scalar) == FLOAT[scalar]
    assert math.copysign(1, value(scalar)) == math.copysign(1, FLOAT[scalar])


@pytest.mark.parametrize("scalar", NAN)
def test_nan(scalar):
    assert type(value(scalar)) is float and math.isnan(value(scalar))


@pytest.mark.parametrize("scalar", TEXT)
def test_text(scalar):
    assert value(scalar) == scalar


@pytest.mark.parametrize("scalar", [*BOOL, *INT, *FLOAT, *NAN, "null", "~", "on"])
def test_quoted_is_text(scalar):
    assert value(f'"{scalar}"') == scalar
    assert value(f"'{scalar}'") == scalar


def test_keys_resolve_as_values_do():
    assert read_yaml("{12: a, on: b, 0x1F: c, 1.5: d, true: e, ~: f}", "x") == {
        12: "a", "on": "b", 31: "c", 1.5: "d", True: "e", None: "f"
    }  # fmt: skip


def test_tags_of_the_core_schema():
    text = "{a: !!str 12, b: !!int 0x1F, c: !!float 1, d: !!bool true, e: !!null null, f: !!seq [1]}"
    assert read_yaml(text, "x") == {
        "a": "12", "b": 31, "c": 1.0, "d": True, "e": None, "f": [1]
    }  # fmt: skip


FALSE_TAGS = [
    *["!!bool foo", "!!bool yes", "!!int abc", "!!int 1_000", '!!int ""', "!!int 1.5", "!!float abc", '!!float ""'],
    *["!!float 1:30", "!!null foo", "!!map [a, b]", "!!map foo", "!!seq {a: b}", "!!str [a]", "!!int [1]"],
    *["!!timestamp 2001-12-14", "!!timestamp foo", "!!binary aGk=", "!!set {a, b}", "!!omap [a: 1]", "!foo bar"],
    *["!!python/object/apply:os.system [ls]", "!!python/name:os.system", "!!merge x"],
]


@pytest.mark.parametrize("tagged", FALSE_TAGS)
def test_a_tag_that_its_value_belies_or_that_is_none_of_the_core_schemas(tagged):
    error = refused(f"first: 1\nkey: {tagged}")
    assert error.message.startswith("some.yaml, line 2, column 6: ")
    assert error.code == "yaml"


def test_no_mappings_are_merged():
    """`<<` is no part of YAML 1.2; as a tag it could double a mapping with every line."""
    assert read_yaml("a: &a {x: 1}\nb: {<<: *a}", "x")["b"] == {"<<": {"x": 1}}
    assert refused("a: &a {x: 1}\nb: {!!merge <<: *a}").message.startswith("some.yaml, line 2, column 5: ")


# Faults of the document

DUPLICATES = {
    "a: 1\nb: 2\na: 3": (3, 1, "a"),
    "a:\n  b: 1\n  c: {d: 1, d: 2}": (3, 13, "d"),
    "rows:\n  12: [1]\n  13: [2]\n  12: [3]": (4, 3, "12"),
    "{12: a, 012: b}": (1, 9, "012"),  # two ways to write twelve
    "{31: a, 0x1F: b}": (1, 9, "0x1F"),
    "{a: 1, 'a': 2}": (1, 8, "a"),
    '{a: 1, "a": 2}': (1, 8, "a"),
    "{~: 1, null: 2}": (1, 8, "null"),
}


@pytest.mark.parametrize("text", DUPLICATES)
def test_a_key_given_twice(text):
    line, column, key = DUPLICATES[text]
    assert refused(text).message == f'some.yaml, line {line}, column {column}: the key "{key}" stands twice'


def test_a_number_and_its_text_are_two_keys():
    assert read_yaml("{1: a, '1': b}", "x") == {1: "a", "1": "b"}


BROKEN = {
    "a: [1, 2\n": (2, 1),
    "a: 1\nb: {c: 1\nd: 2": (3, 2),
    "a: 1\n\tb: 2": (2, 1),
    "a: 'x": (1, 6),
    "a: 1\n b: 2": (2, 3),
    "a: *nowhere": (1, 4),
    "a: @x": (1, 4),
    "a: 1\n---\nb: 2": (2, 1),
    "a: {[1]: 2}": (1, 5),
    "? {a: 1}\n: 2": (1, 3),
    "&a {? *a : b}": (1, 1),
    'a: "\\ud800"': (1, 7),
    'a: "\\q"': (1, 5),
}


@pytest.mark.parametrize("text", BROKEN)
def test_broken_yaml_is_placed(text):
    line, column = BROKEN[text]
    message = refused(text).message
    assert message.startswith(f"some.yaml, line {line}, column {column}: "), message
    assert "\n" not in message


def test_control_characters_are_refused():
    assert refused("a: 1\nb: \x07").message.startswith("some.yaml")
    assert "\n" not in refused("a: 1\nb: \x07").message


def test_a_byte_order_mark_is_none_of_the_text():
    assert read_yaml("\ufeffa: 1", "x") == {"a": 1}


@pytest.mark.parametrize("opening,closing", [("[", "]"), ("{a: ", "}"), ("- ", ""), ("? ", ""), ("[{a: ", "}]")])
@pytest.mark.parametrize("depth", [900, 5_000, 200_000])
def test_deep_nesting_is_read_or_refused_at_once(opening, closing, depth):
    begun = time.perf_counter()
    try:
        read_yaml("a:\n  " + opening * depth + closing * depth, "x")
    except GptcliError as error:
        assert error.code == "yaml"
    assert time.perf_counter() - begun < 2


@pytest.mark.parametrize("field", ["prompt", "position", "unknown", "vocabulary", "show", "weights"])
def test_a_value_nested_deep_is_refused_in_one_line(tmp_path, field):
    lines = [line for line in BASE.splitlines() if not line.startswith(field)]
    error = config_fault(tmp_path, "\n".join([*lines, f"{field}: " + "[" * 980 + "]" * 980]))
    assert error.message.startswith(f"{tmp_path}/some.yaml: {field}: ")
    assert len(error.message) < len(str(tmp_path)) + 200


@pytest.mark.parametrize("field", ["prompt", "position", "unknown", "vocabulary", "show", "weights"])
def test_aliases_of_aliases_are_refused_at_once(tmp_path, field):
    """Nine aliases of nine of nine …: written out, 9^7 numbers."""
    bomb = ["a0: &a0 [1, 1, 1, 1, 1, 1, 1, 1, 1]"]
    bomb += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 7)]
    lines = [line for line in BASE.splitlines() if not line.startswith(field)]
    begun = time.perf_counter()
    error = config_fault(tmp_path, "\n".join([*lines, *bomb, f"{field}: *a6"]))
    assert time.perf_counter() - begun < 2
    assert error.message.startswith(f"{tmp_path}/some.yaml: ")


@pytest.mark.parametrize("recursive", ["&a [*a]", "&a {x: *a}", "&a {kind: rope, scaling: *a}", "&a {kind: *a}"])
@pytest.mark.parametrize("field", ["prompt", "position", "unknown", "vocabulary", "show"])
def test_a_value_that_holds_itself_is_refused(tmp_path, field, recursive):
    lines = [line for line in BASE.splitlines() if not line.startswith(field)]
    error = config_fault(tmp_path, "\n".join([*lines, f"{field}: {recursive}"]))
    assert error.message.startswith(f"{tmp_path}/some.yaml: {field}")


@pytest.mark.parametrize("digits", ["9" * 30, "-" + "9" * 30, "1" + "0" * 400, "9" * 10_000, "0x" + "F" * 10_000])
def test_a_whole_number_beyond_64_bits(digits):
    assert refused(f"a: 1\nb: {digits}").message.startswith(
        "some.yaml, line 2, column 4: a whole number beyond 64 bits"
    )


@pytest.mark.parametrize("field", ["vocab_size", "position", "prompt", "hidden_size"])
def test_a_huge_whole_number_in_a_config_is_one_line(tmp_path, field):
    lines = [line for line in BASE.splitlines() if not line.startswith(field)]
    error = config_fault(tmp_path, "\n".join([*lines, f"{field}: 0x{'F' * 100_000}"]))
    assert error.message.startswith(f"{tmp_path}/some.yaml") and len(error.message) < len(str(tmp_path)) + 200


def test_the_largest_whole_number_that_is_read():
    assert value(str(2**64 - 1)) == 2**64 - 1
    assert value("1e400") == math.inf  # which no field of a Spec takes


# The file


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(GptcliError, match=r"none\.yaml: No such file or directory"):
        read_config(tmp_path / "none.yaml")


def test_a_directory(tmp_path):
    with pytest.raises(GptcliError, match=r": Is a directory"):
        read_config(tmp_path)


@pytest.mark.parametrize("data", [b"name: caf\xe9", b"\xff\xfea\x00:\x00 \x001\x00", b"\x80", b"a: \xed\xa0\x80"])
def test_a_file_that_is_not_utf8(tmp_path, data):
    path = tmp_path / "some.yaml"
    path.write_bytes(data)
    with pytest.raises(GptcliError, match=r"some\.yaml: not UTF-8 text"):
        read_config(path)


@pytest.mark.parametrize("text", ["", "\n\n", "# a comment\n", "---\n", "[]", "- a\n- b", "word", "12", "~"])
def test_a_file_that_holds_no_mapping(tmp_path, text):
    assert config_fault(tmp_path, text).message == f"{tmp_path}/some.yaml: holds no mapping"


def test_the_file_is_named_before_the_field(tmp_path):
    error = config_fault(tmp_path, BASE.replace("n_layers: 1", "n_layers: 0"))
    assert error.message == f"{tmp_path}/some.yaml: n_layers: 0 is below 1"
    assert isinstance(error, SpecError)


def test_a_config_without_trimmings(tmp_path):
    config = config_of(tmp_path, BASE)
    assert config.spec.name == "some"  # the file's
    assert (config.vocabulary, config.prompt, config.show, config.weights) == ({}, None, (), {})
    assert config.path == tmp_path / "some.yaml"
    assert config_of(tmp_path, BASE + "name: mine").spec.name == "mine"


def test_a_config_with_trimmings(tmp_path):
    config = config_of(
        tmp_path, BASE + "vocabulary: {0: on, 2: Cats}\nprompt: on Cats\nshow: [Cats]\nweights: {embed.weight: ones}"
    )
    assert config.vocabulary == {0: "on", 2: "Cats"}
    assert config.prompt == "on Cats" and config.show == ("Cats",) and config.weights == {"embed.weight": "ones"}


EXTRAS = {
    "vocabulary: [a, b]": "vocabulary: not a mapping of ids to words",
    "vocabulary:": "vocabulary: not a mapping of ids to words",
    "vocabulary: {a: 0}": "vocabulary.a: ",
    "vocabulary: {'0': a}": "vocabulary.0: ",
    "vocabulary: {-1: a}": "vocabulary.-1: ",
    "vocabulary: {true: a}": "vocabulary.True: ",
    "vocabulary: {1.0: a}": "vocabulary.1.0: ",
    "vocabulary: {0: 12}": "vocabulary.0: 12",
    "vocabulary: {0: }": "vocabulary.0: None",
    "vocabulary: {0: ''}": "vocabulary.0: ''",
    "vocabulary: {0: two words}": "vocabulary.0: 'two words'",
    "vocabulary: {0: ' a'}": "vocabulary.0: ' a'",
    'vocabulary: {0: "a\\n"}': "vocabulary.0: 'a\\n'",
    "vocabulary: {0: a, 1: a}": "vocabulary: a word stands under two ids",
    "vocabulary: {0: a, 3: b}": 'vocabulary.3: "b" is beyond vocab_size: 3',
    "prompt: 12": "prompt: 12 is not text",
    "prompt: true": "prompt: True is not text",
    "prompt:": "prompt: None is not text",
    "prompt: [a]": "prompt: ['a'] is not text",
    "show: cats": "show: not a list of words",
    "show: [12]": "show: not a list of words",
    "show: {a: b}": "show: not a list of words",
    "show:": "show: not a list of words",
    "weights: [1]": "weights: not a mapping of parameter names to values",
    "weights:": "weights: not a mapping of parameter names to values",
    "weights: {1: ones}": "weights: not a mapping of parameter names to values",
    "wieghts: {}": "wieghts: unknown field",
}


@pytest.mark.parametrize("line", EXTRAS)
def test_a_trimming_that_can_not_be(tmp_path, line):
    message = config_fault(tmp_path, BASE + line).message
    assert message.startswith(f"{tmp_path}/some.yaml: {EXTRAS[line]}"), message


# Which file is meant


def test_a_file_here_comes_before_what_ships(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_config("cats") == shipped.configs()["cats"]
    assert find_config("cats.yaml") == shipped.configs()["cats"]
    assert find_config("cats.yml") == shipped.configs()["cats"]
    (tmp_path / "cats.yaml").write_text(BASE)
    assert find_config("cats.yaml").resolve() == tmp_path / "cats.yaml"
    assert find_config("cats").resolve() == tmp_path / "cats.yaml"
    (tmp_path / "cats").write_text(BASE)
    assert find_config("cats").resolve() == tmp_path / "cats"  # the very name comes first


def test_a_directory_is_no_config(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "gpt2-small").mkdir()
    assert find_config("gpt2-small") == shipped.configs()["gpt2-small"]
    (tmp_path / "mine").mkdir()
    with pytest.raises(GptcliError, match=r"^--config mine: a directory") as caught:
        find_config("mine")
    assert "-m mine" in caught.value.hint


def test_a_path_elsewhere(tmp_path, monkeypatch):
    (tmp_path / "sub").mkdir()
    monkeypatch.chdir(tmp_path / "sub")
    (tmp_path / "mine.yaml").write_text(BASE)
    assert find_config("../mine").resolve() == tmp_path / "mine.yaml"
    assert find_config(str(tmp_path / "mine.yaml")) == tmp_path / "mine.yaml"


def test_a_name_that_nothing_has(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(GptcliError) as caught:
        find_config("gpt2-smal")
    assert 'did you mean "gpt2-small"?' in caught.value.hint
    for name in shipped.configs():
        assert name in caught.value.hint


@pytest.mark.parametrize("name", ["x" * 300, "x" * 5000, "a\0b", "", "~", "\n", "a/" * 200])
def test_a_name_that_no_file_can_have(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(GptcliError):
        find_config(name)


# Weights by hand

WIDE = """\
vocab_size: 7
context_length: 6
hidden_size: 4
n_layers: 2
position: learned
norm: {kind: layernorm, eps: 1.0e-5}
attention: {n_heads: 2, n_kv_heads: 1, head_dim: 3, bias: true}
mlp: {kind: dense, size: 5, activation: relu, gated: true, bias: true}
lm_head: {tied: false, bias: true}
"""
# Every parameter of that model as a document prints it: matrices are [in, out], and a table has a row an id.
BY_HAND = {
    "embed.weight": (7, 4),
    "pos_embed.weight": (6, 4),
    "final_norm.weight": (4,),
    "final_norm.bias": (4,),
    "lm_head.weight": (4, 7),
    "lm_head.bias": (7,),
}
for _layer in (0, 1):
    BY_HAND |= {
        f"layers.{_layer}.{name}": shape
        for name, shape in {
            "attn_norm.weight": (4,),
            "attn_norm.bias": (4,),
            "attn.q.weight": (4, 6),
            "attn.q.bias": (6,),
            "attn.k.weight": (4, 3),
            "attn.k.bias": (3,),
            "attn.v.weight": (4, 3),
            "attn.v.bias": (3,),
            "attn.o.weight": (6, 4),
            "attn.o.bias": (4,),
            "mlp_norm.weight": (4,),
            "mlp_norm.bias": (4,),
            "mlp.up.weight": (4, 5),
            "mlp.up.bias": (5,),
            "mlp.gate.weight": (4, 5),
            "mlp.gate.bias": (5,),
            "mlp.down.weight": (5, 4),
            "mlp.down.bias": (4,),
        }.items()
    }


def drawn_by_hand() -> dict[str, np.ndarray]:
    """Whole numbers of hundredths, as a person writes them, no two alike."""
    numbers = iter(np.random.default_rng(5).permutation(np.arange(-400, 401)) / 200)
    return {name: np.array([next(numbers) for _ in range(math.prod(shape))]).reshape(shape)
            for name, shape in BY_HAND.items()}  # fmt: skip


def test_every_number_written_by_hand_lands_where_it_belongs(tmp_path):
    """The whole forward pass by the document's own matrices: x [1, in] times W [in, out]."""
    hand = drawn_by_hand()
    config = config_of(tmp_path, WIDE + "weights:\n" + "".join(f"  {n}: {m.tolist()}\n" for n, m in hand.items()))
    params = list(layout(config.spec))
    tensors = written_weights(params, config.weights, torch.float64)
    assert {name: tuple(t.shape) for name, t in tensors.items()} == {p.name: p.shape for p in params}
    for name, matrix in hand.items():
        by_linear = matrix if name in ("embed.weight", "pos_embed.weight") else matrix.T
        assert tensors[name].tolist() == by_linear.tolist(), name

    def layer_norm(x, at):
        return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * hand[f"{at}.weight"] + hand[
            f"{at}.bias"
        ]

    def linear(x, at):
        return x @ hand[f"{at}.weight"] + hand[f"{at}.bias"]

    ids = [3, 0, 6, 5]
    x = hand["embed.weight"][ids] + hand["pos_embed.weight"][:4]
    seen = {}
    for i in (0, 1):
        at, h = f"layers.{i}", layer_norm(x, f"layers.{i}.attn_norm")
        q, k, v = (linear(h, f"{at}.attn.{name}") for name in "qkv")
        seen[f"{at}.attn.q"] = q
        z = np.zeros((4, 6))
        for head in (0, 1):
            scores = q[:, 3 * head : 3 * head + 3] @ k.T / np.sqrt(3)
            for t in range(4):
                weights = np.exp(scores[t, : t + 1] - scores[t, : t + 1].max())
                z[t, 3 * head : 3 * head + 3] = weights / weights.sum() @ v[: t + 1]
        x = x + linear(z, f"{at}.attn.o")
        h = layer_norm(x, f"{at}.mlp_norm")
        x = x + linear(np.maximum(linear(h, f"{at}.mlp.gate"), 0) * linear(h, f"{at}.mlp.up"), f"{at}.mlp.down")
        seen[f"{at}.resid_post"] = x
    logits = linear(layer_norm(x, "final_norm"), "lm_head")

    recorder = Recorder("*.attn.q", "*.resid_post")
    found = forward(Inputs(torch.tensor([ids])), Weights.of(params, tensors), config.spec, recorder)
    for name, expected in seen.items():
        kept = recorder.kept[name][0]
        kept = kept.transpose(0, 1).flatten(1) if kept.dim() == 3 else kept  # [H, T, D] → [T, H·D]
        np.testing.assert_allclose(kept.numpy(), expected, rtol=1e-12, atol=1e-12, err_msg=name)
    np.testing.assert_allclose(found[0].numpy(), logits, rtol=1e-11, atol=1e-11)


def written(tmp_path, lines: str, dtype=torch.float64, base: str = BASE) -> dict[str, torch.Tensor]:
    config = config_of(tmp_path, base + "weights:\n" + lines)
    return written_weights(list(layout(config.spec)), config.weights, dtype)


def written_fault(tmp_path, lines: str, base: str = BASE) -> str:
    with pytest.raises(GptcliError) as caught:
        written(tmp_path, lines, base=base)
    assert "\n" not in caught.value.message and len(caught.value.message) < 300
    return caught.value.message


EMBED = "  embed.weight: zeros\n"
OTHERS = "  layers.*.attn.{k,v,o}.weight: zeros\n"


def test_words(tmp_path):
    tensors = written(
        tmp_path,
        "  embed.weight: ones\n  layers.0.attn.{q,k}.weight: identity\n  layers.0.attn.v.weight: zeros\n"
        "  layers.0.attn.o.weight: ones\n",
    )
    assert tensors["embed.weight"].tolist() == [[1.0] * 4] * 3
    assert tensors["layers.0.attn.q.weight"].tolist() == np.eye(4).tolist()
    assert tensors["layers.0.attn.k.weight"].tolist() == np.eye(4).tolist()
    assert tensors["layers.0.attn.v.weight"].tolist() == [[0.0] * 4] * 4
    assert tensors["layers.0.attn.o.weight"].tolist() == [[1.0] * 4] * 4


def test_rows_of_a_table_and_zeros_between_them(tmp_path):
    tensors = written(tmp_path, "  embed.weight: {rows: {2: [1, 2.5, -3, 4], 0: [5, 6, 7, 8]}}\n  layers.*: zeros\n")
    assert tensors["embed.weight"].tolist() == [[5, 6, 7, 8], [0, 0, 0, 0], [1, 2.5, -3, 4]]


def test_rows_of_a_head_are_its_ids(tmp_path):
    """A head is [V, C]: row 1 holds what the final vector is multiplied by for id 1's logit."""
    tensors = written(
        tmp_path,
        "  embed.weight: zeros\n  layers.*: zeros\n  lm_head.weight: {rows: {1: [1, 2, 3, 4]}}\n",
        base=BASE.replace("tied: true", "tied: false"),
    )
    assert tensors["lm_head.weight"].tolist() == [[0, 0, 0, 0], [1, 2, 3, 4], [0, 0, 0, 0]]


def test_rows_of_a_matrix_are_refused(tmp_path):
    """By hand a matrix is [in, out]; rows of what torch stores, [out, in], would be columns of the one on paper."""
    message = written_fault(tmp_path, EMBED + OTHERS + "  layers.0.attn.q.weight: {rows: {0: [1, 2, 3, 4]}}\n")
    assert message.startswith("weights.layers.0.attn.q.weight: ")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_numbers_are_rounded_once_to_the_type_asked_for(tmp_path, dtype):
    tensors = written(
        tmp_path,
        "  embed.weight: [[0.1, 0.2, 0.3, 0.7], [1, 2, 3, 4], [-0.1, 0, 1e-3, 16777217]]\n  layers.*: zeros\n",
        dtype,
    )
    exact = torch.tensor([[0.1, 0.2, 0.3, 0.7], [1, 2, 3, 4], [-0.1, 0, 1e-3, 16777217]], dtype=torch.float64)
    assert tensors["embed.weight"].dtype == dtype
    assert torch.equal(tensors["embed.weight"], exact.to(dtype))


def test_stars_and_braces(tmp_path):
    base = WIDE.replace("position: learned", "position: none").replace("kind: layernorm, eps: 1.0e-5", "kind: none")
    base = base.replace("bias: true", "bias: false")
    tensors = written(
        tmp_path,
        "  embed.weight: zeros\n  layers.*.attn.{q, k}.weight: ones\n  layers.{0,1}.attn.{v,o}.weight: zeros\n"
        "  layers.*.mlp.{up,{gate,down}}.weight: ones\n  lm_head.weight: zeros\n",
        base=base,
    )
    ones = {name for name, tensor in tensors.items() if bool((tensor == 1).all())}
    assert ones == {
        f"layers.{i}.{name}.weight" for i in (0, 1) for name in ("attn.q", "attn.k", "mlp.up", "mlp.gate", "mlp.down")
    }
    zeros = {name for name, tensor in tensors.items() if not tensor.any()}
    assert zeros == {"embed.weight", "lm_head.weight", *(f"layers.{i}.attn.{n}.weight" for i in (0, 1) for n in "vo")}


SHAPES = {
    "layers.0.attn.q.weight: [[1, 2], [3, 4]]": "is not [4, 4] numbers (a matrix by hand is [in, out])",
    "layers.0.attn.q.weight: [1, 2, 3, 4]": "is not [4, 4] numbers",
    "layers.0.attn.q.weight: 3": "3 is not [4, 4] numbers",
    "layers.0.attn.q.weight: []": "[] is not [4, 4] numbers",
    "layers.0.attn.q.weight:": "None is not [4, 4] numbers",
    "layers.0.attn.q.weight: [[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3]]": "is not [4, 4] numbers",
    "layers.0.attn.q.weight: [[1, 2, 3, x], [1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4]]": "is not [4, 4] numbers",
    "layers.0.attn.q.weight: [[1, 2, 3, true], [1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4]]": "is not [4, 4] numbers",
    "layers.0.attn.q.weight: [[[1], 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4]]": "is not [4, 4] numbers",
    "layers.0.attn.q.weight: random": "'random' is not one of identity, zeros, ones",
    "layers.0.attn.q.weight: true": "True is not [4, 4] numbers",
    "layers.0.attn.q.weight: {columns: {0: [1]}}": "is not rows: {id: [numbers]}",
    "layers.0.attn.q.weight: {}": "{} is not rows: {id: [numbers]}",
    "layers.0.attn.q.weight: {rows: [1, 2]}": "is not rows: {id: [numbers]}",
}


@pytest.mark.parametrize("line", SHAPES)
def test_numbers_of_another_shape(tmp_path, line):
    message = written_fault(tmp_path, EMBED + OTHERS + f"  {line}\n")
    assert message.startswith("weights.layers.0.attn.q.weight: "), message
    assert SHAPES[line] in message, message


def test_a_matrix_written_the_other_way_round_is_refused(tmp_path):
    """q is [4, 6] by hand, so that x [1, 4] times it gives 6 numbers; torch keeps [6, 4]."""
    q = "  layers.0.attn.q.weight: " + str([[1] * 4] * 6) + "\n"
    message = written_fault(tmp_path, q, base=WIDE)
    assert message.startswith("weights.layers.0.attn.q.weight: ") and "[4, 6] numbers" in message


@pytest.mark.parametrize("row", ["3", "-1", "x", "'0'", "true", "0.0"])
def test_a_row_that_is_none_of_the_table(tmp_path, row):
    message = written_fault(tmp_path, "  embed.weight: {rows: {" + row + ": [1, 2, 3, 4]}}\n  layers.*: zeros\n")
    assert message.startswith("weights.embed.weight: row ") and "is not one of 0 to 2" in message


def test_a_row_of_another_length_is_named(tmp_path):
    message = written_fault(tmp_path, "  embed.weight: {rows: {1: [1, 2, 3]}}\n  layers.*: zeros\n")
    assert message == "weights.embed.weight.rows.1: [1, 2, 3] is not [4] numbers"


def test_identity_of_what_is_not_square(tmp_path):
    assert written_fault(tmp_path, "  embed.weight: identity\n").startswith(
        "weights.embed.weight: identity, but embed.weight is [3, 4]"
    )


def test_a_parameter_left_out_is_named(tmp_path):
    message = written_fault(tmp_path, EMBED + OTHERS)
    assert message == "weights.layers.0.attn.q.weight: missing"


def test_a_parameter_named_twice_is_named(tmp_path):
    lines = EMBED + OTHERS + "  layers.0.attn.q.weight: ones\n  layers.*.attn.q.weight: zeros\n"
    assert written_fault(tmp_path, lines) == (
        "weights.layers.*.attn.q.weight: names layers.0.attn.q.weight, which another pattern has given"
    )


@pytest.mark.parametrize("pattern", ["layers.1.attn.q.weight", "embed", "lm_head.weight", "x.{q,k}", "{}"])
def test_a_pattern_that_names_nothing_lists_what_is_there(tmp_path, pattern):
    """lm_head is tied here: it holds no numbers of its own."""
    with pytest.raises(GptcliError) as caught:
        written(tmp_path, f'  "{pattern}": zeros\n')
    assert caught.value.message == f"weights.{pattern}: names no parameter of this model"
    assert "embed.weight, layers.0.attn.q.weight" in caught.value.hint


@pytest.mark.parametrize("value", ["&a [*a]", "&a {rows: *a}", "&a {rows: {0: *a}}", "{rows: {0: &a [*a, 1, 2, 3]}}"])
def test_a_weight_that_holds_itself_is_refused(tmp_path, value):
    assert written_fault(tmp_path, f"  embed.weight: {value}\n  layers.*: zeros\n").startswith("weights.embed.weight")


@pytest.mark.parametrize("pattern", ["layers.0.attn.{q.weight", "layers.0.attn.q}.weight", "}q{", "{{q}", "(q", "[q"])
def test_a_pattern_with_a_bracket_alone(tmp_path, pattern):
    assert written_fault(tmp_path, f'  "{pattern}": zeros\n').startswith(f"weights.{pattern}: ")


@pytest.mark.parametrize("number", [".nan", ".inf", "-.inf"])
def test_numbers_that_are_not_finite_are_refused(tmp_path, number):
    """Elsewhere in a config such a number is refused; in a weight it would turn every logit into NaN."""
    message = written_fault(tmp_path, f"  embed.weight: {{rows: {{1: [1, 2, 3, {number}]}}}}\n  layers.*: zeros\n")
    assert message.startswith("weights.embed.weight")


def test_a_number_beyond_the_type_asked_for_is_refused(tmp_path):
    """1e300 is a float64, and infinite in float32."""
    lines = "  embed.weight: {rows: {1: [1, 2, 3, 1e300]}}\n  layers.*: zeros\n"
    assert float(written(tmp_path, lines, torch.float64)["embed.weight"][1, 3]) == 1e300
    with pytest.raises(GptcliError, match=r"^weights\.embed\.weight"):
        written(tmp_path, lines, torch.float32)


def test_a_pattern_of_many_braces_is_refused_at_once(tmp_path):
    """A quarter of a million names when written out."""
    begun = time.perf_counter()
    written_fault(tmp_path, f'  "{"{a,b}" * 18}": zeros\n' + EMBED + "  layers.*: zeros\n")
    assert time.perf_counter() - begun < 2


def test_whole_numbers_of_64_bits_are_numbers(tmp_path):
    row = [2**63, 2**64 - 1, -(2**63), 1]
    tensors = written(tmp_path, f"  embed.weight: {{rows: {{0: {row}}}}}\n  layers.*: zeros\n")
    assert tensors["embed.weight"][0].tolist() == [float(n) for n in row]
