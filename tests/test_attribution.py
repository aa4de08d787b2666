"""`trace --attribute`: the parts of a logit sum to it in every family, and each part is what its absence would take.

Two oracles. The worked example by hand: products of the document's own numbers. And ablation with every norm's scale
held: a part's vector is carried forward from where it is added to the stream to the logit, while the package goes from
the logit back.
"""

import json
import math
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import gptcli
from gptcli import shipped
from gptcli.config import read_config
from gptcli.report.attribution import WANTED, AttributionReport, attribution_report
from gptcli.run import Run
from gptcli.source import Model, open_model
from gptcli.spec import Dense, Experts, LayerNorm, Learned, Sinusoidal
from gptcli.trace import Recorder
from tests.command import gptcli as run
from tests.test_trace_families import ACTIVATIONS, IDS, SOURCE_IDS, TOYS, fed
from tests.toys import shrunk

WITH_HEAD = [name for name in TOYS if not name.endswith("no head")]
GOLDEN = json.loads((Path(__file__).parent / "data/golden.json").read_text(encoding="utf-8"))["cats"]


def request(path: Path, dtype: str) -> Run:
    model = open_model(str(path))
    return Run(model, [IDS], dtype, source=None if model.spec.encoder is None else [SOURCE_IDS])


def attributed(one: Run, words: list[str], position: str) -> AttributionReport:
    report = attribution_report(one, words, position)
    assert report.status == "ok" and all(check.ok for check in report.proof), report.proof
    return report


# The worked example, by hand


def dot(a: list[float], b: list[float]) -> float:
    return math.fsum(x * y for x, y in zip(a, b))


@pytest.mark.parametrize("position", [0, 1, 2])
@pytest.mark.parametrize("word, row", [("mats", [0.2, 0.4, 0.1, 0.3]), ("chairs", [-0.2, 0.1, 0.4, -0.1])])
def test_every_part_of_the_worked_example_by_hand(word, row, position):
    """Its output projections are identities: head 0 gives the first two numbers, head 1 the others.

    The final norm divides by the root of the mean square of the last layer's stream, the document's own numbers.
    """
    last = GOLDEN["layers"][1]["resid_post"][position]
    size = math.sqrt(dot(last, last) / 4 + 1e-6)
    expected = {"embed": dot(GOLDEN["embedding"][position], row) / size}
    for i, layer in enumerate(GOLDEN["layers"]):
        z = layer["attn_out"][position]
        expected[f"L{i}H0"] = dot(z[:2], row[:2]) / size
        expected[f"L{i}H1"] = dot(z[2:], row[2:]) / size
        expected[f"L{i} mlp"] = dot(layer["mlp_out"][position], row) / size
    report = run("trace", "--attribute", word, "--position", str(position), "--dtype", "f64", "--json").json
    assert report["schema"] == "gptcli.attribution/1" and report["status"] == "ok"
    [split] = report["splits"]
    assert [part["label"] for part in split["parts"]] == list(expected)
    found = {part["label"]: part["value"] for part in split["parts"]}
    assert found == pytest.approx(expected, abs=1e-9)
    assert split["sum"] == pytest.approx(split["logit"], abs=1e-12)
    assert split["logit"] == pytest.approx(dot(last, row) / size, abs=1e-9)
    assert (split["target"], split["position"]) == (word, position)


# Every family: the sum


@pytest.mark.parametrize("name", WITH_HEAD)
def test_the_parts_sum_to_the_logit(name, toy):
    for dtype, allowed in (("float64", 1e-9), ("float32", 1e-5), ("bfloat16", 2e-2), ("float16", 5e-3)):
        one = request(toy(name), dtype)
        report = attributed(one, ["7", "3"], "all")
        logits = one.forward("all")[0]
        assert [(s.position, s.id) for s in report.splits] == [(i, id_) for i in range(len(IDS)) for id_ in (7, 3)]
        for split in report.splits:
            values = [part.value for part in split.parts]
            assert split.logit == float(logits[split.position, split.id])
            assert abs(math.fsum(values) - split.logit) <= allowed * math.fsum(map(abs, values))
            if dtype == "float64":
                assert math.fsum(values) == pytest.approx(split.logit, abs=1e-9)
            assert split.sum == math.fsum(values)
            groups = [i for group in split.groups for i in group.parts]
            assert groups == list(range(len(values)))
            assert math.fsum(group.value for group in split.groups) == pytest.approx(split.sum, rel=1e-9)


# Every family: each part, carried forward


class Forward:
    """A vector that is added to the stream, carried on to a logit with every norm's scale held."""

    def __init__(self, one: Run, query: int, target: int):
        self.spec, self.w, self.query, self.target = one.model.spec, one.weights, query, target
        recorder = Recorder("*", note=lambda path, x: x[0].double())
        one.forward("all", recorder)
        self.kept = recorder.kept

    def at(self, path: str) -> torch.Tensor:
        x = self.kept[path]
        return x[:, self.query] if x.ndim == 3 else x[self.query]

    def has(self, path: str) -> bool:
        return path in self.kept

    def norm(self, delta: torch.Tensor, path: str, x: torch.Tensor) -> torch.Tensor:
        """What a norm of x makes of a part of x: by torch's own norm, whose scale is read off its output."""
        norm = self.spec.norm
        weight = self.w.get(f"{path}.weight")
        weight = torch.ones_like(x) if weight is None else weight
        if isinstance(norm, LayerNorm):
            straight = F.layer_norm(x, x.shape, eps=norm.eps)
            scale = straight.norm() / (x - x.mean()).norm()
            return (delta - delta.mean()) * scale * weight
        straight = F.rms_norm(x, x.shape, eps=norm.eps)
        return delta * (straight.norm() / x.norm()) * (norm.offset + weight)

    def out(self, delta: torch.Tensor, layer: int, sublayer: str) -> float:
        """A part of what a sublayer gives, on to the logit."""
        at = f"layers.{layer}.{sublayer}"
        if self.has(f"{at}_out_norm"):
            delta = self.norm(delta, f"{at}_out_norm", self.at(f"{at}_out"))
        return self.stream(delta * self.spec.residual_scale, layer, sublayer)

    def before(self, layer: int, sublayer: str) -> torch.Tensor:
        """The sum that a norm after a sublayer takes."""
        resid = {"attn": "resid_pre", "cross": "resid_mid", "mlp": "resid_mid"}
        resid |= {"mlp": "resid_cross"} if self.spec.encoder is not None else {}
        return self.at(f"layers.{layer}.{resid[sublayer]}") + self.at(f"layers.{layer}.{sublayer}_out")

    def stream(self, delta: torch.Tensor, layer: int, sublayer: str) -> float:
        """A part of the stream's sum with a sublayer's output, on to the logit."""
        order = [s for s in ("attn", "cross", "mlp") if self.has(f"layers.{layer}.{s}_out")]
        rest = [(layer, s) for s in order[order.index(sublayer) :]]
        rest += [(i, s) for i in range(layer + 1, self.spec.n_layers) for s in order]
        for i, s in rest:
            if self.spec.norm.placement == "post":
                delta = self.norm(delta, f"layers.{i}.{s}_norm", self.before(i, s))
        return self.final(delta)

    def final(self, delta: torch.Tensor) -> float:
        """A part of the last stream."""
        last = self.at(f"layers.{self.spec.n_layers - 1}.resid_post")
        return self.head(self.norm(delta, "final_norm", last) if self.has("final_norm") else delta)

    def head(self, delta: torch.Tensor) -> float:
        """A part of the final vector."""
        head = self.spec.lm_head
        if head.transform is not None:
            before = self.at("lm_head.dense")
            after = ACTIVATIONS[head.transform.activation](before)
            delta = F.linear(delta, self.w["lm_head.dense.weight"])
            delta = self.norm(delta * after / before, "lm_head.norm", after)
        return self.logit(delta)

    def logit(self, delta: torch.Tensor) -> float:
        if "embed_out.weight" in self.w:
            delta = F.linear(delta, self.w["embed_out.weight"])
        return self.spec.lm_head.scale * float(delta @ self.w["lm_head.weight"][self.target])

    def embedded(self, delta: torch.Tensor) -> float:
        """A part of the embedding."""
        if self.has("embed_norm"):
            delta = self.norm(delta, "embed_norm", self.at("embed"))
        if self.spec.norm.placement != "post":
            return self.final(delta)
        return self.stream(delta, 0, "attn")

    # The parts

    def parts(self) -> dict[str, float]:
        """Every part's value by its label; biases of norms stand in the sum alone."""
        found = dict(self.embedding())
        for i in range(self.spec.n_layers):
            spec = self.spec.at(i)
            found |= self.attention(i, "attn", spec.attention.n_heads)
            if spec.encoder is not None:
                found |= self.attention(i, "cross", spec.cross.n_heads)
            if isinstance(spec.mlp, Dense):
                found[f"L{i} mlp"] = self.out(self.at(f"layers.{i}.mlp_out"), i, "mlp")
            elif isinstance(spec.mlp, Experts):
                found |= {label: self.out(x, i, "mlp") for label, x in self.experts(i, spec)}
        return found

    def embedding(self):
        spec, w = self.spec, self.w
        row = w["embed.weight"][IDS[self.query]] * 1.0
        if "embed_in.weight" in w:
            row = F.linear(row, w["embed_in.weight"])
        yield "embed", self.embedded(row * spec.embed_scale)
        if spec.n_segments is not None:
            yield "segment_embed", self.embedded(w["segment_embed.weight"][0])
        if isinstance(spec.position, Learned):
            yield "pos_embed", self.embedded(w["pos_embed.weight"][self.query + spec.position.offset])
        if isinstance(spec.position, Sinusoidal):
            yield "sinusoids", self.embedded(self.at("embed") - row * spec.embed_scale)

    def attention(self, i: int, name: str, heads: int) -> dict[str, float]:
        z, weight = self.at(f"layers.{i}.{name}.z"), self.w[f"layers.{i}.{name}.o.weight"]  # [H, D]
        found = {}
        for head in range(heads):
            alone = torch.zeros_like(z)
            alone[head] = z[head]
            across = " cross " if name == "cross" else ""
            found[f"L{i}{across}H{head}"] = self.out(F.linear(alone.flatten(), weight), i, name)
        bias = self.w.get(f"layers.{i}.{name}.o.bias")
        return found if bias is None else found | {f"L{i} {name} bias": self.out(bias, i, name)}

    def experts(self, i: int, spec):
        """Every expert that was taken, by the paper's formula."""
        part, w = spec.mlp, self.w.at(f"layers.{i}.mlp")
        x = self.at(f"layers.{i}.mlp_norm")

        def linear(x, name):
            return F.linear(x, w[f"{name}.weight"], w.get(f"{name}.bias"))

        def given(name):
            gate, up = linear(x, f"{name}.gate"), linear(x, f"{name}.up")
            if part.limit is not None:
                gate, up = gate.clamp(max=part.limit), up.clamp(-part.limit, part.limit) + 1
            return linear(ACTIVATIONS[part.activation](gate) * up, f"{name}.down")

        p = self.at(f"layers.{i}.mlp.router").softmax(-1)
        taken = sorted(p.argsort(descending=True)[: part.top_k].tolist())
        p = p / p[taken].sum() if part.normalized else p
        for expert in taken:
            yield f"L{i} expert {expert}", p[expert] * given(f"experts.{expert}")
        if part.shared_size is not None:
            yield f"L{i} shared expert", torch.sigmoid(linear(x, "shared_router")) * given("shared")


@pytest.mark.parametrize("name", WITH_HEAD)
def test_every_part_is_what_its_vector_gives_carried_forward(name, toy):
    """In float64; a head's vector is the output projection of its z with all other heads zero."""
    one = request(toy(name), "float64")
    with torch.inference_mode():
        for query, target in ((7, 7), (3, 11)):
            [split] = attributed(one, [str(target)], str(query)).splits
            expected = Forward(one, query, target).parts()
            found = {part.label: part.value for part in split.parts}
            assert len(found) == len(split.parts)
            ours = {label: value for label, value in found.items() if label in expected}
            assert ours == pytest.approx(expected, abs=1e-9)
            left = found.keys() - expected.keys()
            assert all(
                re.fullmatch(r"(L\d+ \w+_norm|\w+_norm|lm_head\.norm|head( dense)?) bias|soft cap", x) for x in left
            )


def test_the_test_above_tells_parts_apart(toy):
    """One part at another position, or another token's, is noticed."""
    one = request(toy("gpt2"), "float64")
    with torch.inference_mode():
        found = [Forward(one, query, target).parts()["L1H0"] for query, target in ((7, 7), (6, 7), (7, 8))]
    assert len({round(value, 6) for value in found}) == 3


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2", "olmo2", "bart", "mixtral"])
def test_ablation_with_the_last_scale_held_takes_what_the_part_says(name, toy):
    """What is left of the last stream without a part, normed at the run's own scale, less the whole: gpt2 and its like.

    Where norms stand in between, those are held by the vector itself: olmo2's and bart's are in Forward's way alone.
    """
    one = request(toy(name), "float64")
    [split] = attributed(one, ["5"], "-1").splits
    carried = Forward(one, len(IDS) - 1, 5)
    if carried.spec.norm.placement == "pre":
        mlp = carried.at("layers.0.mlp_out") * carried.spec.residual_scale
        last = carried.at(f"layers.{carried.spec.n_layers - 1}.resid_post")
        norm, weight = carried.spec.norm, carried.w["final_norm.weight"]
        without = last - mlp
        if isinstance(norm, LayerNorm):
            scale = torch.rsqrt(last.var(unbiased=False) + norm.eps)
            normed = [(x - x.mean()) * scale * weight for x in (last, without)]
        else:
            scale = torch.rsqrt(last.square().mean() + norm.eps)
            normed = [x * scale * (weight + norm.offset) for x in (last, without)]
        whole, rest = (carried.logit(x) for x in normed)
        taken = math.fsum(part.value for part in split.parts if part.kind == "mlp" and part.layer_index == 0)
        assert whole - rest == pytest.approx(taken, abs=1e-9)
    heads = [part for part in split.parts if part.kind == "head" and part.layer_index == 1]
    numbers = carried.spec.at(1).attention.n_heads * (2 if carried.spec.encoder is not None else 1)
    assert len(heads) == numbers


def test_what_is_frozen_is_said(toy):
    frozen = {name: attributed(request(toy(name), "float64"), ["7"], "-1").frozen for name in ("gpt2", "bert", "olmo2")}
    assert frozen["gpt2"] == ["final_norm"]
    after = [f"layers.{i}.{name}_norm" for i in range(3) for name in ("attn", "mlp")]
    assert frozen["bert"] == ["embed_norm", *after, "lm_head gelu", "lm_head.norm"]
    outputs = [path for path in frozen["olmo2"] if path.endswith("_out_norm")]
    assert frozen["olmo2"] == [*outputs, "final_norm"] and len(outputs) == 2 * gptcli.open(toy("olmo2")).spec.n_layers


def test_a_soft_cap_is_the_remainder(toy):
    one = request(toy("gemma2"), "float64")
    [split] = attributed(one, ["7"], "-1").splits
    cap = one.model.spec.lm_head.softcap
    *parts, last = split.parts
    whole = math.fsum(part.value for part in parts)
    assert (last.label, last.kind) == ("soft cap", "remainder")
    assert last.value == pytest.approx(cap * math.tanh(whole / cap) - whole, abs=1e-12)
    assert all(part.kind != "remainder" for part in parts)


SHIPPED = {name: shrunk(read_config(path).spec) for name, path in shipped.configs().items()}


@pytest.mark.parametrize("name", [name for name, spec in SHIPPED.items() if spec.lm_head is not None])
def test_watching_changes_no_bit_of_any_shipped_architecture(name):
    """Nor does the sum fail there: random weights, whose biases are zeros."""
    spec = SHIPPED[name]
    ids, source = ([id_ % spec.vocab_size for id_ in given] for given in (IDS, SOURCE_IDS))
    ids = ids[: spec.context_length]
    one = Run(Model(spec=spec, source="toy"), [ids], "float32", source=spec.encoder and [source])
    one.model.__dict__["labels"] = None
    report = attribution_report(one, ["2"], "all")
    assert report.status == "ok" and len(report.splits) == len(ids)
    recorder = Recorder(*WANTED)
    assert torch.equal(one.forward("all", recorder), one.forward("all")) and recorder.kept


# What a person sees

TINY = ["trace", "-m", "tiny-gpt2", "The cat sat on the", "--attribute", "it"]


def test_the_largest_parts_with_bars_and_the_rest_as_one():
    [split] = run(*TINY, "--json").json["splits"]
    ran = run(*TINY, "--top", "5")
    rows = re.findall(r"^(.+?) +(-?\d+\.\d{4})( *)(█*)│ ?(█*)$", ran.out, re.M)
    values = [split["parts"][i] for i in split["largest"][:5]]
    assert [(row[0], row[1]) for row in rows[:5]] == [(part["label"], f"{part['value']:.4f}") for part in values]
    sizes = sorted((abs(part["value"]) for part in split["parts"]), reverse=True)
    assert [abs(part["value"]) for part in values] == sizes[:5]
    longest = abs(values[0]["value"])
    for (_, _, _, left, right), part in zip(rows, values):
        length = round(14 * abs(part["value"]) / longest)
        assert (len(left), len(right)) == ((length, 0) if part["value"] < 0 else (0, length))
    others = [part["value"] for i, part in enumerate(split["parts"]) if i not in split["largest"][:5]]
    assert rows[5][0] == f"{len(others)} parts more" and float(rows[5][1]) == pytest.approx(math.fsum(others), abs=6e-5)
    assert re.search(rf"^sum +{split['logit']:.4f}$", ran.out, re.M)
    assert f"logit {split['logit']:.4f} of it · after position 4 ␣the · rank 1 · probability" in ran.out
    assert "1 scale held at this run's numbers: final_norm" in ran.out
    assert re.search(r"^ok  parts sum to the logit .* off by \S+ ≤ 1e-05$", ran.out, re.M)


def test_full_groups_by_layer():
    out = run(*TINY, "--full").out
    [split] = run(*TINY, "--json").json["splits"]
    groups = re.findall(r"^(embedding|layer \d|head) +(-?[\d.]+)$", out, re.M)
    assert groups == [(group["name"], f"{group['value']:.4f}") for group in split["groups"]]
    assert [name for name, _ in groups] == ["embedding", "layer 1", "layer 2", "head"]
    inner = re.findall(r"^  (\S.*?) +-?\d\.\d{4} ", out, re.M)
    assert inner == [part["label"] for part in split["parts"]]


def test_a_terminal_of_80_columns_and_one_without_signs():
    for words in (TINY, [*TINY, "--full"]):
        assert all(len(line) <= 80 for line in run(*words, columns=80, NO_COLOR="1").out.splitlines())
        assert "\\u" not in run(*words, encoding="ascii").out


def test_several_tokens_and_positions():
    words = ["trace", "--attribute", "mats", "--attribute", "chairs", "--attribute", "mats", "--position", "all"]
    report = run(*words, "--json").json
    assert [(split["position"], split["target"]) for split in report["splits"]] == [
        (position, word) for position in range(3) for word in ("mats", "chairs")
    ]
    assert run(*words, "-q").out.splitlines()[-2].startswith("2\tmats\tL0 mlp\t0.222")


def test_a_masked_position_is_split_where_there_is_one(toy):
    ran = run("trace", "-m", toy("bert"), *fed("bert"), "--attribute", "7")
    assert ran.status == 2 and "no mask to fill in" in ran.err
    ran = run("trace", "-m", toy("bert"), *fed("bert"), "--attribute", "7", "--position", "2")
    assert ran.status == 0 and "at position 2" in ran.out


@pytest.mark.parametrize(
    "words, told",
    [
        (["--attribute", "mats", "--layer", "1"], "--attribute and --layer"),
        (["--attribute", "mats", "--head", "1"], "--attribute and --head"),
        (["--attribute", "mats", "--attention", "self"], "--attribute and --attention"),
        (["--attribute", "mats", "--at", "L0H0"], "--attribute and --at"),
        (["--attribute", "mats", "--at", "embed"], "--attribute and --at"),
        (["--attribute", "mats", "--list"], "--attribute and --list"),
        (["--attribute", "mats", "--map"], "--attribute and --map"),
        (["--top", "3"], "--top without --attribute"),
        (["--attribute", "dogs"], "unknown word 'dogs'"),
        (["--attribute", "mats", "--position", "9"], "--position 9: beyond the text"),
        (["--attribute", "mats", "--batch", "Cats", "sit"], "2 texts, but a logit is of one"),
    ],
)
def test_what_makes_no_sense_is_refused(words, told):
    ran = run("trace", *words)
    assert ran.status == 2 and told in ran.err and ran.err.count("\n") == 1


def test_a_model_without_a_head_is_refused(toy):
    ran = run("trace", "-m", toy("bert, no head"), *fed("bert, no head"), "--attribute", "7")
    assert ran.status == 2 and "has no head" in ran.err


def test_the_same_from_python():
    [split] = gptcli.open("tiny-gpt2").attribute(TINY[3], "it").splits
    assert [part.value for part in split.parts] == [
        part["value"] for part in run(*TINY, "--json").json["splits"][0]["parts"]
    ]
