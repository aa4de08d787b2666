"""The first number that is not finite: where it was born, and of which weight.

Every weight of every shipped architecture (at toy size) is spoiled in one element, and that element must be named, in
the activation that its matrix makes, at the first position that it reaches. An overflow's place is found again by the
same pass in float32, whose numbers are compared with float16's largest.
"""

import math
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from gptcli import shipped
from gptcli.config import read_config
from gptcli.layout import Param, layout
from gptcli.model import forward as forward_module
from gptcli.model.attention import Sight, fused, weigh
from gptcli.model.weights import Weights
from gptcli.report.birth import Birth
from gptcli.report.forward import forward_report
from gptcli.report.lens import lens_report
from gptcli.report.score import score_report
from gptcli.report.topk import topk_report
from gptcli.run import Run
from gptcli.source import Model
from gptcli.spec import Experts, Spec
from gptcli.trace import Recorder, points
from tests.command import gptcli as run
from tests.toys import shrunk

IDS, SOURCE_IDS = [5, 17, 3, 60, 22, 8, 41, 9], [9, 2, 33, 4, 4, 11]
SPECS = {name: shrunk(read_config(path).spec) for name, path in shipped.configs().items()}
SPECS = {name: spec for name, spec in SPECS.items() if spec.vocab_size > 60}
NAN, INF = math.nan, math.inf


def request(spec: Spec, weights: dict[str, torch.Tensor], ids: list[list[int]] | None = None, dtype="float32") -> Run:
    """A run of a model that holds these weights."""
    ids = [IDS] if ids is None else ids
    one = Run(Model(spec=spec, source="toy"), ids, dtype, source=spec.encoder and [SOURCE_IDS] * len(ids))
    one.weights = Weights.of(layout(spec), weights)
    return one


def numbers(spec: Spec) -> dict[str, torch.Tensor]:
    """A random number for every weight that isn't tied; gains about 1."""
    generator = torch.Generator().manual_seed(0)
    made = {p.name: 0.3 * torch.randn(p.shape, generator=generator) for p in layout(spec) if not p.tied_to}
    return {p.name: made[p.name] + (p.role == "gain") for p in layout(spec) if not p.tied_to}


def found(one: Run, position: str = "all") -> Birth | None:
    """The finding of topk, or None."""
    findings = topk_report(one, 3, (), position, 1.0).findings
    assert len(findings) <= 1
    return findings[0] if findings else None


def made_by(param: Param, spec: Spec) -> str:
    """The activation that a weight's product is first seen in."""
    stem, _, _ = param.name.rpartition(".")
    if stem == "embed" and spec.encoder is not None and spec.encoder_embed == "shared":
        return "encoder.embed"
    if stem.endswith("embed"):  # tokens, positions, segments: one sum
        return f"{stem.rpartition('.')[0]}.embed".lstrip(".")
    for part, out in ((".o", "_out"), (".down", "_out")):
        if stem.endswith(part):
            return stem.removesuffix(part) + out
    return "logits" if stem == "lm_head" else stem


def place_of(param: Param, spec: Spec) -> tuple[list[int], int]:
    """An element to spoil, and the position that it first reaches: of a table, a row that is read once."""
    index = [size // 2 for size in param.shape]
    if param.role != "table":
        return index, 0
    source = param.name.startswith("encoder.") or (spec.encoder is not None and spec.encoder_embed == "shared")
    position = 2
    if param.name.endswith("pos_embed.weight"):
        index[0] = position + spec.position.offset
    elif param.name.endswith("segment_embed.weight"):
        index[0], position = 0, 0  # the first of its rows is every token's
    else:
        index[0] = (SOURCE_IDS if source else IDS)[position]
    return index, position


@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("name", SPECS)
def test_a_weight_that_is_not_finite_is_named_with_its_place(name, bad):
    spec = SPECS[name]
    if spec.lm_head is None:
        spec = replace(spec, lm_head=read_config(shipped.configs()["gpt2-small"]).spec.lm_head)
    clean, rows = numbers(spec), 0
    assert found(request(spec, clean)) is None
    for param in layout(spec):
        if param.tied_to:
            continue
        index, position = place_of(param, spec)
        spoiled = clean[param.name].clone()
        spoiled[tuple(index)] = bad
        birth = found(request(spec, clean | {param.name: spoiled}))
        if birth is None and bad == INF and ".mlp.up." in param.name and spec.mlp.activation == "relu":
            continue  # -∞ of a neuron that is off
        told = (param.name, birth)
        assert (birth.code, birth.weight, birth.weight_index) == ("not-finite", param.name, index), told
        assert birth.path == made_by(param, spec), told
        assert birth.position == position and birth.text == 0, told
        reads = "S" if birth.of_source else "T"
        ids = SOURCE_IDS if birth.of_source else IDS
        assert f"token {position} (id {ids[position]})" in birth.message and reads, told
        check_channel(param, index, birth)
        rows += 1
    assert rows > 10


def check_channel(param: Param, index: list[int], birth: Birth) -> None:
    """The row of a matrix is the number of its product; of q, k and v that number is a head's."""
    unit = index[-1] if param.role == "table" else index[0]
    if param.axes[0] in ("heads", "kv_heads"):
        assert (birth.head, birth.channel) == divmod(unit, param.head_dim)
    elif param.axes[0] == "head_dim":  # a norm of each head: the first head shows it
        assert (birth.head, birth.channel) == (0, unit)
    else:
        assert (birth.head, birth.channel) == (None, unit)
    layer = param.name.removeprefix("encoder.").split(".")
    assert birth.layer_index == (int(layer[1]) if layer[0] == "layers" else None)
    assert f"weight {param.name}[{', '.join(map(str, index))}] is " in birth.message


def test_the_wrong_element_would_be_noticed():
    spec = SPECS["gpt2-small"]
    spoiled = numbers(spec)
    spoiled["layers.1.mlp.up.weight"][3, 2] = NAN
    birth = found(request(spec, spoiled))
    assert (birth.path, birth.layer_index, birth.channel, birth.weight_index) == ("layers.1.mlp.up", 1, 3, [3, 2])
    assert birth.message == (
        "NaN is born in layers.1.mlp.up (layer 2), token 0 (id 5), channel 3: "
        "weight layers.1.mlp.up.weight[3, 2] is NaN"
    )


def test_what_overflows_is_not_laid_on_a_weight_that_is_read_beside_it():
    """q, k and v are made together; v's weight has nothing to do with a k that is beyond float32."""
    spec = SPECS["gpt2-small"]
    spoiled = numbers(spec)
    spoiled["layers.0.attn.k.weight"] *= 3e38
    spoiled["layers.0.attn.v.weight"][0, 0] = NAN
    birth = found(request(spec, spoiled))
    assert (birth.path, birth.weight) == ("layers.0.attn.k", None)


# What is computed on the side: biases of distances, sinks

BASE = SPECS["llama3-8b"]


def test_a_bias_of_distances_shows_in_the_scores():
    from gptcli.spec import Relative

    spec = replace(BASE, position=Relative(buckets=8, max_distance=16))
    spoiled = numbers(spec)
    spoiled["rel_bias.weight"][2, 1] = NAN  # two positions ago, of head 1
    birth = found(request(spec, spoiled))
    assert (birth.path, birth.position, birth.head, birth.channel) == ("layers.0.attn.scores", 2, 1, 0)
    assert (birth.weight, birth.weight_index) == ("rel_bias.weight", [2, 1])
    assert "token 2 (id 3), head 1, key 0" in birth.message
    spoiled["rel_bias.weight"][2, 1] = -INF  # that key is seen no more: nothing that is not finite comes of it
    assert found(request(spec, spoiled)) is None


def test_a_sink_shows_in_the_softmax_weights():
    spec = replace(BASE, attention=replace(BASE.attention, sinks=True))
    spoiled = numbers(spec)
    spoiled["layers.1.attn.sinks"][2] = NAN
    birth = found(request(spec, spoiled))
    assert birth.path == "layers.1.attn.pattern" and birth.head == 2
    assert (birth.weight, birth.weight_index) == ("layers.1.attn.sinks", [2])
    spoiled["layers.1.attn.sinks"][2] = -INF  # no sink
    assert found(request(spec, spoiled)) is None


@pytest.mark.parametrize("last", [False, True])
def test_scores_that_overflow_name_the_query_the_head_and_the_key(last):
    """Finite queries and keys of 10²⁰: their product is beyond float32's 3.4·10³⁸."""
    spec, spoiled = replace(BASE, position=SPECS["bert-base"].position, n_layers=1), numbers(BASE)
    spoiled["pos_embed.weight"] = torch.zeros(spec.context_length, spec.hidden_size)
    d = spec.attention.head_dim
    spoiled["layers.0.attn.q.weight"][d : 2 * d] *= 1e20
    spoiled["layers.0.attn.k.weight"] *= 1e20
    birth = found(request(spec, spoiled), "-1" if last else "all")
    assert (birth.path, birth.layer_index, birth.head) == ("layers.0.attn.scores", 0, 1)
    assert birth.position == (len(IDS) - 1 if last else 0) and birth.weight is None
    assert "float32 ends at 3.40282e+38" in birth.message


# Overflow in half precision

ENDS = torch.finfo(torch.float16).max


@pytest.mark.parametrize("stem", ["mlp.up", "mlp.down", "attn.o", "attn.v"])
def test_an_overflow_in_float16_is_found_in_its_place(stem):
    """Its place is where the same numbers in float32 first exceed 65,504."""
    spec = SPECS["gpt2-small"]
    name, path = f"layers.1.{stem}.weight", f"layers.1.{stem.replace('.down', '_out').replace('.o', '_out')}"

    def exactly(weights: dict[str, torch.Tensor]) -> torch.Tensor:
        recorder = Recorder(path)
        request(spec, {key: x.float() for key, x in weights.items()}).forward("all", recorder)
        return recorder.kept[path][0]

    large = numbers(spec)
    sizes = exactly(large).abs()
    factors = (ENDS / sizes.max() * f for f in torch.arange(1.1, 3, 0.01))
    factor = next(f for f in factors if not ((sizes * f / ENDS - 1).abs() < 0.02).any())  # none is near the end
    large[name] = large[name] * factor
    large = {key: x.half() for key, x in large.items()}
    x = exactly(large)
    beyond = (x.abs() > ENDS).nonzero().tolist()
    assert beyond and large[name].isfinite().all()
    position, head, channel = (
        min((t, h, c) for h, t, c in beyond) if x.ndim == 3 else (min(beyond)[0], None, min(beyond)[1])
    )
    birth = found(request(spec, large, dtype="float16"))
    assert (birth.path, birth.layer_index) == (path, 1)
    assert (birth.position, birth.head, birth.channel) == (position, head, channel)
    assert birth.value in ("inf", "-inf") and birth.weight is None and birth.weight_index is None
    assert birth.count == len(beyond)
    assert birth.message.endswith("its inputs and weights are finite (float16 ends at 65504)")


# What is no finding


def test_an_infinity_that_reaches_no_logit_is_none():
    spec = SPECS["gpt2-small"]
    row = numbers(spec)
    untied = replace(spec, lm_head=replace(spec.lm_head, tied=False))
    apart = numbers(untied)
    apart["embed.weight"][63] = NAN  # a row that no token reads
    assert found(request(untied, apart)) is None
    relu = replace(spec, mlp=replace(spec.mlp, activation="relu"))
    row["layers.0.mlp.up.bias"][1] = -INF  # a neuron that is off
    assert found(request(relu, row)) is None
    row["layers.1.mlp.down.bias"][4] = NAN
    birth = found(request(relu, row))
    assert (birth.path, birth.weight_index) == ("layers.1.mlp_out", [4])


EXPERTS = Experts(n_experts=4, top_k=2, size=8, activation="silu", router_bias=True, shared_size=6)


def test_an_expert_that_is_never_to_be_taken():
    spec = replace(BASE, mlp=EXPERTS)
    spoiled = numbers(spec)
    spoiled["layers.0.mlp.router.bias"][3] = -INF
    spoiled["layers.0.mlp.experts.3.up.weight"][0, 0] = NAN  # read by nobody
    assert found(request(spec, spoiled)) is None
    spoiled["layers.1.mlp.shared.down.weight"][5, 1] = INF
    birth = found(request(spec, spoiled))
    assert birth.path == "layers.1.mlp_out" and birth.channel == 5
    assert (birth.weight, birth.weight_index) == ("layers.1.mlp.shared.down.weight", [5, 1])


def test_its_birthplace_may_be_a_position_that_nobody_asked_for():
    """A value that is no number spoils what weighs it by 0: a kernel multiplies all."""
    spec = replace(SPECS["gpt2-small"], lm_head=replace(SPECS["gpt2-small"].lm_head, tied=False))
    spoiled = numbers(spec)
    spoiled["pos_embed.weight"][2, 4] = NAN
    for position in ("1", "-1"):
        birth = found(request(spec, spoiled), position)
        assert (birth.path, birth.position, birth.channel, birth.weight_index) == ("embed", 2, 4, [2, 4])


# Several texts, both stacks, the last row alone


def test_the_text_and_its_own_position_are_named_though_texts_are_padded():
    spec = replace(SPECS["gpt2-small"], lm_head=replace(SPECS["gpt2-small"].lm_head, tied=False))
    spoiled = numbers(spec)
    spoiled["embed.weight"][33, 7] = NAN
    birth = found(request(spec, spoiled, [[1, 2, 3, 4, 5], [6, 33, 7]]))
    assert (birth.path, birth.text, birth.position, birth.channel) == ("embed", 1, 1, 7)
    assert "text 1, token 1 (id 33)" in birth.message and birth.weight_index == [33, 7]


def test_of_the_last_position_alone_the_position_is_the_text_s():
    """The last layer's queries are of one row; it is the eighth of the text."""
    spec = SPECS["gpt2-small"]
    spoiled = numbers(spec)
    spoiled["layers.1.attn.q.bias"][0] = NAN
    birth = found(request(spec, spoiled), "-1")
    assert (birth.path, birth.position, birth.head, birth.channel) == ("layers.1.attn.q", 7, 0, 0)


def test_a_source_s_token_is_named():
    spec = SPECS["transformer-2017-base"]
    spoiled = numbers(spec)
    spoiled["layers.1.cross.k.weight"][3, 1] = NAN
    birth = found(request(spec, spoiled))
    assert (birth.path, birth.of_source, birth.position) == ("layers.1.cross.k", True, 0)
    assert "source token 0 (id 9), kv head 0, channel 3" in birth.message
    spoiled = numbers(spec)
    spoiled["encoder.layers.0.mlp.down.bias"][6] = INF
    birth = found(request(spec, spoiled))
    assert (birth.path, birth.layer_index, birth.of_source) == ("encoder.layers.0.mlp_out", 0, True)
    assert "(encoder layer 1), source token 0" in birth.message


# The kernel


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("causal", [True, False])
def test_of_a_short_text_too_scores_that_are_nan_give_nan(causal, dtype):
    """Torch's CPU kernel gives zeros where all scores that a query sees are NaN and keys are few."""
    generator = torch.Generator().manual_seed(0)
    for length in (1, 2, 3, 7, 8, 9, 15, 16, 17, 40):
        places = torch.arange(length)[None]
        sight = Sight(places, places, None, causal, None)
        for which in "qk":
            for position in {0, length // 2, length - 1}:
                q, k, v = (torch.randn(2, h, length, 8, generator=generator).to(dtype) for h in (4, 2, 2))
                sound = fused(q, k, v, sight, 0.3, None)
                (q if which == "q" else k)[0, 1, position, 3] = NAN
                z = fused(q, k, v, sight, 0.3, None)
                pattern = weigh(q, k.repeat_interleave(2, 1), sight.mask(), 0.3)[1]
                assert pattern.isnan().any() and sound.isfinite().all()
                assert torch.equal(z.isnan().any(-1), pattern.isnan().any(-1))


# The commands

TEXT = "The cat sat on"


@pytest.fixture
def spoiled(tmp_path):
    """tiny-gpt2 with one weight's element replaced."""
    sample = shipped.samples()["tiny-gpt2"]

    @cache
    def of(name: str, index: int, bad: float) -> Path:
        folder = tmp_path / f"{name}-{index}-{bad}"
        folder.mkdir()
        for file in sample.iterdir():
            if file.suffix != ".safetensors":
                (folder / file.name).write_bytes(file.read_bytes())
        tensors = load_file(sample / "model.safetensors")
        assert name in tensors, sorted(tensors)
        tensors[name].view(-1)[index] = bad
        save_file(tensors, folder / "model.safetensors")
        return folder

    return of


@pytest.mark.parametrize(
    "words",
    [
        ["forward"],
        ["forward", "--stages"],
        ["topk"],
        ["topk", "--position", "all"],
        ["score"],
        ["trace"],
        ["trace", "--at", "logits"],
        ["trace", "--at", "embed"],
        ["trace", "--attribute", "it"],
        ["lens"],
        ["lens", "--position", "-1"],
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("bad", [NAN, INF])
def test_every_command_names_it_and_ends_with_1(words, bad, spoiled):
    """c_attn's bias holds q, k and v of 32 numbers each: number 40 is k's 8, head 1's first."""
    folder = spoiled("transformer.h.1.attn.c_attn.bias", 40, bad)
    command, *options = words
    ran = run(command, "-m", folder, TEXT, *options, "--json")
    assert ran.status == 1 and ran.json["status"] == "findings"
    [finding] = ran.json["findings"]
    assert (finding["code"], finding["path"]) == ("not-finite", "layers.1.attn.k")
    assert (finding["layer_index"], finding["position"], finding["token"]) == (1, 0, "The")
    assert (finding["head"], finding["channel"], finding["text"]) == (1, 0, 0)
    assert (finding["weight"], finding["weight_index"]) == ("layers.1.attn.k.bias", [8])
    ran = run(command, "-m", folder, TEXT, *options)
    value = "NaN" if math.isnan(bad) else "inf"
    line = f'{value} is born in layers.1.attn.k (layer 2), token 0 "The", kv head 1, channel 0: '
    assert ran.status == 1 and f"finding not-finite: {line}weight layers.1.attn.k.bias[8] is {value}" in ran.err


@pytest.mark.parametrize("at, suffix", [("*.pattern", "safetensors"), ("*", "safetensors"), ("embed", "npy")])
def test_a_file_is_written_whole_and_the_command_ends_with_1(at, suffix, spoiled, tmp_path):
    folder = spoiled("transformer.h.1.attn.c_attn.bias", 40, NAN)
    file = tmp_path / f"x.{suffix}"
    words = ("trace", "--at", at, "-o", file, "--force", TEXT)
    ran = run(*words, "-m", folder)
    assert ran.status == 1 and "finding not-finite: NaN is born in layers.1.attn.k (layer 2), token 0" in ran.err
    written = file.stat().st_size
    assert run(*words, "-m", spoiled("transformer.h.1.attn.c_attn.bias", 40, 0.5)).status == 0
    assert abs(written - file.stat().st_size) < 300  # two names of folders


def test_a_sound_model_ends_with_0(spoiled):
    folder = spoiled("transformer.h.1.attn.c_attn.bias", 40, 0.5)
    for command in ("forward", "topk", "score", "trace", "lens"):
        assert run(command, "-m", folder, TEXT).status == 0


def test_an_id_of_the_logits_is_named_by_its_token():
    report = run("topk", "Cats sit on", "--json").json
    assert report["findings"] == []
    spec = read_config(shipped.configs()["cats"]).spec
    model = Model(spec=spec, source="shipped", config=read_config(shipped.configs()["cats"]))
    one = Run(model, [[12, 45, 78]])
    tensors = {**{p.name: one.weights[p.name].clone() for p in layout(spec)}}
    tensors["lm_head.weight"][90, 1] = NAN
    one.weights = Weights.of(layout(spec), tensors)
    birth = found(one)
    assert birth.message == ('NaN is born in logits, token 0 "Cats", id 90 "mats": weight lm_head.weight[90, 1] is NaN')


# What it costs


def test_nothing_is_looked_at_where_all_is_well_and_once_more_where_not(monkeypatch):
    spec, calls = SPECS["gpt2-small"], []
    plain, one_layer = forward_module.forward, forward_module.layer

    def counted(inputs, weights, spec, probe):
        calls.append(type(probe).__name__)
        return plain(inputs, weights, spec, probe)

    def layer(*given):
        calls.append("layer")
        return one_layer(*given)

    monkeypatch.setattr(forward_module, "forward", counted)
    monkeypatch.setattr(forward_module, "layer", layer)
    clean = numbers(spec)
    for report in (lambda one: topk_report(one, 3, (), "-1", 1.0), score_report, lens_report):
        calls.clear()
        report(request(spec, clean))
        assert len(calls) == 3 and calls[1:] == ["layer"] * 2  # one pass through two layers
    calls.clear()
    forward_report(request(spec, clean), 3, (), inner=False)
    assert len(calls) == 3
    clean["layers.0.mlp.up.weight"][0, 0] = NAN
    calls.clear()
    assert found(request(spec, clean)) is not None
    assert calls == ["Silent", "layer", "layer", "Watch", "layer"]  # it stops in the first layer


@pytest.mark.parametrize("name", [name for name, spec in SPECS.items() if spec.lm_head is not None])
def test_the_look_keeps_nothing_and_changes_nothing(name):
    """Sound activations pass through the probe as they are; the weights of the run are the ones before."""
    from gptcli.model.birth import Search, Watch

    spec = SPECS[name]
    one = request(spec, numbers(spec))
    search = Search(dict(points(spec)))
    watched = one.forward("all", Watch(search))
    assert torch.equal(watched, one.forward("all")) and search.first is None
    assert all(isinstance(read.tensor, torch.Tensor) for read in search.read.values())
    bad = numbers(spec)
    bad["layers.0.mlp.down.weight"][0] = NAN
    one = request(spec, bad)
    weights = one.weights
    assert found(one).path == "layers.0.mlp_out" and one.weights is weights
