"""Planted faults: what a conversion, a config or someone's own code gets wrong, in toy checkpoints of several families.

Each is named at the first activation that it touches, by its cause and no other: of B as a checkpoint, and from B's
values alone, as from a directory of dumps. None is named where the same weights lie another way.

    python -m tests.test_diff_causes

prints the table of them.
"""

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import permutations
from pathlib import Path
from tempfile import mkdtemp
from typing import NamedTuple

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from torch import Tensor

from gptcli.diff.causes import Cause, explain, explain_ids
from gptcli.model.forward import Inputs, forward
from gptcli.model.part import Shifted
from gptcli.model.weights import Weights
from gptcli.run import Run
from gptcli.source import Model, open_model
from gptcli.spec import LinearScaling, NoPosition, Spec, to_dict
from gptcli.trace import Recorder
from tests.command import Ran, gptcli
from tests.converted import convert, exact_toy
from tests.oracle import CPU, save_toy
from tests.test_layouts import nanogpt_state
from tests.toys import shrunk

SIZES = {
    "vocab_size": 67, "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 32,
}  # fmt: skip
IDS_OF_MARKS = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"))
GROUPED = SIZES | {"num_key_value_heads": 2, "head_dim": 6} | IDS_OF_MARKS
NEO = {name: size for name, size in SIZES.items() if not name.startswith("num_")} | {"num_layers": 2, "num_heads": 4}
MULTIPLIERS = {
    "embedding_multiplier": 6.0, "attention_multiplier": 0.3, "residual_multiplier": 0.5, "logits_scaling": 2.0,
}  # fmt: skip
SOFTCAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
BASES = {"rope_theta": 5000.0, "rope_local_base_freq": 100.0}
TOYS = {
    "gpt2": {"vocab_size": 67, "n_positions": 32, "n_embd": 24, "n_layer": 2, "n_head": 4},
    "gpt_neo": NEO | {"attention_types": [[["local"], 2]], "window_size": 5},
    "gpt_neox": SIZES | {"rotary_pct": 1.0},
    "gpt_neox, no biases in attention": SIZES | {"rotary_pct": 1.0, "attention_bias": False},
    "llama": GROUPED,
    "mistral": GROUPED | {"sliding_window": 7},
    "qwen2": GROUPED,
    "qwen3": GROUPED,
    "qwen3_moe": GROUPED | {"num_experts": 4, "moe_intermediate_size": 14, "num_experts_per_tok": 2},
    "granite": GROUPED | MULTIPLIERS,
    "gemma": GROUPED,
    "gemma2": GROUPED | {"sliding_window": 32, "query_pre_attn_scalar": 7} | SOFTCAPS,
    "gemma3_text": GROUPED | {"sliding_window": 32, "query_pre_attn_scalar": 7} | BASES,
    "gpt_oss": GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 32},
    "phi3": GROUPED | {"original_max_position_embeddings": 32},
    "nanochat": GROUPED | {"final_logit_softcapping": 2.0},
}
IDS = torch.randint(0, 67, (2, 12), generator=torch.Generator().manual_seed(7))

Edit = Callable[[Path], None]  # what makes B of a copy of A's directory


def in_turn(*edits: Edit) -> Edit:
    def edit(folder: Path) -> None:
        for one in edits:
            one(folder)

    return edit


def config(**keys) -> Edit:
    """config.json says otherwise."""

    def edit(folder: Path) -> None:
        said = json.loads((folder / "config.json").read_text()) | keys
        (folder / "config.json").write_text(json.dumps(said))

    return edit


def spec(path: str, value) -> Edit:
    """A config.yaml in place of the config.json, with another value in one place: what no config.json can say."""

    def edit(folder: Path) -> None:
        part = said = to_dict(open_model(str(folder)).spec)
        *heads, last = path.split(".")
        for head in heads:
            part = part[head]
        part[last] = value
        (folder / "config.json").unlink()
        (folder / "config.yaml").write_text(yaml.safe_dump(said))

    return edit


def stored(make: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Edit:
    """The file holds other tensors."""

    def edit(folder: Path) -> None:
        path = folder / "model.safetensors"
        made = make(load_file(path))
        save_file({name: x.contiguous() for name, x in made.items()}, path, {"format": "pt"})

    return edit


def each(make: Callable[[Tensor], Tensor], *words: str) -> Edit:
    """The tensors of whose names one of the words is a part are made otherwise."""
    return stored(lambda held: {n: make(x) if any(w in n for w in words) else x for n, x in held.items()})


def without(word: str) -> Edit:
    return stored(lambda held: {name: x for name, x in held.items() if word not in name})


def with_more(names: Callable[[str], str | None], **keys) -> Edit:
    """Beside each tensor for which there is a name, one more of that name: numbers as many as it has rows."""

    def make(held: dict[str, Tensor]) -> dict[str, Tensor]:
        draw = torch.Generator().manual_seed(3)
        more = {made: torch.randn(len(x), generator=draw, dtype=x.dtype) for n, x in held.items() if (made := names(n))}
        return held | more

    return in_turn(stored(make), config(**keys))


def own_head(folder: Path) -> None:
    """A head of its own where the config tied it."""
    draw = torch.Generator().manual_seed(3)
    head = torch.randn(67, 24, generator=draw, dtype=torch.float64)
    in_turn(stored(lambda held: held | {"lm_head.weight": head}), config(tie_word_embeddings=False))(folder)


def to_pairs(x: Tensor) -> Tensor:
    """Rows i and i + D/2 of every head of six side by side."""
    return x.unflatten(0, (-1, 2, 3)).transpose(1, 2).flatten(0, 2)


def part_by_part(x: Tensor) -> Tensor:
    """From q, k, v within each of four heads to all q, all k, all v."""
    return x.unflatten(0, (4, 3, 6)).transpose(0, 1).flatten(0, 2)


def number_by_number(x: Tensor) -> Tensor:
    """Columns [H, D] as [D, H]."""
    return x.unflatten(1, (4, 6)).transpose(1, 2).flatten(1)


def halves_swapped(x: Tensor) -> Tensor:
    return torch.cat(x.chunk(2)[::-1])


def last_first(*sizes: int) -> Callable[[Tensor], Tensor]:
    """Parts of these sizes along the last axis, the second before the first."""

    def make(x: Tensor) -> Tensor:
        one, two, *rest = x.split(sizes, -1)
        return torch.cat((two, one, *rest), -1)

    return make


def k_after_v(x: Tensor) -> Tensor:
    """Rows q, k, v as q, v, k."""
    q, k, v = x.split([24, 12, 12])
    return torch.cat((q, v, k))


def gate_for_up(held: dict[str, Tensor]) -> dict[str, Tensor]:
    other = {"gate_proj": "up_proj", "up_proj": "gate_proj"}
    found = {name: next((word for word in other if word in name), "") for name in held}
    return {name: held[name.replace(word, other[word])] if word else held[name] for name, word in found.items()}


class Plant(NamedTuple):
    """A fault, in which toy, what it makes of A's directory, where it shows first, and by which code it is named."""

    fault: str
    toy: str
    edit: Edit
    first: str
    code: str


LINEAR = {"type": "linear"}
UNBIASED = {"kind": "layernorm", "eps": 1e-6, "bias": False}
Q, K, UP, ACT, NORM = (f"layers.0.{name}" for name in ("attn.q", "attn.k", "mlp.up", "mlp.act", "attn_norm"))
TURNED, SCORES, PATTERN, OUT = (
    f"layers.0.{name}" for name in ("attn.q_rot", "attn.scores", "attn.pattern", "attn_out")
)
PLANTS = [
    Plant("rotary halves for neighbours", "llama", spec("position.pairs", "neighbours"), TURNED, "rotary-pairs"),
    Plant("rotary halves for neighbours", "gpt_neox", spec("position.pairs", "neighbours"), TURNED, "rotary-pairs"),
    Plant("q, k rows of the other convention", "llama", each(to_pairs, "q_proj", "k_proj"), Q, "rotary-rows"),
    Plant("q, k rows of the other convention", "qwen2", each(to_pairs, "q_proj", "k_proj"), Q, "rotary-rows"),
    Plant("rotary base", "llama", config(rope_theta=500000.0), TURNED, "rotary-base"),
    Plant("rotary base", "gpt_neox", config(rotary_emb_base=777), TURNED, "rotary-base"),
    Plant("rotary base", "gemma3_text", config(rope_local_base_freq=5000.0), TURNED, "rotary-base"),
    Plant("rotary scaling", "llama", config(rope_scaling=LINEAR | {"factor": 2.5}), TURNED, "rotary-scaling"),
    Plant("rotary scaling", "gpt_neox", config(rope_scaling=LINEAR | {"factor": 4.0}), TURNED, "rotary-scaling"),
    Plant("part of each head turned", "gpt_neox", config(rotary_pct=0.4), TURNED, "rotary-size"),
    Plant("turned backward", "llama", spec("position.direction", "backward"), TURNED, "rotary-direction"),
    Plant("positions off by one", "gpt2", each(lambda x: x.roll(-1, 0), "wpe"), "embed", "position-off-by-one"),
    Plant("positions off by one", "gpt_neo", each(lambda x: x.roll(-1, 0), "wpe"), "embed", "position-off-by-one"),
    Plant("a transposed matrix", "gpt2", each(lambda x: x.T, "h.0.attn.c_proj.weight"), OUT, "transposed"),
    Plant("a transposed matrix", "llama", each(lambda x: x.T, "layers.0.self_attn.q_proj"), Q, "transposed"),
    Plant("heads in another order", "gpt_neo", each(halves_swapped, "h.0.attn.attention.q_proj"), Q, "permuted"),
    Plant("heads in another order", "llama", each(halves_swapped, "k_proj", "v_proj"), K, "permuted"),
    Plant("heads merged as [D, H]", "llama", each(number_by_number, "o_proj.weight"), OUT, "heads-merged"),
    Plant("heads merged as [D, H]", "gpt_neox", each(number_by_number, "attention.dense.weight"), OUT, "heads-merged"),
    Plant("fused q, k, v in another order", "gpt2", each(last_first(24, 24, 24), "c_attn"), Q, "fused-order"),
    Plant("fused q, k, v in another order", "phi3", each(k_after_v, "qkv_proj"), K, "fused-order"),
    Plant("fused q, k, v by heads for blocks", "gpt_neox", each(part_by_part, "query_key_value"), Q, "fused-order"),
    Plant("gate and up swapped", "llama", stored(gate_for_up), UP, "gate-up"),
    Plant("gate and up swapped", "phi3", each(halves_swapped, "gate_up_proj"), UP, "gate-up"),
    Plant("a missing bias", "gpt2", each(torch.zeros_like, "h.0.attn.c_proj.bias"), OUT, "missing-bias"),
    Plant("a missing bias", "qwen2", each(torch.zeros_like, "proj.bias"), Q, "missing-bias"),
    Plant("a missing bias", "gpt_neox", each(torch.zeros_like, "input_layernorm.bias"), NORM, "missing-bias"),
    Plant("an extra bias", "gemma", with_more(lambda name: name.replace("weight", "bias") if "self_attn" in name
          else None, attention_bias=True), Q, "extra-bias"),
    Plant("an extra bias", "gpt_neox, no biases in attention", with_more(lambda name: name.replace("weight", "bias")
          if ".attention." in name else None, attention_bias=True), Q, "extra-bias"),
    Plant("norm eps", "gpt2", config(layer_norm_epsilon=1e-12), NORM, "norm-eps"),
    Plant("norm eps", "llama", config(rms_norm_eps=1e-5), NORM, "norm-eps"),
    Plant("norm eps of 3.7e-4", "llama", config(rms_norm_eps=3.7e-4), NORM, "norm-eps"),
    Plant("norm eps of 3.7e-4", "gpt_neox", config(layer_norm_eps=3.7e-4), NORM, "norm-eps"),
    Plant("norm offset 1 + w", "gemma", each(lambda x: x + 1, "norm.weight"), NORM, "norm-offset"),
    Plant("norm offset 1 + w", "llama", spec("norm.offset", 1.0), NORM, "norm-offset"),
    Plant("weights of a norm left out", "gpt2", each(torch.ones_like, "h.0.ln_1.weight"), NORM, "norm-weight"),
    Plant("weights of a norm left out", "llama", each(torch.ones_like, "input_layernorm"), NORM, "norm-weight"),
    Plant("LayerNorm for RMSNorm", "llama", spec("norm", UNBIASED), NORM, "norm-kind"),
    Plant("LayerNorm for RMSNorm", "qwen2", spec("norm", UNBIASED), NORM, "norm-kind"),
    Plant("no final norm", "llama", in_turn(spec("norm.final", False), without("model.norm")), "logits", "final-norm"),
    Plant("no final norm", "gpt2", in_turn(spec("norm.final", False), without("ln_f")), "logits", "final-norm"),
    Plant("q and k not normed", "qwen3", in_turn(spec("attention.qk_norm", "none"), without("q_norm"),
          without("k_norm")), TURNED, "qk-norm"),
    Plant("exact GELU for its tanh form", "gpt2", config(activation_function="gelu"), ACT, "activation"),
    Plant("exact GELU for its tanh form", "gemma2", config(hidden_activation="gelu"), ACT, "activation"),
    Plant("tanh GELU for the exact one", "gpt_neox", config(hidden_act="gelu_new"), ACT, "activation"),
    Plant("another activation", "llama", config(hidden_act="relu"), ACT, "activation"),
    Plant("score scale", "gpt2", config(scale_attn_weights=False), SCORES, "score-scale"),
    Plant("score scale", "gemma2", config(query_pre_attn_scalar=13), SCORES, "score-scale"),
    Plant("score scale", "granite", config(attention_multiplier=0.123), SCORES, "score-scale"),
    Plant("soft cap on scores", "gemma2", config(attn_logit_softcapping=None), SCORES, "score-cap"),
    Plant("soft cap on scores", "llama", spec("attention.softcap", 0.7), SCORES, "score-cap"),
    Plant("soft cap on logits", "gemma2", config(final_logit_softcapping=None), "logits", "logit-cap"),
    Plant("soft cap on logits", "nanochat", config(final_logit_softcapping=3.25), "logits", "logit-cap"),
    Plant("window", "mistral", config(sliding_window=None), PATTERN, "window"),
    Plant("window one too small", "mistral", config(sliding_window=6), PATTERN, "window"),
    Plant("window", "gpt_neo", config(window_size=3), PATTERN, "window"),
    Plant("no causal mask", "gpt2", spec("attention.causal", False), PATTERN, "mask"),
    Plant("no causal mask", "llama", spec("attention.causal", False), PATTERN, "mask"),
    Plant("sinks left out", "gpt_oss", each(lambda x: torch.full_like(x, -1e4), "sinks"), PATTERN, "sinks"),
    Plant("embedding scale", "gemma", spec("embed_scale", 1.0), "embed", "embedding-scale"),
    Plant("embedding scale", "granite", config(embedding_multiplier=12.5), "embed", "embedding-scale"),
    Plant("residual scale", "granite", config(residual_multiplier=1.0), "layers.0.resid_mid", "residual-scale"),
    Plant("logit scale", "granite", config(logits_scaling=3.0), "logits", "logit-scale"),
    Plant("head tied", "llama", in_turn(without("lm_head"), config(tie_word_embeddings=True)), "logits", "tie"),
    Plant("head tied", "gpt_neox", in_turn(without("embed_out"), config(tie_word_embeddings=True)), "logits", "tie"),
    Plant("sublayers in a row", "gpt_neox", config(use_parallel_residual=False), "layers.0.mlp_norm", "residual-order"),
    Plant("experts' weights scaled to 1", "qwen3_moe", config(norm_topk_prob=True), "layers.0.mlp_out", "experts"),
]  # fmt: skip


@cache
def original(toy: str) -> Path:
    """A's directory, which nobody changes."""
    folder = Path(mkdtemp())
    save_toy(TOYS[toy] | {"model_type": toy.partition(",")[0]}, folder)
    return folder


def edited(toy: str, edit: Edit) -> Path:
    """B's directory: a copy of A's with the fault."""
    folder = Path(mkdtemp()) / "b"
    shutil.copytree(original(toy), folder)
    edit(folder)
    return folder


@cache
def planted(plant: Plant) -> Path:
    return edited(plant.toy, plant.edit)


def opened(folder: Path) -> Run:
    return Run(open_model(str(folder)), IDS.tolist(), "float64", "cpu")


def values(run: Run) -> dict[str, Tensor]:
    recorder = Recorder("*")
    run.forward("all", recorder)
    return recorder.kept


def close(path: str, ours: Tensor, theirs: Tensor) -> bool:
    return bool((ours - theirs).norm() <= 1e-9 * theirs.norm())


def explained(a: Run, theirs: dict[str, Tensor], **known) -> tuple[str, list[Cause]]:
    """The first activation that differs, of those that both have, and its causes."""
    ours = values(a)
    both = [path for path in ours if path in theirs and ours[path].shape == theirs[path].shape]
    apart = next(i for i, path in enumerate(both) if not close(path, ours[path], theirs[path]))
    agreed = both[apart - 1] if apart else None
    return both[apart], explain(a, both[apart], theirs, close, agreed=agreed, **known)


def diff(a: Path, b: Path, *more: str) -> Ran:
    return gptcli("diff", a, b, "--ids", ",".join(map(str, IDS[0].tolist())), "--json", *more)


def verdict(ran: Ran) -> tuple[str | None, list[str]]:
    """Where the command says that they part, and the codes of the causes that it names."""
    assert ran.status in (0, 1), ran.err
    parted = ran.json["parted"]
    assert (parted is not None) == (ran.status == 1)
    return parted and parted["path"], [cause["code"] for cause in ran.json["causes"]]


@cache
def told(plant: Plant) -> tuple[str | None, list[str]]:
    return verdict(diff(original(plant.toy), planted(plant)))


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: f"{plant.fault}, {plant.toy}")
def test_a_planted_fault_is_named_and_nothing_else(plant, tmp_path):
    """By the command, of two checkpoints and of dumps in float32; and from exact values alone."""
    a, b = original(plant.toy), planted(plant)
    assert told(plant) == (plant.first, [plant.code])
    dumps = values(Run(open_model(str(b)), IDS[:1].tolist(), "float32", "cpu"))
    save_file({path: x.contiguous().clone() for path, x in dumps.items()}, tmp_path / "dumps.safetensors")
    assert verdict(diff(a, tmp_path / "dumps.safetensors")) == (plant.first, [plant.code])
    parted, causes = explained(opened(a), values(opened(b)))
    assert parted == plant.first
    assert [cause.code for cause in causes] == [plant.code], causes
    assert parted in causes[0].closes and causes[0].mend


def test_nothing_is_named_where_the_same_weights_lie_another_way(tmp_path):
    """Numbers that float32 holds: in shards, in a .gguf file, in another type, under nanoGPT's names."""
    hf, shards, wide = (tmp_path / name for name in ("hf", "shards", "wide"))
    model = exact_toy(TOYS["llama"] | {"model_type": "llama", "rms_norm_eps": 1e-6, "rope_theta": 10000.0}, hf)
    shutil.copytree(hf, shards, ignore=shutil.ignore_patterns("*.safetensors"))
    model.float().save_pretrained(shards, max_shard_size="4KB")
    assert len(list(shards.glob("*.safetensors"))) > 2
    shutil.copytree(hf, wide)
    stored(lambda held: {name: x.double() for name, x in held.items()})(wide)
    for b in (shards, wide, convert(hf, tmp_path / "b.gguf")):
        assert verdict(diff(hf, b)) == (None, [])
    assert verdict(diff(hf, hf, "--dtype", "float32", "--dtype-b", "bfloat16")) == (None, [])

    gpt2, ckpt = tmp_path / "gpt2", tmp_path / "ckpt.pt"
    exact_toy(TOYS["gpt2"] | {"model_type": "gpt2", "activation_function": "gelu"}, gpt2)
    said = {"block_size": 32, "vocab_size": 67, "n_layer": 2, "n_head": 4, "n_embd": 24, "bias": True, "dropout": 0.0}
    torch.save({"model": nanogpt_state(gpt2, ""), "model_args": said}, ckpt)
    assert verdict(diff(gpt2, ckpt)) == (None, [])


def test_what_is_said_names_both_sides_and_the_key_to_mend():
    """The keys are the family's own words: of the config.json, and of the architecture."""
    said = {
        ("norm eps", "gpt2"): ("1e-12", "1e-05", "layer_norm_epsilon in B's config.json (norm.eps)"),
        ("norm eps of 3.7e-4", "llama"): ("0.00037", "1e-06", "rms_norm_eps in B's config.json (norm.eps)"),
        ("rotary base", "gpt_neox"): ("777", "10000", "rotary_emb_base"),
        ("score scale", "granite"): ("0.123", "0.3", "attention_multiplier in B's config.json (attention.scale)"),
        ("soft cap on logits", "nanochat"): ("3.25", "2", "final_logit_softcapping"),
        ("window one too small", "mistral"): ("6", "7", "sliding_window"),
        ("rotary halves for neighbours", "llama"): ("neighbours (2i, 2i + 1)", "halves (i, i + R/2)", "position.pairs"),
    }
    for plant in PLANTS:
        if (plant.fault, plant.toy) in said:
            b = opened(planted(plant))
            [cause] = explained(opened(original(plant.toy)), values(b), b_model=b.model)[1]
            b_does, a_does, mend = said[plant.fault, plant.toy]
            of_b, of_a = cause.said.split(" where A ")
            assert b_does in of_b and a_does in of_a and mend in cause.mend, cause


def test_weights_that_nothing_explains_are_named_where_b_has_them():
    """A matrix of zeros, one of half the size, one of noise, and a head where the original's is tied."""
    cases = [
        ("llama", each(torch.zeros_like, "layers.1.mlp.down_proj"), "layers.1.mlp_out", "is all zeros"),
        ("gpt2", each(lambda x: x / 2, "h.1.mlp.c_fc.weight"), "layers.1.mlp.up", "0.5 times A's"),
        ("gpt2", each(lambda x: x + x.flip(0), "h.0.mlp.c_fc.weight"), "layers.0.mlp.up", "in 2,304 of 2,304 numbers"),
        ("gpt2", own_head, "logits", "B's head has weights of its own where A's is the token embedding"),
        ("llama", each(lambda x: x.roll(1, 0), "embed_tokens"), "embed", "embed.weight isn't A's"),
    ]
    for toy, edit, first, said in cases:
        a, b = opened(original(toy)), opened(edited(toy, edit))
        theirs = values(b)
        parted, [cause] = explained(a, theirs, b_spec=b.model.spec, b_weights=b.weights)
        assert parted == first and said in cause.said, cause
        assert cause.code == ("tie" if edit is own_head else "weight")
        assert explained(a, theirs)[1] == []  # the values alone tell nothing


def causes_of(a: Path, b: Path) -> list[tuple[str, str, str]]:
    """By the command: the code, what is said, and the mend of each cause."""
    ran = diff(a, b)
    assert ran.status == 1, ran.err
    return [(cause["code"], cause["said"], cause["mend"]) for cause in ran.json["causes"]]


def dumped(run: Run, path: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Path:
    save_file({name: x.contiguous().clone() for name, x in change(values(run)).items()}, path)
    return path


def in_float32(toy: str) -> Run:
    return Run(open_model(str(original(toy))), IDS[:1].tolist(), "float32", "cpu")


FAMILIES = ("gpt2", "llama", "qwen3_moe", "gemma2", "phi3", "gpt_oss", "nanochat")


@pytest.mark.parametrize("pair", list(permutations(FAMILIES, 2)), ids="-".join)
def test_families_of_one_width_can_be_compared(pair):
    """What can't be run on these weights is no hypothesis: one of position, of experts, of a norm that isn't there."""
    a, b = map(original, pair)
    assert causes_of(a, b)


QKV_NOISE = stored(lambda held: {n: x + x.cos() if "h.0.attn.c_attn" in n else x for n, x in held.items()})
TUNED = stored(lambda held: {n: x + x.cos() if "layers." in n else x for n, x in held.items()})


def one_number(x: Tensor) -> Tensor:
    return x + torch.zeros_like(x).index_put((torch.tensor(0), torch.tensor(0)), torch.tensor(1.0, dtype=x.dtype))


def k_for_v(held: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: held[re.sub("[kv]_proj", lambda x: {"k": "v", "v": "k"}[x[0][0]] + "_proj", name)] for name in held}


@pytest.mark.parametrize(
    ("toy", "edit", "code", "said", "mend"),
    [
        ("gpt2", config(n_head=2), "heads", "2 heads of 12 where A has 4 heads of 6", "n_head in B's config.json"),
        ("llama", config(num_attention_heads=2, num_key_value_heads=1, head_dim=12), "heads",
         "2 heads of 12 (1 of keys and values)", "num_attention_heads"),
        ("llama", each(to_pairs, "0.self_attn.q_proj"), "rotary-rows", "rows of q alone", "q and k rows"),
        ("llama", each(to_pairs, "0.self_attn.k_proj"), "rotary-rows", "rows of k alone", "q and k rows"),
        ("llama", stored(k_for_v), "fused-order", "B takes q, v, k for q, k, v", "the order of q, k, v"),
        ("llama", each(one_number, "0.mlp.up_proj"), "weight", "in 1 of 960 numbers", "that tensor"),
        ("gpt2", QKV_NOISE, "weight",
         "B's layers.0.attn.q.{weight,bias} are other ones than A's; 4 others of layers.0 differ too", "--weights"),
        ("llama", TUNED, "weight", "8 others of layers.0 differ too", "--weights"),
        ("qwen2", each(torch.zeros_like, "proj.bias"), "missing-bias", "no layers.0.attn.{q,k,v}.bias", "biases"),
        ("gpt2", each(lambda x: x.T, "h.1.attn.c_proj.weight"), "transposed", "layers.1.attn.o.weight is", "matrix"),
        ("nanochat", spec("norm.embedding", False), "embedding-norm", "B doesn't norm the embedding where A norms",
         "norm.embedding in B's config"),
    ],
)  # fmt: skip
def test_what_is_said_of_two_checkpoints(toy, edit, code, said, mend):
    [(found, b_does, how)] = causes_of(original(toy), edited(toy, edit))
    assert (found, said in b_does, mend in how) == (code, True, True), (b_does, how)


def test_two_faults_at_one_activation_are_named_together():
    edit = in_turn(config(rms_norm_eps=1e-3), each(lambda x: x + 1, "norm.weight"))
    eps, weight = causes_of(original("llama"), edited("llama", edit))
    assert (eps[0], weight[0]) == ("norm-eps", "weight") and "layers.0.attn_norm.weight" in weight[1]
    assert all("2 such changes together" in said for _, said, _ in (eps, weight))


def test_where_numbers_that_are_not_finite_on_both_sides_come_from():
    """One weight of both, so that no number differs."""
    b = edited("llama", each(lambda x: torch.full_like(x, torch.nan), "1.mlp.down_proj"))
    causes = diff(b, b).json["causes"]
    assert [cause["mend"] for cause in causes] == [f"layers.1.mlp.down.weight in {letter}'s file" for letter in "AB"]
    assert all("NaN is born in layers.1.mlp_out" in cause["said"] for cause in causes)


SLIDING, FULL = "sliding_attention", "full_attention"


@pytest.mark.parametrize("types", [(SLIDING, FULL, SLIDING), (FULL,) * 3, (SLIDING,) * 3])
def test_a_layer_of_another_kind_is_named_and_not_its_rotary_base(types, tmp_path):
    """Kinds of layers that differ by their window and by their base."""
    sizes = TOYS["gemma3_text"] | {"num_hidden_layers": 3, "sliding_window": 5}
    save_toy(sizes | {"model_type": "gemma3_text", "layer_types": [SLIDING, SLIDING, FULL]}, tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    config(layer_types=types)(tmp_path / "b")
    [(code, said, mend)] = causes_of(tmp_path / "a", tmp_path / "b")
    assert code == "layer-kind" and "layer_types in B's config.json" in mend, (said, mend)
    assert f"window of {'all' if FULL in types else 5} tokens" in said


def test_the_mend_is_of_a_file_that_b_has(tmp_path):
    """B is a .gguf file, is a directory beside one, and is someone's own arrays."""
    hf, other = tmp_path / "hf", tmp_path / "other"
    exact_toy(TOYS["llama"] | {"model_type": "llama", "rms_norm_eps": 1e-6, "rope_theta": 10000.0}, hf)
    file = convert(hf, tmp_path / "x.gguf")
    shutil.copytree(hf, other)
    config(rms_norm_eps=1e-4)(other)
    assert causes_of(other, file)[0][2] == "llama.attention.layer_norm_rms_epsilon in B's file (norm.eps)"
    assert causes_of(file, other)[0][2] == "rms_norm_eps in B's config.json (norm.eps)"
    run = Run(open_model(str(other)), IDS[:1].tolist(), "float32", "cpu")
    arrays = dumped(run, tmp_path / "x.safetensors", lambda held: held)
    assert causes_of(hf, arrays)[0][2] == "norm.eps in B's code"
    assert causes_of(arrays, hf)[0][2] == "norm.eps in A's code"


def test_what_is_said_of_arrays(tmp_path):
    """Queries that aren't turned; a NaN; and what no known slip makes."""

    def put(name: str, make: Callable[[dict[str, Tensor]], Tensor]) -> list[tuple[str, str, str]]:
        b = dumped(in_float32("llama"), tmp_path / "x.safetensors", lambda held: held | {name: make(held)})
        return causes_of(original("llama"), b)

    assert [code for code, *_ in put(TURNED, lambda held: held[Q])] == ["position"]
    nan = ("not-finite", f"in B, NaN or infinity stands first in {ACT}", f"look at how {ACT} is computed in B")
    assert put(ACT, lambda held: held[ACT].where(held[ACT] < held[ACT].max(), torch.nan)) == [nan]
    mend = f"look at how {ACT} is computed in B"
    assert put(ACT, lambda held: held[ACT].cos()) == [("unknown", "none of the known slips closes the gap", mend)]


def faulty(
    toy: str, change: Callable[[Spec], Spec] = lambda spec: spec, make=lambda name, x: x, shift: int = 0
) -> dict:
    """Someone's own code with a fault: this engine with another architecture, weights or positions."""
    model, recorder = open_model(str(original(toy))), Recorder("*")
    weights = model.weights(torch.float64, CPU)
    held = Weights({name: make(name, x) for name, x in weights.tensors.items()}, weights.ties)
    forward(Shifted(IDS, by=shift), held, change(model.spec), recorder)
    return recorder.kept


def tiled(name: str, x: Tensor) -> Tensor:
    """Two key/value heads of six, one after the other and again."""
    return torch.cat((x, x)) if ".attn.k." in name or ".attn.v." in name else x


def put(path: str, value) -> Callable[[Spec], Spec]:
    def inside(part, words: list[str]):
        return replace(part, **{words[0]: inside(getattr(part, words[0]), words[1:]) if words[1:] else value})

    return lambda spec: inside(spec, path.split("."))


DUMPS = {
    "positions off by one, learned": ("gpt2", {"shift": 1}, "embed", "position-off-by-one"),
    "positions off by one, rotary": ("llama", {"shift": 1}, TURNED, "position-off-by-one"),
    "no positions, learned": ("gpt2", {"change": put("position", NoPosition())}, "embed", "position"),
    "no rotation": ("qwen2", {"change": put("position.scaling", LinearScaling(factor=1e300))}, TURNED, "position"),
    "key/value heads in turns, llama": (
        "llama", {"change": put("attention.n_kv_heads", 4), "make": tiled}, SCORES, "kv-head-order"),
    "key/value heads in turns, qwen2": (
        "qwen2", {"change": put("attention.n_kv_heads", 4), "make": tiled}, SCORES, "kv-head-order"),
    "attention reads what isn't normed": ("llama", {"change": put("attention.normed", False)}, Q, "attention-norm"),
}  # fmt: skip


@pytest.mark.parametrize("fault", DUMPS)
def test_a_fault_of_someone_s_own_code_is_named(fault):
    toy, made, first, code = DUMPS[fault]
    parted, causes = explained(opened(original(toy)), faulty(toy, **made))
    assert parted == first
    assert [cause.code for cause in causes] == [code], causes


STACKS = [
    ("transformer-2017-base", "position.pairs", "halves", "embed", "rotary-pairs"),
    ("transformer-2017-base", "encoder.mlp.activation", "gelu", "encoder.layers.0.mlp.act", "activation"),
    ("transformer-2017-base", "encoder.norm.eps", 1e-3, "encoder.layers.0.attn_norm", "norm-eps"),
    ("transformer-2017-base", "mlp.activation", "gelu", "layers.0.mlp.act", "activation"),
    ("transformer-2017-base", "cross.scale", 0.1, "layers.0.cross.scores", "score-scale"),
    ("bert-base", "norm.eps", 1e-5, "embed_norm", "norm-eps"),
    ("bert-base", "lm_head.transform.activation", "relu", "lm_head.norm", "activation"),
]


@pytest.mark.parametrize(("name", "path", "value", "first", "code"), STACKS)
def test_encoders_and_what_reads_across_to_them(name, path, value, first, code):
    """The same weights under an architecture that differs in one place."""
    spec = shrunk(open_model(config=name).spec)
    source = [[7, 8, 9, 10, 11]] if spec.encoder else None
    a, b = (
        Run(Model(spec=one, source="toy", seed=1), [[1, 2, 3, 4, 5, 6]], "float64", "cpu", source=source)
        for one in (spec, put(path, value)(spec))
    )
    theirs = values(b)
    for known in ({"b_spec": b.model.spec, "b_weights": b.weights}, {}):
        parted, causes = explained(a, theirs, **known)
        assert parted == first
        assert [cause.code for cause in causes] == [code], causes


@pytest.mark.parametrize("toy", ["gpt2", "llama"])
def test_a_text_without_its_first_token_or_with_it_twice_is_known_by_its_embedding(toy):
    model = open_model(str(original(toy)))
    wrong = {"bos-missing": IDS[:, 1:], "bos-doubled": torch.cat((IDS[:, :1], IDS), 1), "eos-missing": IDS[:, :-1]}
    for code, ids in wrong.items():
        recorder = Recorder("embed")
        forward(Inputs(ids), model.weights(torch.float64, CPU), model.spec, recorder)
        causes = explain(opened(original(toy)), "embed", recorder.kept, close)
        assert [cause.code for cause in causes] == [code]


# What is read off the very activation that it shows in: numbers that nobody uses, an order of rows, a bias.
READ_OFF = (
    "3.7e-4", "granite", "extra", "gemma3", "nanochat", "another order, gpt_neo", "another order, llama", "scaling",
    "window, ", "base, gpt_neox", "part of each", "scale, gemma2", "scores, llama",
)  # fmt: skip


@pytest.mark.parametrize("held", ["layers.0.resid_post", "logits"])
def test_what_is_held_of_a_part_may_be_its_end_alone(held):
    """Of dumps that hold the residual stream and the logits alone: all that may stand before is tried."""
    for plant in PLANTS:
        if plant.first == "embed" or (plant.first == "logits") != (held == "logits"):
            continue
        theirs = values(opened(planted(plant)))
        agreed = "layers.1.resid_post" if held == "logits" else "embed"
        parted, causes = explained(opened(original(plant.toy)), {path: theirs[path] for path in (agreed, held)})
        assert parted == held
        if any(word in f"{plant.fault}, {plant.toy}" for word in READ_OFF):
            assert not causes or causes[0].code == plant.code
        else:
            assert [cause.code for cause in causes][:1] == [plant.code], (plant.fault, plant.toy)


def of(ids: list[int], toy: str = "gpt2") -> Run:
    return Run(open_model(str(original(toy))), [ids], "float64", "cpu")


@pytest.mark.parametrize("toy", ["gpt2", "llama"])
def test_a_bos_that_one_tokenizer_adds_is_named(toy):
    """By the command, of a text: what a tokenizer adds before it stands in its tokenizer.json."""

    def marking(marks: str) -> Edit:
        def edit(folder: Path) -> None:
            words = Tokenizer(WordLevel({"<s>": 1, "a": 5, "b": 6}))
            words.pre_tokenizer = Whitespace()
            words.post_processor = TemplateProcessing(single=f"{marks}$A", special_tokens=[("<s>", 1)])
            words.save(str(folder / "tokenizer.json"))

        return edit

    with_bos = edited(toy, marking("<s> "))
    for marks, code in (("", "bos-missing"), ("<s> <s> ", "bos-doubled")):
        ran = gptcli("diff", with_bos, edited(toy, marking(marks)), "a b a", "--json")
        assert verdict(ran) == ("ids", [code])


def test_ids_that_differ_are_explained():
    """One more at the beginning, the same one twice, one more at the end, and another one within."""
    plain = [5, 6, 7]
    cases = [
        ([1, *plain], plain, "bos-missing", "A begins with id 1"),
        (plain, [1, *plain], "bos-missing", "B begins with id 1"),
        ([1, *plain], [1, 1, *plain], "bos-doubled", "B begins with id 1 twice"),
        (plain, [*plain, 2], "eos-missing", "B ends with id 2"),
        (plain, [5, 9, 7], "tokenizer", "from token 1 on A reads id 6"),
    ]
    for ours, theirs, code, said in cases:
        [cause] = explain_ids(of(ours), of(theirs))
        assert cause.code == code and cause.said.startswith(said.split(" id ")[0]), cause
        assert said.partition("id ")[2] in cause.said
    assert explain_ids(of(plain), of(plain)) == []


def matrix() -> str:
    """The table of planted faults, as Markdown: in which toys, where the command says that they part, what it names."""
    toys: dict[tuple[str, str, str], list[str]] = {}
    for plant in PLANTS:
        parted, codes = told(plant)
        toys.setdefault((plant.fault, str(parted), ", ".join(codes)), []).append(plant.toy.partition(",")[0])
    lines = [("planted in B", "of these families", "parts at", "named"), ("---",) * 4]
    lines += [(fault, ", ".join(found), f"`{parted}`", f"`{code}`") for (fault, parted, code), found in toys.items()]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def test_the_table_has_a_line_for_every_fault():
    lines = matrix().splitlines()[2:]
    assert {line.split(" | ")[0].removeprefix("| ") for line in lines} == {plant.fault for plant in PLANTS}
    assert sum(line.count(",") + 1 for line in (line.split(" | ")[1] for line in lines)) == len(PLANTS)
    readme = Path(__file__).parent.parent / "README.md"
    assert matrix() in readme.read_text(encoding="utf-8")


if __name__ == "__main__":
    print(matrix(), end="")
