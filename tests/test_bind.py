"""A checkpoint joined to a layout: what fits is read in place, what does not is refused by name."""

import json
import re
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from gptcli.checkpoint.bind import Binding, bind, recognise
from gptcli.checkpoint.safetensors import TensorInfo, read_header
from gptcli.errors import GptcliError
from gptcli.families import FAMILIES, OWN
from gptcli.layout import Param, layout
from gptcli.model.forward import Inputs, forward
from gptcli.model.load import settle_ties, stored_weights
from gptcli.model.weights import Lazy, Weights
from gptcli.source import open_model
from gptcli.spec import Spec, read_spec

CPU = torch.device("cpu")
GPT2 = FAMILIES["gpt2"]
C, V, CONTEXT, F = 8, 11, 6, 20


def toy(**changes) -> Spec:
    return read_spec(
        {
            "vocab_size": V,
            "context_length": CONTEXT,
            "hidden_size": C,
            "n_layers": 2,
            "position": "learned",
            "norm": "layernorm",
            "attention": {"n_heads": 2, "bias": True},
            "mlp": {"kind": "dense", "size": F, "activation": "gelu_tanh", "bias": True},
            "lm_head": {"tied": True},
        }
        | changes
    )


# The file that GPT-2's own repository holds, at toy size: matrices lie [in, out], q, k and v side by side.
AS_GPT2 = {"wte.weight": (V, C), "wpe.weight": (CONTEXT, C), "ln_f.weight": (C,), "ln_f.bias": (C,)}
# The same model in this project's names: [out, in].
AS_OURS = {"embed.weight": (V, C), "pos_embed.weight": (CONTEXT, C), "final_norm.weight": (C,), "final_norm.bias": (C,)}
for _i in (0, 1):
    AS_GPT2 |= {
        f"h.{_i}.ln_1.weight": (C,), f"h.{_i}.ln_1.bias": (C,),
        f"h.{_i}.attn.c_attn.weight": (C, 3 * C), f"h.{_i}.attn.c_attn.bias": (3 * C,),
        f"h.{_i}.attn.c_proj.weight": (C, C), f"h.{_i}.attn.c_proj.bias": (C,),
        f"h.{_i}.ln_2.weight": (C,), f"h.{_i}.ln_2.bias": (C,),
        f"h.{_i}.mlp.c_fc.weight": (C, F), f"h.{_i}.mlp.c_fc.bias": (F,),
        f"h.{_i}.mlp.c_proj.weight": (F, C), f"h.{_i}.mlp.c_proj.bias": (C,),
    }  # fmt: skip
    AS_OURS |= {
        **{f"layers.{_i}.{norm}.{leaf}": (C,) for norm in ("attn_norm", "mlp_norm") for leaf in ("weight", "bias")},
        **{f"layers.{_i}.attn.{name}.weight": (C, C) for name in "qkvo"},
        **{f"layers.{_i}.attn.{name}.bias": (C,) for name in "qkvo"},
        f"layers.{_i}.mlp.up.weight": (F, C), f"layers.{_i}.mlp.up.bias": (F,),
        f"layers.{_i}.mlp.down.weight": (C, F), f"layers.{_i}.mlp.down.bias": (C,),
    }  # fmt: skip
# Where each of our stems lies among GPT-2's, and which of c_attn's three columns of blocks it is.
HOME = {"attn.q": ("attn.c_attn", 0), "attn.k": ("attn.c_attn", 1), "attn.v": ("attn.c_attn", 2)} | {
    ours: (theirs, 0)
    for ours, theirs in {
        "attn_norm": "ln_1", "mlp_norm": "ln_2", "attn.o": "attn.c_proj",
        "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj",
    }.items()
}  # fmt: skip
OUTSIDE = {"embed": "wte", "pos_embed": "wpe", "final_norm": "ln_f"}


def stored_name(ours: str) -> tuple[str, int]:
    """GPT-2's tensor that holds one of our parameters, and the part of it."""
    stem, leaf = ours.rsplit(".", 1)
    if stem in OUTSIDE:
        return f"{OUTSIDE[stem]}.{leaf}", 0
    _, layer, rest = stem.split(".", 2)
    theirs, part = HOME[rest]
    return f"h.{layer}.{theirs}.{leaf}", part


def infos_of(shapes: dict[str, tuple[int, ...]], dtype: str = "F32") -> dict[str, TensorInfo]:
    """Tensors that a header might list; no file is behind them."""
    return {name: TensorInfo(dtype, shape, Path("x"), 0, 0) for name, shape in shapes.items()}


def prefixed(shapes: dict, prefix: str) -> dict:
    return {(name if name.startswith("lm_head") else prefix + name): value for name, value in shapes.items()}


def fault(shapes, family=GPT2, spec: Spec | None = None) -> str:
    infos = shapes if all(isinstance(v, TensorInfo) for v in shapes.values()) else infos_of(shapes)
    with pytest.raises(GptcliError) as caught:
        bind(layout(spec or toy()), infos, family, "some.safetensors")
    assert caught.value.message.startswith("some.safetensors: tensor ")
    assert "\n" not in caught.value.message
    return caught.value.message


BOTH = [(AS_GPT2, GPT2, ""), (AS_GPT2, GPT2, "transformer."), (AS_OURS, OWN, "")]


# What fits


def test_our_own_names_bind_to_themselves():
    binding = bind(layout(toy()), infos_of(AS_OURS), OWN, "x")
    assert {name: bound.stored for name, bound in binding.bounds.items()} == {name: name for name in AS_OURS}
    for name, bound in binding.bounds.items():
        assert (bound.start, bound.stop, bound.transposed) == (0, AS_OURS[name][0], False)
    assert binding.buffers == [] and binding.copies == [] and binding.zeros == {}


@pytest.mark.parametrize("prefix", ["", "transformer."])
def test_gpt2s_names_bind_with_their_prefix_or_without(prefix):
    binding = bind(layout(toy()), infos_of(prefixed(AS_GPT2, prefix)), GPT2, "x")
    assert set(binding.bounds) == set(AS_OURS)
    for ours, bound in binding.bounds.items():
        theirs, part = stored_name(ours)
        assert bound.stored == prefix + theirs
        assert (bound.start, bound.stop) == (part * AS_OURS[ours][0], (part + 1) * AS_OURS[ours][0])
        tables = {"embed.weight", "pos_embed.weight"}
        assert bool(bound.transposed) == (len(AS_OURS[ours]) == 2 and ours not in tables), ours


def test_more_than_nine_layers_are_told_apart():
    shapes = {name.replace(".0.", f".{i}."): s for i in range(12) for name, s in AS_GPT2.items() if ".1." not in name}
    binding = bind(layout(toy(n_layers=12)), infos_of(shapes), GPT2, "x")
    for i in range(12):
        assert binding.bounds[f"layers.{i}.mlp.up.weight"].stored == f"h.{i}.mlp.c_fc.weight"


# What does not


@pytest.mark.parametrize("shapes,family,prefix", BOTH, ids=["gpt2", "gpt2 prefixed", "own"])
def test_every_missing_tensor_is_named(shapes, family, prefix):
    shapes = prefixed(shapes, prefix)
    for name in shapes:
        rest = {other: shape for other, shape in shapes.items() if other != name}
        message = fault(rest, family)
        assert message.startswith(f"some.safetensors: tensor {name!r} is missing (")
        needed_by = re.search(r"missing \((\S+) (\[[\d, ]+\])\)", message)
        ours = needed_by[1]
        assert name == (prefix + stored_name(ours)[0] if family is GPT2 else ours)
        assert json.loads(needed_by[2]) == list(AS_OURS[ours])


@pytest.mark.parametrize("shapes,family,prefix", BOTH, ids=["gpt2", "gpt2 prefixed", "own"])
def test_every_misshaped_tensor_is_named_with_both_shapes(shapes, family, prefix):
    shapes = prefixed(shapes, prefix)
    for name, shape in shapes.items():
        for wrong in {(*shape, 1), (shape[0] + 1, *shape[1:]), shape[1:], shape[::-1], (*shape[:-1], shape[-1] * 2)}:
            if wrong == shape:
                continue
            message = fault(shapes | {name: wrong}, family)
            start = f"some.safetensors: tensor {name!r} is {list(wrong)}, but "
            assert message.startswith(start) and f" needs {list(shape)}" in message


@pytest.mark.parametrize("shapes,family,prefix", BOTH, ids=["gpt2", "gpt2 prefixed", "own"])
@pytest.mark.parametrize("dtype", ["I64", "U8", "BOOL", "C64"])
def test_every_tensor_of_a_type_that_holds_no_weights_is_named(shapes, family, prefix, dtype):
    infos = infos_of(prefixed(shapes, prefix))
    for name, info in infos.items():
        message = fault(infos | {name: info._replace(dtype=dtype)}, family)
        assert message.startswith(f"some.safetensors: tensor {name!r} is {dtype}, which holds no weights")


@pytest.mark.parametrize("dtype", ["F64", "F32", "F16", "BF16"])
def test_types_that_hold_weights(dtype):
    assert set(bind(layout(toy()), infos_of(AS_GPT2, dtype), GPT2, "x").bounds) == set(AS_OURS)


@pytest.mark.parametrize(
    "extra",
    [
        *["h.2.ln_1.weight", "h.0.attn.c_attn.scale", "score.weight", "wte.weight.bak", "h.0.ln_1.weight.extra"],
        *["h.00.ln_1.weight", "transformer.lm_head.weight", "wte.bias", "h.0.mlp.c_gate.weight", "", "\x1b[31m"],
    ],
)
def test_a_tensor_left_over_is_named(extra):
    message = fault(AS_GPT2 | {extra: (C,)})
    assert message == f"some.safetensors: tensor {extra!r} is left over: no parameter reads it"


def test_the_same_tensor_under_both_prefixes_is_left_over_once():
    assert "tensor 'wte.weight' is left over" in fault(prefixed(AS_GPT2, "transformer.") | {"wte.weight": (V, C)})


def test_half_of_the_names_prefixed_is_no_model():
    mixed = prefixed(AS_GPT2, "transformer.")
    mixed["wpe.weight"] = mixed.pop("transformer.wpe.weight")
    assert "tensor 'transformer.wpe.weight' is missing" in fault(mixed)


def test_a_layout_of_another_size_names_the_first_that_differs():
    assert "'wte.weight' is [11, 8], but embed.weight needs [11, 16]" in fault(AS_GPT2, spec=toy(hidden_size=16))
    assert "'h.1." in fault(AS_GPT2, spec=toy(n_layers=1)) and "is left over" in fault(AS_GPT2, spec=toy(n_layers=1))
    assert "'h.2." in fault(AS_GPT2, spec=toy(n_layers=3)) and "is missing" in fault(AS_GPT2, spec=toy(n_layers=3))


def test_a_matrix_stored_the_other_way_round_is_refused():
    """c_fc lies [in, out] in a GPT-2 checkpoint; [out, in] is another format's."""
    message = fault(AS_GPT2 | {"h.1.mlp.c_fc.weight": (F, C)})
    assert (
        message == "some.safetensors: tensor 'h.1.mlp.c_fc.weight' is [20, 8], but layers.1.mlp.up.weight needs [8, 20]"
    )


def test_faults_beyond_the_first_are_counted():
    broken = AS_OURS | {"extra": (1,), "embed.weight": (V + 1, C)}
    del broken["layers.0.attn.q.bias"]
    message = fault(broken, OWN)
    assert "'embed.weight' is [12, 8]" in message and message.endswith("(and 2 faults more)")


def test_a_layout_that_asks_for_more_than_the_file_has():
    gated = {"kind": "dense", "size": F, "activation": "silu", "gated": True, "bias": True}
    assert "is missing (layers.0.mlp.gate.weight [20, 8])" in fault(AS_OURS, OWN, toy(mlp=gated))


@settings(derandomize=True, deadline=None, max_examples=200)
@given(
    st.sampled_from(BOTH),
    st.sets(st.integers(0, 27), max_size=3),
    st.sets(st.integers(0, 27), max_size=3),
    st.sets(st.sampled_from(["x", "h.9.ln_1.weight", "layers.0.attn.q", "lm_head"]), max_size=2),
)
def test_bind_accepts_the_exact_set_and_nothing_else(case, lost, bent, extra):
    shapes, family, prefix = case
    shapes = prefixed(shapes, prefix)
    names = list(shapes)
    altered = {n: ((*s, 2) if i in bent else s) for i, (n, s) in enumerate(shapes.items()) if i not in lost}
    altered |= dict.fromkeys(extra, (1,))
    if altered == shapes:
        assert set(bind(layout(toy()), infos_of(altered), family, "x").bounds) == set(AS_OURS)
    else:
        message = fault(altered, family)
        culprits = [names[i] for i in lost | bent if i < len(names)] + list(extra)
        assert any(repr(culprit) in message for culprit in culprits)


# Buffers


@pytest.mark.parametrize("prefix", ["", "transformer."])
def test_buffers_are_listed_and_bound_to_nothing(prefix):
    """The causal mask, as older checkpoints carry it, in any type."""
    buffers = {f"h.{i}.attn.bias": (1, 1, CONTEXT, CONTEXT) for i in (0, 1)} | {"h.0.attn.masked_bias": ()}
    infos = infos_of(prefixed(AS_GPT2, prefix)) | infos_of(prefixed(buffers, prefix), "U8")
    binding = bind(layout(toy()), infos, GPT2, "x")
    assert sorted(binding.buffers) == sorted(prefixed(buffers, prefix))
    assert set(binding.bounds) == set(AS_OURS)
    assert not {bound.stored for bound in binding.bounds.values()} & set(binding.buffers)


def test_a_bias_is_no_buffer():
    """`c_attn.bias` ends as the buffer `attn.bias` does."""
    assert "'h.0.attn.c_attn.bias' is missing" in fault(
        {n: s for n, s in AS_GPT2.items() if n != "h.0.attn.c_attn.bias"}
    )


def test_our_own_names_have_no_buffers():
    assert "'layers.0.attn.bias' is left over" in fault(AS_OURS | {"layers.0.attn.bias": (1,)}, OWN)


# The head of a tie


def test_a_head_beside_a_tie_is_noted():
    binding = bind(layout(toy()), infos_of(prefixed(AS_GPT2, "transformer.") | {"lm_head.weight": (V, C)}), GPT2, "x")
    assert binding.bounds["lm_head.weight"].stored == "lm_head.weight"


def test_a_head_beside_a_tie_must_fit_too():
    assert "'lm_head.weight' is [12, 8], but lm_head.weight needs [11, 8]" in fault(
        AS_GPT2 | {"lm_head.weight": (V + 1, C)}
    )


def test_an_untied_config_needs_a_head():
    assert "tensor 'lm_head.weight' is missing" in fault(AS_GPT2, spec=toy(lm_head={"tied": False}))
    whole = infos_of(AS_GPT2 | {"lm_head.weight": (V, C)})
    binding = bind(layout(toy(lm_head={"tied": False})), whole, GPT2, "x")
    assert binding.bounds["lm_head.weight"].stored == "lm_head.weight"


def test_a_head_alone_is_no_embedding():
    alone = {name: shape for name, shape in AS_GPT2.items() if name != "wte.weight"} | {"lm_head.weight": (V, C)}
    assert "tensor 'wte.weight' is missing" in fault(alone)


# Which family


def test_recognise_by_names():
    families = (OWN, *FAMILIES.values())
    params = list(layout(toy()))
    assert recognise(params, infos_of(AS_OURS), families) is OWN
    for prefix in ("", "transformer."):
        assert recognise(params, infos_of(prefixed(AS_GPT2, prefix)), families) is GPT2
        assert recognise(params, infos_of(prefixed(AS_GPT2, prefix)), families[::-1]) is GPT2
    assert recognise(params, infos_of(AS_OURS), families[::-1]) is OWN


def test_recognise_with_a_few_names_lost():
    """One tensor missing is an error about that tensor, not about every other."""
    params = list(layout(toy()))
    for lost in AS_GPT2:
        some = infos_of({name: shape for name, shape in AS_GPT2.items() if name != lost})
        assert recognise(params, some, (OWN, *FAMILIES.values())) is GPT2


# Reading what was bound


def random_tensors(shapes: dict, dtype=torch.float32, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def bound_file(path: Path, tensors: dict, family=GPT2, spec: Spec | None = None) -> tuple[list[Param], Binding, dict]:
    save_file(tensors, path)
    params, infos = list(layout(spec or toy())), read_header(path)
    return params, bind(params, infos, family, str(path)), infos


def loaded(path: Path, tensors: dict, family=GPT2, spec: Spec | None = None, dtype=torch.float32) -> Lazy:
    _, binding, infos = bound_file(path, tensors, family, spec)
    return stored_weights(binding, infos, dtype, CPU)


@pytest.mark.parametrize("prefix", ["", "transformer."])
def test_values_are_the_librarys_slices(tmp_path, prefix):
    path = tmp_path / "model.safetensors"
    weights = loaded(path, prefixed(random_tensors(AS_GPT2), prefix))
    assert set(weights) == set(AS_OURS)
    library = load_file(path)
    for ours, shape in AS_OURS.items():
        theirs, part = stored_name(ours)
        whole = library[prefix + theirs]
        if len(shape) == 2 and ours not in ("embed.weight", "pos_embed.weight"):
            whole = whole.T
        assert tuple(weights[ours].shape) == shape
        assert torch.equal(weights[ours], whole[part * shape[0] : (part + 1) * shape[0]]), ours


def test_the_parts_of_a_fused_tensor_are_views_of_it(tmp_path):
    weights = loaded(tmp_path / "model.safetensors", random_tensors(AS_GPT2))
    for i in (0, 1):
        q, k, v = (weights[f"layers.{i}.attn.{name}.weight"] for name in "qkv")
        # c_attn lies [in, out] = [C, 3C]: an output is one number further, an input a row of 3C numbers further.
        assert q.stride() == k.stride() == v.stride() == (1, 3 * C)
        assert k.data_ptr() - q.data_ptr() == v.data_ptr() - k.data_ptr() == C * 4
        assert q.untyped_storage().data_ptr() == k.untyped_storage().data_ptr() == v.untyped_storage().data_ptr()
        q, k, v = (weights[f"layers.{i}.attn.{name}.bias"] for name in "qkv")
        assert k.data_ptr() - q.data_ptr() == v.data_ptr() - k.data_ptr() == C * 4


def test_each_tensor_is_made_once(tmp_path):
    weights = loaded(tmp_path / "model.safetensors", random_tensors(AS_GPT2, torch.float16), dtype=torch.float32)
    for name in weights:
        assert weights[name] is weights[name]
        assert weights[name].dtype == torch.float32


@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("asked", [torch.float64, torch.float32, torch.bfloat16])
def test_conversion_is_one_rounding(tmp_path, stored, asked):
    tensors = random_tensors(AS_OURS, stored)
    weights = loaded(tmp_path / "model.safetensors", tensors, OWN, dtype=asked)
    for name, tensor in tensors.items():
        assert weights[name].dtype == asked and torch.equal(weights[name], tensor.to(asked))


linux = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="asks Linux what is mapped")


@linux
def test_weights_lie_in_the_mapped_file(tmp_path):
    path = tmp_path / "model.safetensors"
    weights = loaded(path, random_tensors(AS_GPT2))
    pointers = {name: weights[name].data_ptr() for name in weights}
    spans = [
        line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines() if str(path) in line
    ]
    spans = [(int(low, 16), int(high, 16)) for low, high in spans]
    for name, pointer in pointers.items():
        assert any(low <= pointer < high for low, high in spans), name


@linux
def test_reading_200_mb_takes_no_memory_of_its_own(tmp_path):
    """The file is a hole but for its header: 200 MB that lie nowhere until they are read."""
    spec = toy(vocab_size=50_000_000 // C, position="none")
    shapes = {name: shape for name, shape in AS_OURS.items() if name != "pos_embed.weight"}
    shapes["embed.weight"] = (spec.vocab_size, C)
    header, at = {}, 0
    for name, shape in shapes.items():
        size = 4 * torch.Size(shape).numel()
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    path = tmp_path / "large.safetensors"
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + at)
    assert path.stat().st_size > 200_000_000

    def anonymous() -> int:
        return int(re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

    torch.ones(1000).sum()
    before = anonymous()
    params, infos = list(layout(spec)), read_header(path)
    weights = stored_weights(bind(params, infos, OWN, "x"), infos, torch.float32, CPU)
    total = sum(float(weights[name].sum()) for name in weights)
    assert total == 0.0
    assert weights["embed.weight"].shape == (spec.vocab_size, C)
    assert anonymous() - before < 40_000_000
    path.unlink()


@pytest.mark.parametrize("padding", range(8))
def test_a_file_whose_tensors_lie_at_any_byte(tmp_path, padding):
    """The format pads its header so that tensors are aligned; not every writer does."""
    tensors = random_tensors(AS_OURS)
    header, data = {}, b""
    for name, tensor in tensors.items():
        raw = bytes(tensor.reshape(-1).view(torch.uint8).tolist())
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8 + padding)
    path = tmp_path / "model.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    params, infos = list(layout(toy())), read_header(path)
    weights = stored_weights(bind(params, infos, OWN, "x"), infos, torch.float32, CPU)
    assert all(torch.equal(weights[name], tensor) for name, tensor in tensors.items())
    inputs = Inputs(torch.arange(5)[None])
    expected = forward(inputs, Weights.of(params, tensors), toy())
    torch.testing.assert_close(forward(inputs, Weights.of(params, weights), toy()), expected)


# A tied head that the file holds all the same


def settled(tmp_path, head) -> tuple[list[str], Weights, dict]:
    tensors = random_tensors(AS_GPT2)
    if head is not None:
        tensors["lm_head.weight"] = head(tensors["wte.weight"])
    params, binding, infos = bound_file(tmp_path / "model.safetensors", tensors)
    lazy = stored_weights(binding, infos, torch.float32, CPU)
    return settle_ties(lazy, binding, params), Weights.of(params, lazy), tensors


def test_an_equal_head_is_dropped(tmp_path):
    notes, weights, tensors = settled(tmp_path, torch.clone)
    assert notes == []
    assert "lm_head.weight" not in weights.tensors
    assert weights["lm_head.weight"] is weights["embed.weight"]
    assert torch.equal(weights["lm_head.weight"], tensors["wte.weight"])


def test_a_head_different_in_one_number_stays_and_is_used(tmp_path):
    def other(table):
        head = table.clone()
        head[7, 3] += 1
        return head

    notes, weights, tensors = settled(tmp_path, other)
    assert len(notes) == 1 and "lm_head.weight in the file differs from the embedding" in notes[0]
    assert torch.equal(weights["lm_head.weight"], tensors["lm_head.weight"])
    inputs = Inputs(torch.arange(4)[None])
    logits = forward(inputs, weights, toy())
    tied = forward(inputs, settled(tmp_path, None)[1], toy())
    changed = (logits != tied).any(1)[0]
    assert changed.nonzero().flatten().tolist() == [7]  # only id 7's logits


def test_no_head_reads_the_embedding(tmp_path):
    notes, weights, _ = settled(tmp_path, None)
    assert notes == []
    assert weights["lm_head.weight"] is weights["embed.weight"]


@pytest.mark.parametrize("difference,said", [(0.0, False), (1.0, True)])
def test_a_contradiction_is_said(tmp_path, difference, said):
    config = {
        "model_type": "gpt2", "vocab_size": V, "n_positions": CONTEXT, "n_embd": C, "n_layer": 2, "n_head": 2,
        "n_inner": F, "tie_word_embeddings": True,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    tensors = prefixed(random_tensors(AS_GPT2), "transformer.")
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"] + difference
    save_file(tensors, tmp_path / "model.safetensors")
    model = open_model(str(tmp_path))
    weights = model.weights(torch.float32, CPU)
    assert torch.equal(weights["lm_head.weight"], tensors["lm_head.weight"])
    assert any("lm_head.weight in the file differs from the embedding" in note for note in model.notes) == said
