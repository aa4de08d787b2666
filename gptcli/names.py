"""What others call our activations: three vocabularies as data, the first two readable both ways.

TransformerLens names its hooks (`blocks.0.attn.hook_q`). Where versions differ, the name is that of its bridge to the
models of transformers. A hook's axes may stand in another order than ours, [B, T, H, D] for [B, H, T, D], and
`hook_attn_scores` holds -∞, or its type's lowest number, where the mask hides a key.

Hugging Face's are module paths: the module whose output the activation is (`model.layers.0.self_attn.q_proj`), by the
words of the checkpoint itself where there is one, else by the words that most families of transformers share. Its
modules hand on q, k and v with all heads side by side; `attn_weights` are what an attention module hands back beside
its output. The numbers of `hidden_states[…]` name nothing: families differ in whether the last one is normed.

ggml's are what llama.cpp's eval-callback prints (src/llama-graph.cpp and src/models/ there): a name and the layer,
`l_out-0`. The fastest axis comes first: [D, H, T] for q, which an array has as [T, H, D]. A name goes to each step of
what it names, and the last stays: `Qcur` is q with its heads side by side, then with a bias, then split, and in the end
turned. `ffn_up` is before a bias is added, and `ffn_up_b` after. `kq` is q·k before the scale in some architectures and
after it in others, so it names nothing here. Both stacks of an encoder-decoder have the same names: none is understood.

An activation that they have no name for has none here.
"""

import re
from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Literal, NamedTuple

from gptcli.errors import GptcliError, nearest
from gptcli.layout import Place
from gptcli.source import Model
from gptcli.spec import Experts, Learned, Sinusoidal, Spec
from gptcli.trace import LAYER_POINTS, points

Vocabulary = Literal["ours", "transformerlens", "huggingface", "ggml"]


def _plain_embedding(spec: Spec) -> bool:
    """Is a token's row all that its first vector is made of?"""
    told = isinstance(spec.position, Learned | Sinusoidal) or spec.n_segments is not None
    return not told and spec.embed_scale == 1.0 and spec.embed_size is None and spec.encoder is None


def _plain_head(spec: Spec) -> bool:
    """Is the head one matrix (and its bias), and nothing after it? Beside an encoder the bias stands by itself."""
    head = spec.lm_head
    return head.scale == 1.0 and head.softcap is None and not (head.bias and spec.encoder is not None)


# What a name may depend on: of the architecture, as it is in that layer.
CONDITIONS: dict[str, Callable[[Spec], bool]] = {
    "": lambda spec: True,
    "plain embedding": _plain_embedding,
    "plain head": _plain_head,
    "output is not normed": lambda spec: spec.norm.placement not in ("output", "sandwich"),
    "sum is not normed": lambda spec: spec.norm.placement != "post" and spec.residual == "sequential",
    "normed on both sides": lambda spec: spec.norm.placement == "sandwich",
    "normed on one side": lambda spec: spec.norm.placement != "sandwich",
    "gated": lambda spec: spec.mlp.gated,
    "not gated": lambda spec: not spec.mlp.gated,
    "across": lambda spec: spec.encoder is not None,
    "not across": lambda spec: spec.encoder is None,
    "experts": lambda spec: isinstance(spec.mlp, Experts),
    "one MLP": lambda spec: not isinstance(spec.mlp, Experts),
    "normed before": lambda spec: spec.norm.placement in ("pre", "sandwich"),
    "sum is as it is": lambda spec: spec.norm.placement != "post",
    "biased": lambda spec: spec.mlp.bias,
    "not biased": lambda spec: not spec.mlp.bias,
    "biased router": lambda spec: spec.mlp.router_bias,
    "unbiased router": lambda spec: not spec.mlp.router_bias,
    "MLP by itself": lambda spec: spec.residual != "parallel" and getattr(spec.mlp, "shared_size", 1) is not None,
    "experts by themselves": lambda spec: isinstance(spec.mlp, Experts) and spec.mlp.shared_size is None,
    "positions added": lambda spec: isinstance(spec.position, Learned) and not spec.norm.embedding,
    "positions added, normed": lambda spec: isinstance(spec.position, Learned) and spec.norm.embedding,
    "embedding scaled": lambda spec: spec.embed_scale != 1.0 and not isinstance(spec.position, Learned | Sinusoidal),
}


class Name(NamedTuple):
    """theirs: their name, under a condition; also: another name of theirs that is understood for it."""

    theirs: str
    when: str = ""
    also: str = ""


class Module(NamedTuple):
    """The module whose output an activation is: the stem of its weight in our layout, and the word that is most common.

    inside: of the attention that this weight belongs to, what it hands back by that name; around: the module that
    holds the weight's own; whole: the whole layer.
    """

    stem: str
    common: str
    when: str = ""
    place: Literal["own", "inside", "around", "whole"] = "own"


def _attention_hooks(ours: str, theirs: str) -> dict[str, tuple[Name, ...]]:
    hooks = {"q": "hook_q", "k": "hook_k", "v": "hook_v", "q_rot": "hook_rot_q", "k_rot": "hook_rot_k"}
    hooks |= {"scores": "hook_attn_scores", "pattern": "hook_pattern", "z": "hook_z"}
    norms = {f"{x}_norm": Name(f"{theirs}.{x}_norm.hook_out", "", f"{theirs}.{x}_norm.hook_normalized") for x in "qk"}
    rows = {name: Name(f"{theirs}.{hook}") for name, hook in hooks.items()} | norms
    named = {f"{ours}.{name}": (row,) for name, row in rows.items()} | {f"{ours}.sink": ()}
    return {name: rows for name, rows in named.items() if name in LAYER_POINTS}


def _norm_hook(theirs: str, when: str = "") -> Name:
    return Name(f"{theirs}.hook_out", when, f"{theirs}.hook_normalized")


# By our name within a layer: their name within a block.
BLOCK_HOOKS: dict[str, tuple[Name, ...]] = {
    "resid_pre": (Name("hook_resid_pre"),),
    "attn_norm": (_norm_hook("ln1"),),
    **_attention_hooks("attn", "attn"),
    "attn_out": (Name("hook_attn_out", "output is not normed"),),
    "attn_out_norm": (Name("hook_attn_out", "", "ln1_post.hook_out"),),
    "resid_mid": (Name("hook_resid_mid", "sum is not normed"),),
    "cross_norm": (_norm_hook("ln2"),),
    **_attention_hooks("cross", "cross_attn"),
    "cross_out": (Name("hook_cross_attn_out", "output is not normed"),),
    "cross_out_norm": (Name("hook_cross_attn_out"),),
    "resid_cross": (Name("hook_resid_mid_cross", "sum is not normed"),),
    "mlp_norm": (_norm_hook("ln2", "not across"), _norm_hook("ln3", "across")),
    "mlp.router": (),
    "mlp.up": (Name("mlp.hook_pre", "not gated"), Name("mlp.hook_pre_linear", "gated")),
    "mlp.gate": (Name("mlp.hook_pre"),),
    "mlp.act": (Name("mlp.hook_post"),),
    "mlp_out": (Name("hook_mlp_out", "output is not normed"),),
    "mlp_out_norm": (Name("hook_mlp_out", "", "ln2_post.hook_out"),),
    "resid_post": (Name("hook_resid_post"),),
}
STACK_HOOKS: dict[str, tuple[Name, ...]] = {
    "embed": (Name("hook_embed", "plain embedding"),),
    "embed_norm": (),
    "final_norm": (_norm_hook("ln_final", "not across"), _norm_hook("decoder_final_ln", "across")),
    "lm_head.dense": (),
    "lm_head.norm": (),
    "embed_out": (),
    "logits": (Name("unembed.hook_out", "plain head"),),
}
ENCODER_HOOKS: dict[str, tuple[Name, ...]] = STACK_HOOKS | {
    "embed": (),
    "final_norm": (_norm_hook("encoder_final_ln"),),
}


def _attention_modules(ours: str, theirs: str) -> dict[str, tuple[Module, ...]]:
    linear = {letter: Module(f"{ours}.{letter}", f"{theirs}.{letter}_proj") for letter in "qkv"}
    norms = {f"{x}_norm": Module(f"{ours}.{x}_norm", f"{theirs}.{x}_norm") for x in "qk"}
    weights = {"pattern": Module(f"{ours}.q", f"{theirs}.attn_weights", place="inside")}
    named = {f"{ours}.{name}": (module,) for name, module in (linear | norms | weights).items()}
    named |= {f"{ours}.{name}": () for name in ("q_rot", "k_rot", "scores", "sink", "z")}
    return {name: rows for name, rows in named.items() if name in LAYER_POINTS}


LAYER_MODULES: dict[str, tuple[Module, ...]] = {
    "resid_pre": (),
    "attn_norm": (Module("attn_norm", "input_layernorm"),),
    **_attention_modules("attn", "self_attn"),
    "attn_out": (Module("attn.o", "self_attn.o_proj"),),
    "attn_out_norm": (Module("attn_out_norm", "post_attention_layernorm"),),
    "resid_mid": (),
    "cross_norm": (Module("cross_norm", "encoder_attn_layer_norm"),),
    **_attention_modules("cross", "encoder_attn"),
    "cross_out": (Module("cross.o", "encoder_attn.o_proj"),),
    "cross_out_norm": (Module("cross_out_norm", "post_encoder_attn_layernorm"),),
    "resid_cross": (),
    "mlp_norm": (
        Module("mlp_norm", "post_attention_layernorm", "normed on one side"),
        Module("mlp_norm", "pre_feedforward_layernorm", "normed on both sides"),
    ),
    "mlp.router": (Module("mlp.router", "mlp.gate"),),
    "mlp.up": (Module("mlp.up", "mlp.up_proj"),),
    "mlp.gate": (Module("mlp.gate", "mlp.gate_proj"),),
    "mlp.act": (),
    "mlp_out": (
        Module("mlp.down", "mlp.down_proj", "one MLP"),
        Module("mlp.router", "mlp", "experts", place="around"),
    ),
    "mlp_out_norm": (Module("mlp_out_norm", "post_feedforward_layernorm"),),
    "resid_post": (Module("attn.o", "", place="whole"),),
}
STACK_MODULES: dict[str, tuple[Module, ...]] = {
    "embed": (Module("embed", "embed_tokens", "plain embedding"),),
    "embed_norm": (Module("embed_norm", "embed_norm"),),
    "final_norm": (Module("final_norm", "norm"),),
    "lm_head.dense": (Module("lm_head.dense", "lm_head.dense"),),
    "lm_head.norm": (Module("lm_head.norm", "lm_head.norm"),),
    "embed_out": (Module("embed_out", "project_out"),),
    "logits": (Module("lm_head", "lm_head", "plain head"),),
}

# By our name within a layer: ggml's, to which the layer is added.
LAYER_TENSORS: dict[str, tuple[Name, ...]] = dict.fromkeys(LAYER_POINTS, ()) | {
    "attn_norm": (Name("attn_norm", "normed before"),),
    "attn.q": (Name("Qcur"),),
    "attn.k": (Name("Kcur"),),
    "attn.v": (Name("Vcur"),),
    "attn.q_norm": (Name("Qcur_normed"),),
    "attn.k_norm": (Name("Kcur_normed"),),
    "attn.q_rot": (Name("Qcur"),),
    "attn.k_rot": (Name("Kcur"),),
    "attn.pattern": (Name("kq_soft_max", "", "kq_soft_max_ext"),),
    "attn.z": (Name("kqv_out", "sum is as it is", "kqv"),),
    "attn_out": (Name("attn_out"),),
    "attn_out_norm": (Name("attn_post_norm"),),
    "resid_mid": (Name("ffn_inp", "", "sa_out"),),
    "mlp_norm": (Name("ffn_norm", "normed before"), Name("attn_post_norm", "normed on one side")),
    "mlp.router": (Name("ffn_moe_logits", "unbiased router"), Name("ffn_moe_logits_biased", "biased router")),
    "mlp.up": (Name("ffn_up", "not biased"), Name("ffn_up_b", "biased")),
    "mlp.gate": (Name("ffn_gate", "not biased"), Name("ffn_gate_b", "biased")),
    "mlp.act": (Name("ffn_swiglu", "gated", "ffn_geglu"), Name("ffn_gate_par", "gated"), Name("ffn_gelu", "not gated")),
    "mlp_out": (Name("ffn_out", "MLP by itself"), Name("ffn_moe_out", "experts by themselves")),
    "mlp_out_norm": (Name("ffn_post_norm"),),
    "resid_post": (Name("l_out"),),
}
STACK_TENSORS: dict[str, tuple[Name, ...]] = dict.fromkeys(STACK_MODULES, ()) | {
    "embed": (
        Name("inp_embd", "plain embedding", "embd"),
        Name("inpL", "positions added"),
        Name("inp_embd", "positions added, normed"),
        Name("inp_scaled", "embedding scaled"),
    ),
    "embed_norm": (Name("inp_norm"),),
    "final_norm": (Name("result_norm"),),
    "logits": (Name("result_output"),),
}


class Names:
    """A vocabulary for the activations of one model: `names.of(path)`, and back by `names.select(name or pattern)`."""

    def __init__(self, model: Model, vocabulary: Vocabulary = "ours"):
        self.vocabulary, self.paths = vocabulary, [path for path, _ in points(model.spec)]
        find = {
            "ours": lambda path, model: [path],
            "transformerlens": _hooks,
            "huggingface": _modules,
            "ggml": _tensors,
        }
        self.known = {path: find[vocabulary](path, model) for path in self.paths}

    def of(self, path: str) -> str | None:
        """What this vocabulary calls one of our paths; None where it has no name for it."""
        return next(iter(self.known[path]), None)

    def select(self, option: str, wanted: str) -> list[str]:
        """Our paths of the activations that a name or a pattern means, in this vocabulary or in ours.

        option: what was given, for an error. Raises GptcliError where it means none.
        """
        found = [path for path in self.paths if _meant(wanted, (*self.known[path], path))]
        if not found:
            shown = [name for names in self.known.values() for name in names]
            hint = f"{nearest(wanted, shown)} --list prints all".strip()
            raise GptcliError(f"{option} {wanted}: no such activation", hint, "path")
        return found


def _meant(wanted: str, names: tuple[str, ...]) -> bool:
    return any(name == wanted or fnmatchcase(name, wanted) for name in names)


def _hooks(path: str, model: Model) -> list[str]:
    place = Place.of(path)
    here = place.spec(model.spec)
    two = model.spec.encoder is not None
    if place.layer is None:
        table, before = (ENCODER_HOOKS if place.stack else STACK_HOOKS), ""
    else:
        table, before = BLOCK_HOOKS, f"{'encoder' if place.stack else 'decoder' if two else 'blocks'}.{place.layer}."
    rows = (row for row in table[place.name] if CONDITIONS[row.when](here))
    return [before + name for row in rows for name in (row.theirs, row.also) if name]


def _tensors(path: str, model: Model) -> list[str]:
    place = Place.of(path)
    if model.spec.encoder is not None:
        return []
    table, layer = (STACK_TENSORS, "") if place.layer is None else (LAYER_TENSORS, f"-{place.layer}")
    rows = (row for row in table[place.name] if CONDITIONS[row.when](place.spec(model.spec)))
    return [name + layer for row in rows for name in (row.theirs, row.also) if name]


def _modules(path: str, model: Model) -> list[str]:
    place = Place.of(path)
    table = STACK_MODULES if place.layer is None else LAYER_MODULES
    rows = (row for row in table[place.name] if CONDITIONS[row.when](place.spec(model.spec)))
    return [name for row in rows if (name := _module(row, place, model)) is not None]


def _module(row: Module, place: Place, model: Model) -> str | None:
    """The module's path, by the checkpoint's words, else by the common ones."""
    layer = "" if place.layer is None else f"layers.{place.layer}."
    weight = f"{place.stack}{'.' * bool(place.stack)}{layer}{row.stem}.weight"
    binding = model.checkpoint.binding if model.checkpoint else None
    bound = binding.bounds.get(weight) if binding else None
    if binding is None or (bound is not None and bound.stored == weight):  # no words, or our own
        return _common(row, place, layer, model.spec)
    if bound is None:  # tied, or a norm without weights
        plain = row.stem == "lm_head" and model.spec.lm_head.transform is None
        return row.common if plain else None
    if row.place == "own" and (bound.parts > 1 or bound.item is not None):
        return None
    module = module_of(bound.stored, row.place, place.layer)
    return f"{module}.{row.common.rpartition('.')[2]}" if row.place == "inside" else module


def module_of(stored: str, place: str, layer: int | None) -> str:
    """The path of the module of a checkpoint's weight: its `own`, the one that holds it (`inside`, `around`), or its
    `whole` layer's.
    """
    module = stored.removesuffix(".weight")
    if place == "whole":
        return re.match(rf".*?\.{layer}(?=\.)", f".{module}")[0].lstrip(".")
    return module if place == "own" else module.rpartition(".")[0]


def _common(row: Module, place: Place, layer: str, spec: Spec) -> str:
    if row.stem.partition(".")[0] == "lm_head":
        return row.common
    stack = place.stack or ("decoder" if spec.encoder is not None else "")
    return f"model.{stack}{'.' * bool(stack)}{layer}{row.common}".rstrip(".")
