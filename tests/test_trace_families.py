"""`trace` on every family at toy size: the proof holds, and every printed formula, computed, gives the printed numbers.

The formulas are read as a person reads them, and evaluated in float64 from the recorded activations and the weights.
"""

import math
import re
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM, AutoModelForSeq2SeqLM

import gptcli
from gptcli.api import Opened
from gptcli.families import FAMILIES
from gptcli.spec import Spec
from gptcli.trace import POINTS
from tests import test_families_encoders as encoders
from tests import test_families_experts as experts
from tests import test_families_gemma as gemma
from tests import test_families_gpt as gpt
from tests import test_families_llama as llama
from tests import test_families_others as others
from tests import test_families_seq2seq as seq2seq
from tests.command import gptcli as run

TOYS = {
    **{kind: gpt.small(kind) for kind in gpt.SMALL},
    **{kind: llama.SMALL | {"model_type": kind} | config for kind, config in llama.CASES.items()},
    **{kind: gemma.SMALL | {"model_type": kind} | config for kind, config in gemma.CASES.items()},
    "gemma3": gemma.BOTH,
    **experts.CASES,
    **others.CASES,
    "gpt_neox, one after the other": gpt.small("gpt_neox", {"use_parallel_residual": False}),
    "gpt_neox, yarn": gpt.small("gpt_neox", gpt.CASES["gpt_neox, yarn"]),
    "llama, linear": llama.SMALL | {"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 3.0}},
    "opt, rows of their own size": gpt.small("opt", {"word_embed_proj_dim": 10}),
    "opt, norms after": gpt.small("opt", {"do_layer_norm_before": False}),
    "opt, norms without weights": gpt.small("opt", {"layer_norm_elementwise_affine": False}),
    "phi, q and k normed": gpt.small("phi", gpt.CASES["phi, q and k normed"]),
    "gemma3_text, both ways": gemma.SMALL
    | {"model_type": "gemma3_text", "sliding_window": 6, "use_bidirectional_attention": True},
    "qwen2_moe, in every layer": experts.QWEN2,
    "stablelm, side by side, a norm for each head": others.RARE["stablelm: side by side"],
    "nanochat, a scaled rotation": others.RARE["nanochat: a scaled rotation"],
    **encoders.CASES,
    "modernbert, local first": encoders.small("modernbert", encoders.RARE["modernbert, local first"]),
    "bert, no head": encoders.CASES["bert"] | {"architectures": ["BertModel"]},
    **{name: seq2seq.case(name) for name in seq2seq.CASES},
}
every_toy = pytest.mark.parametrize("name", TOYS)
IDS = [5, 17, 3, 60, 22, 8, 41, 9]
SOURCE_IDS = [9, 2, 33, 4, 4, 11]
FED = ",".join(map(str, IDS))
SOURCE = ("--source-ids", ",".join(map(str, SOURCE_IDS)))


def auto(name: str) -> type:
    """The library's class for a toy."""
    kind = TOYS[name]["model_type"]
    if name.endswith("no head"):
        return AutoModel
    masked = AutoModelForMaskedLM if kind in encoders.CASES else AutoModelForCausalLM
    return AutoModelForSeq2SeqLM if name in seq2seq.CASES else masked


def fed(name: str, ids: str = FED) -> list[str]:
    """What the toy reads: a text, and for its encoder a source."""
    return ["--ids", ids, *(SOURCE if name in seq2seq.CASES else ())]


def attentions(name: str) -> list[str]:
    return ["self", "cross", "encoder"] if name in seq2seq.CASES else ["self"]


def walks_of(path: Path, *words: str) -> dict:
    ran = run("trace", "-m", path, *words, "--json")
    assert ran.status == 0, ran
    report = ran.json
    assert report["status"] == "ok" and report["findings"] == []
    assert all(check["ok"] for check in report["proof"])
    return report


def test_every_family_is_here():
    assert {config["model_type"] for config in TOYS.values()} == set(FAMILIES)


ACTIVATIONS = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_sigmoid": lambda x: x * torch.sigmoid(1.702 * x),
    "silu": F.silu,
    "relu_squared": lambda x: F.relu(x) ** 2,
}


class Reading:
    """A printed formula, computed at one layer, head and query (all from 0) of what a run recorded."""

    def __init__(self, model: Opened, layer: int, head: int, query: int, attention: str = "self"):
        self.model, self.layer, self.head, self.query = model, layer, head, query
        self.stack = "encoder." if attention == "encoder" else ""
        self.part = "cross" if attention == "cross" else "attn"
        self.spec: Spec = (model.spec.encoder if self.stack else model.spec).at(layer)
        a = self.spec.cross if attention == "cross" else self.spec.attention
        self.kv_head, self.size = head // (a.n_heads // a.n_kv_heads), a.head_dim
        self.ids = SOURCE_IDS if self.stack else IDS
        self.keys = IDS if attention == "self" else SOURCE_IDS

    def weight(self, name: str) -> torch.Tensor:
        """`layers.#.` stands before what is no name of its own."""
        own = "embed" in name or name.startswith("rel_bias")
        return self.model.weights[self.stack + (name if own else f"layers.{self.layer}.{name}")]

    def all(self, name: str) -> torch.Tensor:
        """A whole activation of the one text."""
        if name in ("q", "k", "v", "q_norm", "k_norm", "q_rot", "k_rot"):
            name = f"{self.part}.{name}"
        path = name if name.startswith(("layers.", "encoder.")) else f"{self.stack}layers.{self.layer}.{name}"
        return recorded(self.model)[path][0]

    def recorded(self, name: str) -> torch.Tensor:
        """An activation at the query, its heads side by side."""
        x = self.all(name)
        return (x[:, self.query] if x.ndim == 3 else x[self.query]).flatten()

    def mine(self, x: torch.Tensor, letter: str) -> torch.Tensor:
        """This head's numbers of all heads'."""
        head = self.head if letter == "q" else self.kv_head
        return x[head * self.size : (head + 1) * self.size]

    def value(self, label: str, formula: str, above: torch.Tensor) -> torch.Tensor:
        """above: the vector of the row before, which a norm takes when it names none."""
        letter = label.removeprefix(f"{self.part}.")[0] if label.startswith(f"{self.part}.") else ""
        if formula.startswith(("x/√", "(x-mean(x))/√")):
            return self.norm(label, letter, formula, above)
        if " turned by " in formula:
            return self.turned(letter, formula)
        if formula.startswith("Σ p·expert"):
            return self.experts(formula)
        if formula == "Σ weight·v":
            weights = self.all(f"{self.part}.pattern")[self.head, self.query]
            return weights @ self.all(f"{self.part}.v")[self.kv_head]
        if formula == "all heads' z, side by side":
            return self.recorded(f"{self.part}.z")
        x = self.sum(formula)
        return self.mine(x, letter) if letter else x

    def sum(self, formula: str) -> torch.Tensor:
        return sum(self.term(term) for term in re.split(r" \+ (?!\d\])", formula))

    def term(self, term: str) -> torch.Tensor:
        if at := re.fullmatch(r"pos_embed\[position(?: \+ (\d))?\]", term):
            return self.weight("pos_embed.weight")[self.query + int(at[1] or 0)]
        if term == "segment_embed[segment]":
            return self.weight("segment_embed.weight")[0]
        if at := re.fullmatch(r"sin, cos of position·θ\^\(-2i/C\), (halves|neighbours), θ = ([\d.]+)", term):
            return self.waves(at[1], float(at[2]))
        if at := re.fullmatch(r"embed\[id\](·Wembed_in)?(?: · (.+))?", term):
            x = self.weight("embed.weight")[self.ids[self.query]]
            x = F.linear(x, self.model.weights["embed_in.weight"]) if at[1] else x
            return x * (self.spec.embed_scale if at[2] else 1)  # the scale is printed in six digits
        if at := re.fullmatch(r"(\w+)\(([\w.]+)\)(?:·([\w.]+))?", term):
            x = ACTIVATIONS[at[1]](self.recorded(at[2]))
            return x * self.recorded(at[3]) if at[3] else x
        if at := re.fullmatch(r"(.+)·W(\w+)(\+b)?", term):
            across = at[1] == "merged cross.z"
            x = self.recorded(f"{'cross' if across else 'attn'}.z" if at[1].startswith("merged") else at[1])
            attending = "cross" if across else "attn" if at[2] == "o" else self.part
            stem = f"{attending}.{at[2]}" if at[2] in "qkvo" else f"mlp.{at[2]}"
            return F.linear(x, self.weight(f"{stem}.weight"), self.weight(f"{stem}.bias") if at[3] else None)
        at = re.fullmatch(r"(?:([\d.]+)·)?([\w.]+)", term)
        return float(at[1] or 1) * self.recorded(at[2])

    def waves(self, pairs: str, theta: float) -> torch.Tensor:
        size = self.spec.hidden_size
        out = torch.empty(size, dtype=torch.float64)
        for i in range(size // 2):
            angle = self.query * theta ** (-2 * i / size)
            sine, cosine = (i, i + size // 2) if pairs == "halves" else (2 * i, 2 * i + 1)
            out[sine], out[cosine] = math.sin(angle), math.cos(angle)
        return out

    def norm(self, label: str, letter: str, formula: str, above: torch.Tensor) -> torch.Tensor:
        said = re.fullmatch(
            r"(?P<mean>\(x-mean\(x\)\)/√\(var\(x\)\+ε\)|x/√\(mean\(x²\)\+ε\))"
            r"(?:·(?:\((?P<offset>[\d.]+)\+w\)|(?P<plain>w)))?(?P<bias>\+b)?"
            r"(?:, x = (?P<of>.*?)(?P<each>, w of this head)?)?",
            formula,
        )
        whole, of = "all heads'" in (said["of"] or ""), said["of"]
        if of is None:
            x = above
        elif whole:
            x = self.recorded(of.split()[2].rstrip(","))
        else:
            x = self.mine(self.recorded(of), letter) if letter else self.sum(of)
        name = "embed_norm" if label == "resid_pre" else label
        x = x - x.mean() if said["mean"].startswith("(x") else x
        x = x / (x.square().mean() + self.spec.norm.eps).sqrt()
        if said["offset"] or said["plain"]:
            own = f".{self.head if letter == 'q' else self.kv_head}" if said["each"] else ""
            x = x * (float(said["offset"] or 0) + self.weight(f"{name}{own}.weight"))
        x = x + self.weight(f"{name}.bias") if said["bias"] else x
        return self.mine(x, letter) if whole else x

    def turned(self, letter: str, formula: str) -> torch.Tensor:
        said = re.fullmatch(
            r"(?:(?P<times>[\d.]+)·)?(?P<of>\w+) turned by (?P<sign>-?)position·"
            r"(?:(?P<kind>\w+)\()?θ\^\(-2i/(?P<size>[DR])\)\)?(?:/(?P<factor>[\d.]+))?, "
            r"(?P<pairs>halves|neighbours)(?:, R = (?P<R>\d+))?, θ = (?P<theta>[\d.e+]+)",
            formula,
        )
        x = self.mine(self.recorded(said["of"]), letter)
        assert (said["size"] == "R") == (said["R"] is not None)
        size = int(said["R"] or self.size)
        if said["kind"]:  # the formula names the scaling, whose frequencies are tested elsewhere
            now = self.mine(self.recorded(f"{letter}_rot"), letter)
            longer = float(said["times"] or 1) * float(x[:size].norm())
            assert float(now[:size].norm()) == pytest.approx(longer, rel=1e-4)
            assert torch.equal(now[size:], x[size:])
            return now
        pairs = torch.arange(size // 2, dtype=torch.float64)
        angle = self.query * float(said["theta"]) ** (-2 * pairs / size) / float(said["factor"] or 1)
        turn = torch.polar(torch.ones_like(angle), -angle if said["sign"] else angle)
        first, second = (pairs.long(), pairs.long() + size // 2) if said["pairs"] == "halves" else (2 * pairs, None)
        second = first + 1 if second is None else second
        first, second = first.long(), second.long()
        turned, out = torch.complex(x[first], x[second]) * turn, x.clone()
        out[first], out[second] = turned.real, turned.imag
        return out

    def experts(self, formula: str) -> torch.Tensor:
        said = re.fullmatch(
            r"Σ p·expert over the top (\d+) of (\d+), p = softmax\(mlp\.router\)(?P<one> scaled to sum to 1)?"
            r"(?P<shared> \+ sigmoid\(x·Wshared_router\)·shared expert)?; an expert: (?P<act>\w+)\("
            r"(?:min\()?x·Wgate(?P<b>\+b)?(?:, (?P<limit>[\d.]+)\))?\)·\((?:clamp\()?x·Wup(?:\+b)?"
            r"(?:, -[\d.]+, [\d.]+\) \+ 1)?\)·Wdown(?:\+b)?, x = (?P<of>\w+)",
            formula,
        )
        x = self.recorded(said["of"])

        def linear(x: torch.Tensor, stem: str) -> torch.Tensor:
            return F.linear(x, self.weight(f"{stem}.weight"), self.weight(f"{stem}.bias") if said["b"] else None)

        def expert(stem: str) -> torch.Tensor:
            gate, up = linear(x, f"{stem}.gate"), linear(x, f"{stem}.up")
            if said["limit"]:
                limit = float(said["limit"])
                gate, up = gate.clamp(max=limit), up.clamp(-limit, limit) + 1
            return linear(ACTIVATIONS[said["act"]](gate) * up, f"{stem}.down")

        p = self.recorded("mlp.router").softmax(-1)
        assert len(p) == int(said[2])
        taken = p.argsort(descending=True)[: int(said[1])]
        p = p / p[taken].sum() if said["one"] else p
        out = sum(p[i] * expert(f"mlp.experts.{i}") for i in taken.tolist())
        if said["shared"]:
            out = out + torch.sigmoid(x @ self.weight("mlp.shared_router.weight")[0]) * expert("mlp.shared")
        return out


@cache
def recorded(model: Opened) -> dict[str, torch.Tensor]:
    return model.activations(IDS, "*", source=None if model.spec.encoder is None else SOURCE_IDS)


def test_one_walk_read_by_hand(toy):
    """The reader above must not pass whatever it is given: one wrong formula of each kind is noticed."""
    model = gptcli.open(toy("gptj"), dtype="float64")
    reading = Reading(model, 0, 1, 7)
    x = recorded(model)
    above = x["layers.0.resid_pre"][0, 7]
    for path, right, wrong in (
        ("resid_mid", "resid_pre + attn_out", "resid_pre + 2·attn_out"),
        ("mlp.up", "attn_norm·Wup+b", "attn_norm·Wup"),
        ("attn_norm", "(x-mean(x))/√(var(x)+ε)·w+b", "x/√(mean(x²)+ε)·w+b"),
        ("mlp.act", "gelu_tanh(mlp.up)", "gelu(mlp.up)"),
        (
            "attn.q_rot",
            "q turned by position·θ^(-2i/R), neighbours, R = 4, θ = 10000",
            "q turned by position·θ^(-2i/R), halves, R = 4, θ = 10000",
        ),
    ):
        now = x[f"layers.0.{path}"][0]
        now = now[1, 7] if now.ndim == 3 else now[7]
        assert float((reading.value(path, right, above) - now).abs().max()) < 1e-9
        assert float((reading.value(path, wrong, above) - now).abs().max()) > 1e-5


@every_toy
def test_every_formula_gives_its_numbers(name, toy):
    """In float64, in every layer and kind of attention: of the last head at one position, of the first at another."""
    path = toy(name)
    model = gptcli.open(path, dtype="float64")
    for attention in attentions(name):
        stack = model.spec.encoder if attention == "encoder" else model.spec
        for head, query in ((-1, 5 if attention == "encoder" else 7), (0, 3)):
            words = ("--layer", "all", "--head", str(head), "--position", str(query), "--attention", attention)
            report = walks_of(path, *fed(name), *words)
            assert [walk["layer_index"] for walk in report["walks"]] == list(range(stack.n_layers))
            for walk in report["walks"]:
                check_walk(walk, Reading(model, walk["layer_index"], walk["head"], query, attention))


def check_walk(walk: dict, reading: Reading) -> None:
    assert walk["kv_head"] == reading.kv_head
    above = torch.empty(0)
    for step in walk["before"] + walk["after"]:
        now = torch.tensor(step["values"], dtype=torch.float64)
        said = reading.value(step["label"], step["formula"], above)
        gap = float((said - now).abs().max())
        assert said.shape == now.shape and gap < 1e-9, (step["path"], step["formula"], gap)
        assert step["mean"] == pytest.approx(float(now.mean()), abs=1e-12)
        assert step["norm"] == pytest.approx(float(now.square().sum().sqrt()), rel=1e-12)
        above = now
    check_keys(walk, reading)


def check_keys(walk: dict, reading: Reading) -> None:
    """A key's row: the product with the query's last form, its score by the walk's formula, its weight, weight · v."""
    steps = {step["label"]: torch.tensor(step["values"], dtype=torch.float64) for step in walk["before"]}
    letters = [label for label in steps if label.startswith(f"{reading.part}.q")]
    q, z = steps[letters[-1]], torch.tensor(walk["after"][0]["values"], dtype=torch.float64)
    products = torch.tensor([key["product"] for key in walk["keys"]], dtype=torch.float64)
    keys = torch.tensor([key["k"] for key in walk["keys"]], dtype=torch.float64)
    torch.testing.assert_close(keys @ q, products, rtol=1e-9, atol=1e-12)
    said = re.fullmatch(
        r"(?:(?P<cap>[\d.]+)·tanh\()?q·k(?:/√D|·(?P<scale>[\d.]+))(?:/[\d.]+\))?(?P<bias> \+ rel_bias\[distance\])?",
        walk["score"],
    )
    assert (said["cap"] is not None) == (walk["softcap"] is not None)
    assert float(said["scale"] or len(q) ** -0.5) == pytest.approx(walk["scale"], rel=1e-5)
    scores = products * walk["scale"]
    scores = walk["softcap"] * torch.tanh(scores / walk["softcap"]) if said["cap"] else scores
    biases = [key["bias"] for key in walk["keys"]]
    assert all((bias is not None) == (said["bias"] is not None) for bias in biases)
    scores = scores + torch.tensor(biases, dtype=torch.float64) if said["bias"] else scores
    torch.testing.assert_close(scores, torch.tensor([key["scaled"] for key in walk["keys"]], dtype=torch.float64))
    ago = walk["position"] - torch.arange(len(reading.keys))
    visible = (ago.abs() < (walk["window"] or 99)) & ((ago >= 0) | (not walk["causal"]))
    assert [key["id"] for key in walk["keys"]] == reading.keys
    assert [key["visible"] for key in walk["keys"]] == visible.tolist()
    powers = scores.exp() * visible
    if said["bias"]:  # a key as far away as another on the same side has the same
        table = reading.weight("rel_bias.weight")[:, walk["head"]].tolist()
        assert all(min(abs(bias - entry) for entry in table) < 1e-12 for bias in biases)
    sink = reading.spec.attention.sinks
    beside = reading.weight("attn.sinks")[walk["head"]].exp() if sink else torch.tensor(0.0)
    weights = torch.tensor([key["weight"] for key in walk["keys"]], dtype=torch.float64)
    torch.testing.assert_close(powers / (powers.sum() + beside), weights, rtol=1e-9, atol=1e-12)
    assert (walk["sink"] is not None) == sink and walk["weights"] == pytest.approx(1, abs=1e-9)
    weighted = torch.tensor([key["weighted"] for key in walk["keys"]], dtype=torch.float64)
    torch.testing.assert_close(weighted.sum(0), z, rtol=1e-9, atol=1e-9)
    norms = torch.tensor([[key["norm_k"], key["norm_weighted"]] for key in walk["keys"]], dtype=torch.float64)
    torch.testing.assert_close(norms, torch.stack((keys.norm(dim=-1), weighted.norm(dim=-1)), -1))


@every_toy
def test_the_list_is_what_is_recorded(name, toy):
    path = toy(name)
    ran = run("trace", "-m", path, *fed(name), "--list", "--json")
    assert ran.status == 0
    listed = [(point["path"], point["shape"]) for point in ran.json["points"]]
    model = gptcli.open(path)
    assert listed == [(path, list(x.shape)) for path, x in recorded(model).items()]


def test_at_shows_every_point_in_the_shape_that_the_list_says(toy):
    """Every name that any model has, on the first of these that has it.

    No encoder or cross attention of a known family has every part that a decoder may have (rotation beside a cross
    attention, sinks): of theirs, the names that are left are likes of names that are shown.
    """
    missing = dict.fromkeys(POINTS)
    for name in TOYS:
        if not missing:
            break
        path, model = toy(name), gptcli.open(toy(name))
        points = run("trace", "-m", path, *fed(name), "--list", "--json").json["points"]
        for point in points:
            general = re.sub(r"^(encoder\.)?layers\.\d+", r"\1layers.#", point["path"])
            if general not in missing:
                continue
            del missing[general]
            ran = run("trace", "-m", path, *fed(name), "--at", point["path"], "--json")
            assert ran.status == 0, ran
            values = torch.tensor(ran.json["values"], dtype=torch.float64)
            assert list(values.shape) == ran.json["shape"] == point["shape"]
            torch.testing.assert_close(values, recorded(model)[point["path"]].double())
    likes = {re.sub(r"^encoder\.", "", path).replace("cross", "attn") for path in missing}
    assert likes.isdisjoint(missing) and likes <= set(POINTS)
    assert not missing.keys() & {"encoder.layers.#.attn.pattern", "layers.#.cross.pattern", "encoder.final_norm"}


@every_toy
def test_all_heads_layers_and_positions_in_bfloat16(name, toy):
    """A walk for each, in order; the proof holds in half precision as well."""
    path = toy(name)
    spec = gptcli.open(path).spec
    heads = range(spec.attention.n_heads)
    report = run("trace", "-m", path, *fed(name, "5,17,3"), "--layer", "all", "--head", "all", "--position", "all",
                 "--dtype", "bf16", "--json").json  # fmt: skip
    assert report["status"] == "ok" and report["model"]["dtype"] == "bfloat16"
    walks = [(walk["layer_index"], walk["head"], walk["position"]) for walk in report["walks"]]
    assert walks == [(layer, head, query) for layer in range(spec.n_layers) for head in heads for query in range(3)]


def test_what_a_person_sees_of_a_cap_a_window_a_sink_and_shared_heads(toy):
    words = ["--ids", FED, "--layer", "1", "--head", "3"]
    shown = run("trace", "-m", toy("gemma2"), *words).out
    assert "· kv head 1 ·" in shown and "score = 2·tanh(q·k·0.377964/2) · a window of 6 keys" in shown
    shown = run("trace", "-m", toy("gpt_oss"), *words).out
    assert "a window of 5 keys · the softmax has a sink beside the keys" in shown
    assert re.search(r"^sink +0\.\d+$", shown, re.M) and re.search(r"^sum +1\.0000 +\d", shown, re.M)
    shown = run("trace", "-m", toy("gpt_oss"), *words[:2], "--at", "layers.0.attn.sink").out
    assert re.findall(r"^(\S+ \S+) +0\.\d+ ", shown, re.M) == [f"head {i}" for i in range(4)]
    assert "a window of 4 keys to each side" in run("trace", "-m", toy("gemma3_text, both ways"), *words).out
    shown = run("trace", "-m", toy("gpt2"), *words).out
    assert "kv head" not in shown and "score =" not in shown and "window" not in shown and "sink" not in shown


def test_the_keys_that_a_person_is_shown_are_the_report_s(tmp_path):
    """Of more than 16 keys the 16 heaviest stand in the order of their positions; the others are one row."""
    words = ["trace", "-m", "tiny-gpt2", "--ids", ",".join(map(str, range(40)))]
    [walk] = run(*words, "--json").json["walks"]
    weights = [key["weight"] for key in walk["keys"]]
    assert walk["heaviest"] == sorted(sorted(range(40), key=lambda i: -weights[i])[:16])
    assert walk["rest_weight"] == pytest.approx(sum(weights) - sum(weights[i] for i in walk["heaviest"]), abs=1e-12)
    assert f"{walk['rest_weight']:.4f}" in next(line for line in run(*words).out.splitlines() if "keys more" in line)


MIXED = """\
vocab_size: 16
context_length: 16
hidden_size: 8
n_layers: 2
position: {kind: rope}
norm: {kind: rmsnorm}
attention: {n_heads: 4, n_kv_heads: 2, head_dim: 4}
mlp: {kind: dense, size: 8, activation: relu}
variants: [{layers: [1], attention: {n_heads: NUMBER, n_kv_heads: 1, head_dim: 4}}]
lm_head: {tied: true}
"""


@pytest.mark.parametrize("number", [2, 8])
def test_layers_of_different_numbers_of_heads(number, tmp_path):
    (tmp_path / "mixed.yaml").write_text(MIXED.replace("NUMBER", str(number)))
    words = ["trace", "-c", tmp_path / "mixed.yaml", "--ids", "1,2,3"]
    report = run(*words, "--layer", "all", "--head", "all", "--json")
    assert report.status == 0
    walks = [(walk["layer_index"], walk["head"], walk["n_heads"], walk["kv_head"]) for walk in report.json["walks"]]
    first = [(0, head, 4, head // 2) for head in range(4)]
    assert walks == first + [(1, head, number, 0) for head in range(number)]
    assert f"Head 1 of {number} = L1H1" in run(*words, "--at", "L1H1").out
    layer, has = (2, 2) if number == 2 else (1, 4)
    ran = run(*words, "--layer", "all", "--head", str(has))
    assert ran.status == 2 and f"--head {has}: layer {layer} has {has} heads, counted from 0" in ran.err


@every_toy
def test_every_sign_has_a_look_alike_in_ascii(name, toy):
    for attention in attentions(name):
        words = ["--layer", "all", "--attention", attention]
        shown = run("trace", "-m", toy(name), *fed(name, "5,17"), *words, encoding="ascii").out
    assert "\\x" not in shown and "\\u" not in shown


@pytest.mark.parametrize("sinks", [True, False])
def test_the_proof_of_a_long_text_allows_for_sums_that_cancel(sinks, tmp_path):
    """Of 2,100 values with signs of both kinds z is a small rest; its rounding is that of the values."""
    config = MIXED.replace("context_length: 16", "context_length: 2100").replace("NUMBER", "4")
    attention = "{n_heads: 4, n_kv_heads: 2, head_dim: 4}"
    config = config.replace(attention, attention[:-1] + f", sinks: {str(sinks).lower()}}}")
    (tmp_path / "long.yaml").write_text(config)
    ids = torch.randint(0, 16, (2100,), generator=torch.Generator().manual_seed(0)).tolist()
    words = ["trace", "-c", tmp_path / "long.yaml", "--ids", ",".join(map(str, ids)), "--layer", "all", "--head", "all"]
    for seed in range(3):
        ran = run(*words, "--seed", seed, "-q")
        assert (ran.status, ran.out) == (0, "ok\n")


@every_toy
def test_forward_shows_every_inner_stage(name, toy):
    """`--stages` opens all points but those that are computed on the side, in order of birth."""
    ran = run("forward", "-m", str(toy(name)), *fed(name), "--stages", "--json")
    assert ran.status == 0, ran.err
    shown = [stage["path"] for stage in ran.json["stages"] if stage["path"]]
    listed = [point["path"] for point in run("trace", "-m", toy(name), *fed(name), "--list", "--json").json["points"]]
    assert shown == [path for path in listed if not path.endswith((".scores", ".pattern", ".sink"))]
