"""Encoders alone equal transformers' models for masked words at toy size, and its bare encoders up to their vectors."""

import json
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForPreTraining,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from gptcli import count
from gptcli.config import read_config
from gptcli.errors import GptcliError
from gptcli.families import FAMILIES
from gptcli.families.record import ACTIVATIONS, resolve
from gptcli.layout import layout
from gptcli.model.forward import Inputs, forward
from gptcli.model.weights import Weights
from gptcli.shipped import configs
from gptcli.source import open_model
from gptcli.spec import Spec, to_dict
from tests.oracle import CPU, assert_near, check_exactly, check_family, in_float64, save_toy

SIZES = {
    "vocab_size": 97,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 40,
}
CASES = {
    "bert": SIZES | {"model_type": "bert"},
    "roberta": SIZES | {"model_type": "roberta", "type_vocab_size": 1, "layer_norm_eps": 1e-5},
    "distilbert": {
        "model_type": "distilbert",
        "vocab_size": 97,
        "dim": 24,
        "hidden_dim": 40,
        "n_layers": 3,
        "n_heads": 4,
        "max_position_embeddings": 40,
    },
    # The first and the fourth layer see everything, the others seven positions to each side.
    "modernbert": SIZES
    | {"model_type": "modernbert", "num_hidden_layers": 4, "local_attention": 14}
    # The library's own are beyond so few words.
    | {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2},
}
LINEAR, YARN = (
    {"rope_type": "linear", "factor": 3.0},
    {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 16},
)
TURNING = {"global": {"rope_theta": 300.0, **LINEAR}, "local": {"rope_theta": 50.0, **YARN}}
RARE = {
    "bert, one kind of segment, an MLP of its own size": {"type_vocab_size": 1, "intermediate_size": 17},
    "bert, another eps": {"layer_norm_eps": 0.1},
    "bert, a head of its own": {"tie_word_embeddings": False},
    "roberta, two segments": {"type_vocab_size": 2, "layer_norm_eps": 0.1},
    "roberta, another activation in the layers alone": {"hidden_act": "relu"},
    "roberta, a head of its own": {"tie_word_embeddings": False},
    "distilbert, an MLP of its own size": {"hidden_dim": 17, "n_heads": 2},
    "distilbert, a table of sines and cosines": {"sinusoidal_pos_embds": True},
    "distilbert, a head of its own": {"tie_word_embeddings": False},
    "modernbert, every bias": {"attention_bias": True, "mlp_bias": True, "norm_bias": True, "classifier_bias": True},
    "modernbert, no bias, a head of its own": {"decoder_bias": False, "tie_word_embeddings": False},
    "modernbert, activations": {"hidden_activation": "relu", "classifier_activation": "silu", "norm_eps": 0.1},
    "modernbert, local first": {"layer_types": [f"{one}_attention" for one in ("sliding", "full", "sliding", "full")]},
    "modernbert, every other layer local": {"global_attn_every_n_layers": 2, "local_attention": 5},
    "modernbert, all layers global": {"global_attn_every_n_layers": 1},
    "modernbert, local layers see themselves": {"local_attention": 1},
    "modernbert, bases": {"global_rope_theta": 300.0, "local_rope_theta": 50.0},
    "modernbert, a rotation for each kind of layer": {
        "rope_parameters": {"full_attention": TURNING["global"], "sliding_attention": TURNING["local"]}
    },
    "modernbert, a rotation for one kind of layer": {"rope_parameters": {"full_attention": {"rope_theta": 300.0}}},
    "modernbert, a scaled rotation": {"rope_scaling": LINEAR},
}


def small(kind: str, config: dict | None = None) -> dict:
    """A small config of the family, without the keys that are taken away by None."""
    return {key: value for key, value in (CASES[kind] | (config or {})).items() if value is not None}


def told(kind: str, length: int = 24) -> dict | None:
    """Of one family the library takes an id for padding wherever it stands, unless it is told the positions."""
    return {"position_ids": torch.arange(2, length + 2)[None]} if kind == "roberta" else None


def read(config: dict) -> Spec:
    return resolve(config, FAMILIES[config["model_type"]], "toy", "config.json").spec


@pytest.mark.parametrize("kind", CASES)
def test_equals_transformers(kind, tmp_path):
    check_family(small(kind), tmp_path, auto=AutoModelForMaskedLM, told=told(kind))


@pytest.mark.parametrize("case", RARE)
def test_rare_words_of_a_config(case, tmp_path):
    kind = case.partition(",")[0]
    check_exactly(small(kind, RARE[case]), tmp_path, auto=AutoModelForMaskedLM, told=told(kind))


@pytest.mark.parametrize("word", ACTIVATIONS)
def test_every_activation(word, tmp_path):
    """In the layers and in the head."""
    check_exactly(small("bert", {"hidden_act": word, "num_hidden_layers": 1}), tmp_path, auto=AutoModelForMaskedLM)


def logits(folder: Path, inputs: Inputs) -> torch.Tensor:
    model = open_model(str(folder))
    return forward(inputs, model.weights(torch.float64, CPU), model.spec)


def expected(theirs: torch.nn.Module, ids: torch.Tensor, **said) -> torch.Tensor:
    """What the library's model gives in float64: its logits, or a bare encoder's vectors."""
    with in_float64(), torch.no_grad():
        out = theirs(ids, **said)
    return next(out[key] for key in ("logits", "prediction_logits", "last_hidden_state") if key in out)


def random_ids(spec: Spec, length: int = 24) -> torch.Tensor:
    return torch.randint(0, spec.vocab_size, (2, length), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("kind", ["bert", "roberta"])
def test_segments(kind, tmp_path):
    theirs = save_toy(small(kind, {"type_vocab_size": 3}), tmp_path, auto=AutoModelForMaskedLM)
    ids = torch.arange(2, 26)[None]
    segments = torch.tensor([0] * 10 + [1] * 7 + [2] * 7)[None]
    found = logits(tmp_path, Inputs(ids, segments=segments))
    assert_near(found, expected(theirs, ids, token_type_ids=segments), 1e-9)
    assert float((found - logits(tmp_path, Inputs(ids))).abs().max()) > 1e-2


@pytest.mark.parametrize("kind", CASES)
def test_padding_on_the_left_changes_nothing(kind, tmp_path):
    """The library's positions count columns, padding too, unless it is told them."""
    theirs = save_toy(small(kind), tmp_path, auto=AutoModelForMaskedLM)
    ids = random_ids(read(small(kind)))
    mask = torch.ones_like(ids, dtype=torch.bool)
    mask[1, :9] = False
    found = logits(tmp_path, Inputs(ids, mask=mask))
    positions = (mask.long().cumsum(-1) - 1).clamp(min=0) + (2 if kind == "roberta" else 0)
    batched = expected(theirs, ids, attention_mask=mask.long(), position_ids=positions)
    assert_near(found[mask], batched[mask], 1e-9)
    assert_near(found[1:, 9:], logits(tmp_path, Inputs(ids[1:, 9:])), 1e-9)


def test_a_local_layer_sees_to_both_sides_and_no_farther(tmp_path):
    """One layer, local: a changed token changes what stands within seven positions of it, and nothing else."""
    config = small("modernbert", {"num_hidden_layers": 1, "layer_types": ["sliding_attention"]})
    save_toy(config, tmp_path, auto=AutoModelForMaskedLM)
    ids = torch.arange(24)[None]
    other = ids.clone()
    other[0, 10] = 90
    changed = (logits(tmp_path, Inputs(ids)) - logits(tmp_path, Inputs(other))).abs().amax(-1)[0] > 0
    assert changed.nonzero().flatten().tolist() == list(range(3, 18))


BOOL, SEED = st.booleans(), st.integers(0, 100)
WORDS = st.sampled_from(["gelu_new", "gelu", "relu", "silu", "tanh"])
HEADS = st.sampled_from([1, 3, 6])
EPS = st.sampled_from([1e-12, 1e-3])
DRAWN = {
    "bert": {
        "num_attention_heads": HEADS,
        "hidden_act": WORDS,
        "layer_norm_eps": EPS,
        "type_vocab_size": st.sampled_from([1, 2, 4]),
        "tie_word_embeddings": BOOL,
    },
    "roberta": {
        "num_attention_heads": HEADS,
        "hidden_act": WORDS,
        "layer_norm_eps": EPS,
        "max_position_embeddings": st.sampled_from([26, 40]),
        "tie_word_embeddings": BOOL,
    },
    "distilbert": {
        "n_heads": HEADS,
        "activation": WORDS,
        "sinusoidal_pos_embds": BOOL,
        "tie_word_embeddings": BOOL,
    },
    "modernbert": {
        "num_attention_heads": HEADS,
        "hidden_activation": WORDS,
        "classifier_activation": WORDS,
        "norm_eps": EPS,
        "local_attention": st.sampled_from([0, 1, 9, 200]),
        "global_attn_every_n_layers": st.sampled_from([1, 2, 3, 9]),
        "global_rope_theta": st.sampled_from([50.0, 160_000.0]),
        "local_rope_theta": st.sampled_from([50.0, 10_000.0]),
        **dict.fromkeys(("attention_bias", "mlp_bias", "norm_bias", "classifier_bias", "decoder_bias"), BOOL),
        "tie_word_embeddings": BOOL,
    },
}


def any_of(kind: str):
    """A property test over what DRAWN says of the family."""

    @settings(max_examples=5, deadline=None, derandomize=True)
    @given(st.fixed_dictionaries(DRAWN[kind]), SEED)
    def check(config, seed):
        with tempfile.TemporaryDirectory() as folder:
            said = told(kind)
            check_exactly(small(kind, config), Path(folder), seed=seed, auto=AutoModelForMaskedLM, told=said)

    return check


test_any_bert = any_of("bert")
test_any_roberta = any_of("roberta")
test_any_distilbert = any_of("distilbert")
test_any_modernbert = any_of("modernbert")


# Encoders without the head for masks.


@pytest.mark.parametrize("kind", CASES)
def test_a_bare_encoder_gives_its_final_vectors(kind, tmp_path):
    theirs = save_toy(small(kind), tmp_path, auto=AutoModel)
    model = open_model(str(tmp_path))
    assert model.spec.lm_head is None and model.checkpoint.binding.prefix == ""
    ids = torch.arange(2, 26)[None]
    assert_near(logits(tmp_path, Inputs(ids)), expected(theirs, ids), 1e-9)
    assert_near(logits(tmp_path, Inputs(ids, rows="last")), expected(theirs, ids)[:, -1:], 1e-9)
    pooler = [name for name, _ in theirs.named_parameters() if "pooler" in name]
    assert sorted(model.checkpoint.binding.unused) == sorted(pooler)
    assert count.total(model.layout) == sum(p.numel() for n, p in theirs.named_parameters() if n not in pooler)


@pytest.mark.parametrize("auto", [AutoModelForSequenceClassification, AutoModelForTokenClassification])
@pytest.mark.parametrize("kind", CASES)
def test_other_tasks_are_read_up_to_the_final_vectors(kind, auto, tmp_path):
    theirs = save_toy(small(kind), tmp_path, auto=auto)
    model = open_model(str(tmp_path))
    unused, inner = model.checkpoint.binding.unused, f"{theirs.base_model_prefix}."
    heads = {name for name, _ in theirs.named_parameters() if not name.startswith(inner) or "pooler" in name}
    assert model.spec.lm_head is None and set(unused) == heads
    assert model.notes == [f"{len(unused)} tensors of the file are not read ({unused[0]} …)"]
    ids = torch.arange(2, 26)[None]
    assert_near(logits(tmp_path, Inputs(ids)), expected(theirs.base_model, ids), 1e-9)


@pytest.mark.parametrize("kind", ["bert", "roberta", "distilbert"])
def test_what_the_config_lists_decides_the_head(kind, tmp_path):
    """A head in the file of a model that is said to have none belongs to another part of it."""
    theirs = save_toy(small(kind), tmp_path, auto=AutoModelForMaskedLM)
    config = tmp_path / "config.json"
    written = json.loads(config.read_text())
    config.write_text(json.dumps(written | {"architectures": [type(theirs.base_model).__name__]}))
    model = open_model(str(tmp_path))
    assert model.spec.lm_head is None and len(model.checkpoint.binding.unused) == 5
    ids = torch.arange(2, 26)[None]
    assert_near(logits(tmp_path, Inputs(ids)), expected(theirs.base_model, ids), 1e-9)
    config.write_text(json.dumps({key: value for key, value in written.items() if key != "architectures"}))
    assert open_model(str(tmp_path)).spec.lm_head is not None


@pytest.mark.parametrize("kind", CASES)
def test_a_bare_encoder_that_is_said_to_have_a_head_is_refused(kind, tmp_path):
    theirs = save_toy(small(kind), tmp_path, auto=AutoModelForMaskedLM)
    written = (tmp_path / "config.json").read_text()
    theirs.base_model.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(written)
    name = {"bert": "cls.predictions.transform.dense", "roberta": "lm_head.dense", "distilbert": "vocab_transform"}
    with pytest.raises(GptcliError, match=f"'{name.get(kind, 'head.dense')}.weight' is missing"):
        open_model(str(tmp_path))


def test_the_other_head_of_pretraining_is_not_read(tmp_path):
    theirs = save_toy(small("bert"), tmp_path, auto=AutoModelForPreTraining)
    model = open_model(str(tmp_path))
    names = ("bert.pooler.dense.bias", "bert.pooler.dense.weight")
    assert sorted(model.checkpoint.binding.unused) == [
        *names,
        *("cls.seq_relationship.bias", "cls.seq_relationship.weight"),
    ]
    ids = torch.arange(24)[None]
    assert_near(logits(tmp_path, Inputs(ids)), expected(theirs, ids), 1e-9)


# What lies in files.


def rewrite(folder: Path, change) -> None:
    """The tensors of a saved model as `change` gives them, by name."""
    file = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in change(load_file(file)).items()}
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.mark.parametrize("kind", ["bert", "roberta"])
@pytest.mark.parametrize("auto", [AutoModelForMaskedLM, AutoModel])
def test_norms_by_their_old_names(kind, auto, tmp_path):
    theirs = save_toy(small(kind), tmp_path, auto=auto)
    old = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}

    def renamed(name: str) -> str:
        return next((name.replace(new, word) for new, word in old.items() if name.endswith(new)), name)

    rewrite(tmp_path, lambda tensors: {renamed(name): tensor for name, tensor in tensors.items()})
    assert sum(name.endswith(".gamma") for name in load_file(tmp_path / "model.safetensors")) >= 7
    ids = torch.arange(2, 26)[None]
    assert_near(logits(tmp_path, Inputs(ids)), expected(theirs, ids), 1e-9)


TABLE = {
    "bert": ("cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"),
    "roberta": ("lm_head.decoder.weight", "roberta.embeddings.word_embeddings.weight"),
    "distilbert": ("vocab_projector.weight", "distilbert.embeddings.word_embeddings.weight"),
    "modernbert": ("decoder.weight", "model.embeddings.tok_embeddings.weight"),
}
# Of the two names of one bias, the one that files hold, and the one that the library's forward pass reads.
BIAS = {
    "bert": ("cls.predictions.bias", "cls.predictions.decoder.bias"),
    "roberta": ("lm_head.bias", "lm_head.decoder.bias"),
}


@pytest.mark.parametrize("kind", CASES)
def test_a_tied_head_that_is_stored_again(kind, tmp_path):
    theirs = save_toy(small(kind), tmp_path, auto=AutoModelForMaskedLM)
    head, table = TABLE[kind]
    ids = torch.arange(2, 26)[None]
    rewrite(tmp_path, lambda tensors: tensors | {head: tensors[table]})
    model = open_model(str(tmp_path))
    assert_near(logits(tmp_path, Inputs(ids)), expected(theirs, ids), 1e-9)
    assert not model.notes and model.spec.lm_head.tied
    rewrite(tmp_path, lambda tensors: tensors | {head: 2 * tensors[table]})
    model = open_model(str(tmp_path))
    found = forward(Inputs(ids), model.weights(torch.float64, CPU), model.spec)
    assert [head in note for note in model.notes] == [True]
    # The library unties what differs.
    differing = type(theirs).from_pretrained(tmp_path, dtype=torch.float64).eval()
    assert_near(found, expected(differing, ids), 1e-5)


@pytest.mark.parametrize("kind", BIAS)
def test_a_bias_that_is_stored_under_either_name_or_both(kind, tmp_path):
    theirs = save_toy(small(kind), tmp_path, auto=AutoModelForMaskedLM)
    beside, own = BIAS[kind]
    ids = torch.arange(2, 26)[None]
    wanted = expected(theirs, ids)
    assert own not in load_file(tmp_path / "model.safetensors")
    rewrite(tmp_path, lambda tensors: tensors | {own: tensors[beside]})
    assert not open_model(str(tmp_path)).notes
    assert_near(logits(tmp_path, Inputs(ids)), wanted, 1e-9)
    rewrite(tmp_path, lambda tensors: {name: tensor for name, tensor in tensors.items() if name != beside})
    assert_near(logits(tmp_path, Inputs(ids)), wanted, 1e-9)
    rewrite(tmp_path, lambda tensors: {name: tensor for name, tensor in tensors.items() if name != own})
    with pytest.raises(GptcliError, match=f"'{own}' is missing"):
        open_model(str(tmp_path))


@pytest.mark.parametrize("kind", BIAS)
def test_of_two_biases_the_decoder_s_is_read(kind, tmp_path):
    """Where the head is not tied, the library keeps both, and its forward pass reads one."""
    save_toy(small(kind, {"tie_word_embeddings": False}), tmp_path, auto=AutoModelForMaskedLM)
    beside, own = BIAS[kind]
    model = open_model(str(tmp_path))
    stored = load_file(tmp_path / "model.safetensors")
    assert not torch.equal(stored[own], stored[beside])
    assert torch.equal(model.weights(torch.float64, CPU)["lm_head.bias"], stored[own])
    assert [own in note and beside in note for note in model.notes] == [True]


@pytest.mark.parametrize("kind", CASES)
def test_buffers_are_no_weights_and_unknown_keys_are_named(kind, tmp_path):
    theirs = save_toy(small(kind), tmp_path, auto=AutoModelForMaskedLM)
    inner = f"{theirs.base_model_prefix}.embeddings"
    extra = {f"{inner}.position_ids": torch.arange(40)[None], f"{inner}.token_type_ids": torch.zeros(1, 40).long()}
    extra = {"model.layers.0.attn.rotary_emb.inv_freq": torch.ones(3)} if kind == "modernbert" else extra
    rewrite(tmp_path, lambda tensors: tensors | extra)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"warp_factor": 9}))
    model = open_model(str(tmp_path))
    assert sorted(model.checkpoint.binding.buffers) == sorted(extra)
    assert any("warp_factor" in note for note in model.notes)
    stored = load_file(tmp_path / "model.safetensors")
    assert count.total(model.layout) == sum(t.numel() for name, t in stored.items() if name not in extra)


@pytest.mark.parametrize("kind", CASES)
def test_without_the_prefix_of_the_inner_model(kind, tmp_path):
    theirs = save_toy(small(kind), tmp_path, auto=AutoModelForMaskedLM)
    inner = f"{theirs.base_model_prefix}."
    rewrite(tmp_path, lambda tensors: {name.removeprefix(inner): tensor for name, tensor in tensors.items()})
    ids = torch.arange(2, 26)[None]
    assert_near(logits(tmp_path, Inputs(ids)), expected(theirs, ids), 1e-9)


@pytest.mark.parametrize("auto", [AutoModelForMaskedLM, AutoModel])
@pytest.mark.parametrize("kind", CASES)
def test_a_yaml_config_beside_the_weights_finds_their_names(kind, auto, tmp_path):
    theirs = save_toy(small(kind), tmp_path, auto=auto)
    spec = open_model(str(tmp_path)).spec
    (tmp_path / "config.json").unlink()
    (tmp_path / "config.yaml").write_text(json.dumps(to_dict(spec)))  # which is YAML as well
    model = open_model(str(tmp_path))
    assert model.spec == spec
    ids = torch.arange(2, 26)[None]
    assert_near(logits(tmp_path, Inputs(ids)), expected(theirs, ids), 1e-9)


@pytest.mark.parametrize("kind", CASES)
def test_left_over_tensors_are_refused(kind, tmp_path):
    save_toy(small(kind), tmp_path, auto=AutoModelForMaskedLM)
    rewrite(tmp_path, lambda tensors: tensors | {"adapter.weight": torch.ones(3)})
    with pytest.raises(GptcliError, match=r"'adapter\.weight' is left over"):
        open_model(str(tmp_path))


# What configs say.


@pytest.mark.parametrize("kind", CASES)
def test_defaults_are_the_library_s(kind):
    config = AutoConfig.for_model(kind)
    stated = resolve(config.to_dict(), FAMILIES[kind], "default", "config.json")
    assert not stated.unknown
    assert stated.spec == resolve({"model_type": kind}, FAMILIES[kind], "default", "config.json").spec
    assert count.total(layout(stated.spec)) == parameters_of(config)


def parameters_of(config) -> int:
    """parameters() names a tied weight once, as the layout counts it."""
    with torch.device("meta"):
        return sum(p.numel() for p in AutoModelForMaskedLM.from_config(config).parameters())


BERT_BASE = {
    "architectures": ["BertForMaskedLM"],
    "attention_probs_dropout_prob": 0.1,
    "gradient_checkpointing": False,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "hidden_size": 768,
    "initializer_range": 0.02,
    "intermediate_size": 3072,
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 512,
    "num_attention_heads": 12,
    "num_hidden_layers": 12,
    "pad_token_id": 0,
    "position_embedding_type": "absolute",
    "type_vocab_size": 2,
    "use_cache": True,
    "vocab_size": 30522,
}
MULTILINGUAL = {
    "directionality": "bidi",
    "num_labels": 2,
    "pooler_fc_size": 768,
    "pooler_num_attention_heads": 12,
    "pooler_num_fc_layers": 3,
    "pooler_size_per_head": 128,
    "pooler_type": "first_token_transform",
    "vocab_size": 119547,
}
ROBERTA_BASE = {
    "architectures": ["RobertaForMaskedLM"],
    "bos_token_id": 0,
    "eos_token_id": 2,
    "layer_norm_eps": 1e-5,
    "max_position_embeddings": 514,
    "pad_token_id": 1,
    "type_vocab_size": 1,
    "vocab_size": 50265,
}
DISTILBERT_BASE = {
    "activation": "gelu",
    "architectures": ["DistilBertForMaskedLM"],
    "attention_dropout": 0.1,
    "dim": 768,
    "dropout": 0.1,
    "hidden_dim": 3072,
    "initializer_range": 0.02,
    "max_position_embeddings": 512,
    "n_heads": 12,
    "n_layers": 6,
    "pad_token_id": 0,
    "qa_dropout": 0.1,
    "seq_classif_dropout": 0.2,
    "sinusoidal_pos_embds": False,
    "tie_weights_": True,
    "vocab_size": 30522,
}
MODERNBERT_BASE = {
    "architectures": ["ModernBertForMaskedLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 50281,
    "classifier_activation": "gelu",
    "classifier_bias": False,
    "classifier_dropout": 0.0,
    "classifier_pooling": "mean",
    "cls_token_id": 50281,
    "decoder_bias": True,
    "deterministic_flash_attn": False,
    "embedding_dropout": 0.0,
    "eos_token_id": 50282,
    "global_attn_every_n_layers": 3,
    "global_rope_theta": 160000.0,
    "gradient_checkpointing": False,
    "hidden_activation": "gelu",
    "hidden_size": 768,
    "initializer_cutoff_factor": 2.0,
    "initializer_range": 0.02,
    "intermediate_size": 1152,
    "layer_norm_eps": 1e-05,
    "local_attention": 128,
    "local_rope_theta": 10000.0,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "mlp_dropout": 0.0,
    "norm_bias": False,
    "norm_eps": 1e-05,
    "num_attention_heads": 12,
    "num_hidden_layers": 22,
    "pad_token_id": 50283,
    "position_embedding_type": "absolute",
    "reference_compile": None,
    "repad_logits_with_grad": False,
    "sep_token_id": 50282,
    "sparse_prediction": False,
    "sparse_pred_ignore_index": -100,
    "tie_word_embeddings": True,
    "vocab_size": 50368,
}
# What the published files of some models say, and their known sizes.
PUBLISHED = {
    "bert": (BERT_BASE, 109_514_298),
    "bert, many languages": (BERT_BASE | MULTILINGUAL, 177_974_523),
    "roberta": (ROBERTA_BASE, 124_697_433),
    "distilbert": (DISTILBERT_BASE, 66_985_530),
    "modernbert": (MODERNBERT_BASE, 149_655_232),
}


@pytest.mark.parametrize("case", PUBLISHED)
def test_published_configs(case):
    kind, (config, size) = case.partition(",")[0], PUBLISHED[case]
    found = resolve(config, FAMILIES[kind], "published", "config.json")
    assert not found.unknown
    assert count.total(layout(found.spec)) == size == parameters_of(AutoConfig.for_model(kind, **config))


def test_the_shipped_config_is_the_published_one():
    shipped = read_config(configs()["bert-base"]).spec
    assert shipped == resolve(BERT_BASE, FAMILIES["bert"], shipped.name, "config.json").spec
    assert count.total(layout(shipped)) == 109_514_298 == parameters_of(AutoConfig.for_model("bert"))


def test_windows_and_rotations_of_the_published_config():
    """Every third layer sees everything; the others 64 positions to each side."""
    spec = read(MODERNBERT_BASE | {"model_type": "modernbert"})
    for layer in range(22):
        here = spec.at(layer)
        assert here.attention.window == (None if layer % 3 == 0 else 65)
        assert here.position.theta == (160_000.0 if layer % 3 == 0 else 10_000.0)
        assert here.attention.normed == (layer != 0) and not here.attention.causal


@pytest.mark.parametrize("kind", CASES)
def test_what_the_library_writes_reads_as_what_was_written(kind):
    """Its later versions write the rotation and the kinds of layers out."""
    for config in (CASES[kind], *(CASES[kind] | RARE[case] for case in RARE if case.partition(",")[0] == kind)):
        written = resolve(AutoConfig.for_model(**config).to_dict(), FAMILIES[kind], "toy", "config.json")
        assert (written.spec, written.unknown) == (read(config), ())


def test_words_of_other_families_for_the_same():
    words = {"dim": "hidden_size", "n_heads": "num_attention_heads", "n_layers": "num_hidden_layers"}
    config = small("distilbert")
    assert read({words.get(key, key): value for key, value in config.items()}) == read(config)


REFUSED = [
    *((kind, {"is_decoder": True}, "is_decoder: True") for kind in CASES),
    *((kind, {"add_cross_attention": True}, "add_cross_attention: True") for kind in CASES),
    *((kind, {"is_causal": True}, "is_causal: True") for kind in CASES),
    *((kind, {"per_layer_config": {"1": {}}}, "per_layer_config") for kind in CASES),
    *((kind, {"architectures": ["FooForBar"]}, "architectures: 'FooForBar' is not implemented") for kind in CASES),
    *((kind, {"architectures": "Foo"}, "architectures: 'Foo' is not a list of names") for kind in CASES),
    *((kind, {"architectures": [3]}, "architectures: [3] is not a list of names") for kind in CASES),
    *((kind, {"vocab_size": 0}, "vocab_size: 0") for kind in CASES),
    ("bert", {"position_embedding_type": "relative_key"}, "position_embedding_type: 'relative_key'"),
    ("bert", {"directionality": "left"}, "directionality: 'left'"),
    ("bert", {"hidden_act": "mish"}, "hidden_act: 'mish'"),
    ("bert", {"num_attention_heads": 5}, "attention.n_heads: 5 does not divide hidden_size: 24"),
    ("bert", {"type_vocab_size": 0}, "n_segments: 0"),
    ("bert", {"architectures": ["BertForMaskedLM", "BertForRanking"]}, "architectures: 'BertForRanking'"),
    ("roberta", {"position_embedding_type": "relative_key_query"}, "position_embedding_type: 'relative_key_query'"),
    ("roberta", {"pad_token_id": 0}, "pad_token_id: 0"),
    ("roberta", {"max_position_embeddings": 2}, "max_position_embeddings: 2 is not a whole number from 3 on"),
    ("distilbert", {"activation": "mish"}, "activation: 'mish'"),
    ("distilbert", {"hidden_size": 48}, "hidden_size: 48 contradicts dim: 24"),
    ("modernbert", {"hidden_activation": "mish"}, "hidden_activation: 'mish'"),
    ("modernbert", {"classifier_activation": "mish"}, "classifier_activation: 'mish'"),
    ("modernbert", {"local_attention": -1}, "local_attention: -1"),
    ("modernbert", {"sliding_window": 9}, "sliding_window: 9 contradicts local_attention: 14"),
    ("modernbert", {"global_attn_every_n_layers": 0}, "global_attn_every_n_layers: 0"),
    ("modernbert", {"layer_types": ["full_attention"]}, "layer_types: not a word for every layer"),
    ("modernbert", {"layer_types": ["chunked_attention"] * 4}, "layer_types: 'chunked_attention'"),
    ("modernbert", {"rope_parameters": LINEAR}, "is not a table for each layer type"),
    ("modernbert", {"rope_parameters": {"chunked_attention": LINEAR}}, "is not a table for each layer type"),
    ("modernbert", {"rope_parameters": {"full_attention": {"rope_type": "ntk"}}}, "rope_type: 'ntk'"),
    ("modernbert", {"rope_parameters": {"sliding_attention": {"rope_type": "ntk"}}}, "rope_type: 'ntk'"),
    ("modernbert", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling.rope_type: missing"),
    ("modernbert", {"rope_scaling": 3}, "rope_scaling: 3 is not a table"),
    (
        "modernbert",
        {"rope_scaling": LINEAR, "rope_parameters": {"full_attention": LINEAR}},
        "rope_scaling: stands beside rope_parameters",
    ),
    ("modernbert", {"partial_rotary_factor": 0.5}, "partial_rotary_factor: 0.5"),
]


@pytest.mark.parametrize(("kind", "config", "said"), REFUSED, ids=[f"{kind}: {said}" for kind, _, said in REFUSED])
def test_what_is_known_and_not_implemented_is_refused_by_name(kind, config, said):
    with pytest.raises(GptcliError) as caught:
        read(small(kind, config))
    assert said in caught.value.message


def test_a_base_that_is_null_is_refused():
    with pytest.raises(GptcliError, match="local_rope_theta: missing"):
        read(CASES["modernbert"] | {"local_rope_theta": None})


@pytest.mark.parametrize("kind", CASES)
def test_no_more_tokens_than_the_context_holds(kind):
    context = 38 if kind == "roberta" else 40
    with pytest.raises(GptcliError, match=f"{context + 1} tokens are more than the context of {context}"):
        forward(Inputs(torch.zeros(1, context + 1, dtype=torch.long)), Weights({}), read(small(kind)))
