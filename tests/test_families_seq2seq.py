"""An encoder beside a decoder equals transformers at toy size, by every switch of its configs and any form of file."""

import io
import json
import random
import re
import tempfile
from functools import cache
from pathlib import Path

import pytest
import sentencepiece
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
    MarianTokenizer,
    RobertaTokenizer,
    T5Tokenizer,
)
from transformers.convert_slow_tokenizer import T5Converter
from transformers.models.t5.modeling_t5 import T5Attention

from gptcli import count
from gptcli.errors import GptcliError
from gptcli.families import FAMILIES
from gptcli.families.record import Resolved, resolve
from gptcli.layout import layout
from gptcli.model.forward import Inputs, forward
from gptcli.model.ops import distance_scores
from gptcli.model.weights import Weights
from gptcli.source import Model, open_model
from gptcli.spec import Relative
from gptcli.tokens import Rule, from_files, visible
from gptcli.tokens.files import Library, NumberedSentences, Sentences
from gptcli.trace import Recorder, points
from tests.command import gptcli
from tests.oracle import CPU, Noted, assert_near, in_float64, save_toy

# The library only recommends it; nothing that it does here calls for it.
pytestmark = pytest.mark.filterwarnings("ignore:Recommended. pip install sacremoses")

V = 97
# The two stacks differ in all that may differ.
STACKS = {
    "vocab_size": V,
    "d_model": 24,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 3,
    "encoder_ffn_dim": 40,
    "decoder_ffn_dim": 36,
    "max_position_embeddings": 40,
    "pad_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 3,
}
SMALL = {
    "marian": STACKS | {"scale_embedding": True, "forced_eos_token_id": 2},
    "bart": STACKS,
    "t5": {
        "vocab_size": V,
        "d_model": 24,
        "d_kv": 5,
        "d_ff": 40,
        "num_layers": 2,
        "num_decoder_layers": 3,
        "num_heads": 4,
        "relative_attention_num_buckets": 8,
        "relative_attention_max_distance": 10,
    },
}
OWN_TABLES = {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 89}
CASES = {
    "marian": {},
    "marian, unscaled, silu": {"scale_embedding": False, "activation_function": "swish"},
    "marian, own tables": OWN_TABLES,
    "marian, own tables, untied": OWN_TABLES | {"tie_word_embeddings": False},
    "marian, own tables of one size": {"share_encoder_decoder_embeddings": False},
    "marian, a size of the decoder's that nothing reads": {"decoder_vocab_size": 89},
    "bart": {},
    "bart, scaled, relu": {"scale_embedding": True, "activation_function": "relu"},
    "t5": {},
    "t5, gated, untied": {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    "t5, as many layers": {"num_decoder_layers": None, "layer_norm_epsilon": 1e-3, "feed_forward_proj": "gated-silu"},
    "t5, another activation than the word says": {"feed_forward_proj": "gated-gelu", "dense_act_fn": "gelu"},
    "t5, gated all the same": {"is_gated_act": True, "feed_forward_proj": "gelu"},
    "t5, tied and not scaled": {"scale_decoder_outputs": False},
    "t5, untied and scaled": {"scale_decoder_outputs": True, "tie_word_embeddings": False},
    "t5, every bucket": {"relative_attention_num_buckets": 32, "relative_attention_max_distance": 20},
}


def small(kind: str, config: dict | None = None) -> dict:
    """A small config of the family, without the keys that are taken away by None."""
    merged = {"model_type": kind} | SMALL[kind] | (config or {})
    return {key: value for key, value in merged.items() if value is not None}


def case(name: str) -> dict:
    return small(name.partition(",")[0], CASES[name])


def read(config: dict) -> Resolved:
    return resolve(config, FAMILIES[config["model_type"]], "toy", "config.json")


def saved(config: dict, folder: Path, seed: int = 0) -> torch.nn.Module:
    return save_toy(config, folder, seed, AutoModelForSeq2SeqLM)


def fed(model: Model, seed: int = 1, lengths: tuple[int, int] = (24, 17)) -> Inputs:
    """Two texts and their sources, of another length."""
    generator = torch.Generator().manual_seed(seed)
    vocabularies = model.spec.vocab_size, model.spec.encoder.vocab_size
    ids, source = (torch.randint(0, v, (2, n), generator=generator) for v, n in zip(vocabularies, lengths))
    return Inputs(ids, source=Inputs(source))


def run_theirs(theirs: torch.nn.Module, inputs: Inputs):
    with torch.no_grad():
        return theirs(input_ids=inputs.source.ids, decoder_input_ids=inputs.ids, use_cache=False)


def logits_of(folder: Path, inputs: Inputs, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    model = open_model(str(folder))
    return forward(inputs, model.weights(dtype, CPU), model.spec)


def assert_same(ours: torch.Tensor, before: torch.Tensor) -> None:
    """Bits may differ where tensors lie otherwise in a file."""
    torch.testing.assert_close(ours, before, rtol=0, atol=1e-12)


def check_exactly(config: dict, folder: Path, seed: int = 0) -> Inputs:
    """Logits and the encoder's final vectors to 1e-9 of their spread in float64; names read == names declared."""
    theirs = saved(config, folder, seed)
    model = open_model(str(folder))
    assert not model.notes and not model.unknown
    inputs = fed(model, seed + 1)
    with in_float64():
        expected = run_theirs(theirs, inputs)
    weights, recorder = model.weights(torch.float64, CPU), Recorder("*")
    assert not model.notes
    weights.tensors = Noted(weights.tensors)
    assert_near(forward(inputs, weights, model.spec), expected.logits, 1e-9)
    assert weights.tensors.read == {p.name for p in model.layout if not p.tied_to}
    last = Inputs(inputs.ids, source=inputs.source, rows="last")
    assert_near(forward(last, weights, model.spec), expected.logits[:, -1:], 1e-9)
    forward(inputs, weights, model.spec, recorder)
    final = [x for path, x in recorder.kept.items() if path.startswith("encoder.") and x.shape[-1] == 24][-1]
    assert_near(final, expected.encoder_last_hidden_state, 1e-9)
    return inputs


@pytest.mark.parametrize("name", CASES)
def test_equals_transformers(name, tmp_path):
    """Exactly in float64, and to 1e-4 of the spread in float32 to the library as it comes."""
    inputs = check_exactly(case(name), tmp_path)
    options = {"dtype": torch.float32, "attn_implementation": "eager"}
    theirs = AutoModelForSeq2SeqLM.from_pretrained(tmp_path, **options).eval()
    assert_near(logits_of(tmp_path, inputs, torch.float32), run_theirs(theirs, inputs).logits, 1e-4)


BOOL, SEED = st.booleans(), st.integers(0, 100)
WORDS = st.sampled_from(["gelu_new", "gelu", "relu", "silu", "tanh"])
DRAWN_STACKS = {
    "encoder_layers": st.sampled_from([1, 3]),
    "decoder_layers": st.sampled_from([1, 2]),
    "encoder_attention_heads": st.sampled_from([1, 2, 6]),
    "decoder_attention_heads": st.sampled_from([1, 2, 6]),
    "encoder_ffn_dim": st.sampled_from([7, 48]),
    "activation_function": WORDS,
    "scale_embedding": BOOL,
}
DRAWN = {
    "marian": DRAWN_STACKS
    | {"share_encoder_decoder_embeddings": BOOL, "decoder_vocab_size": st.sampled_from([None, 61, 130])},
    "bart": DRAWN_STACKS,
    "t5": {
        "num_layers": st.sampled_from([1, 3]),
        "num_decoder_layers": st.sampled_from([None, 1, 2]),
        "num_heads": st.sampled_from([1, 3]),
        "d_kv": st.sampled_from([1, 8, 30]),
        "relative_attention_num_buckets": st.sampled_from([4, 8, 12, 32]),
        "relative_attention_max_distance": st.sampled_from([17, 23, 128]),
        "layer_norm_epsilon": st.sampled_from([1e-6, 1e-2]),
        "feed_forward_proj": st.sampled_from(["relu", "gelu", "gated-gelu", "gated-relu", "gated-silu"]),
        "tie_word_embeddings": BOOL,
        "scale_decoder_outputs": st.sampled_from([None, False, True]),
    },
}


def any_of(kind: str):
    """A property test over what DRAWN says of the family."""

    @settings(max_examples=6, deadline=None, derandomize=True)
    @given(st.fixed_dictionaries(DRAWN[kind]), SEED)
    def check(config, seed):
        with tempfile.TemporaryDirectory() as folder:
            check_exactly(small(kind, config), Path(folder), seed)

    return check


test_any_marian = any_of("marian")
test_any_bart = any_of("bart")
test_any_t5 = any_of("t5")


# Distances


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("buckets", "furthest"), [(32, 128), (8, 10), (16, 64), (4, 9), (12, 1000)])
def test_a_distance_falls_in_the_library_s_bucket(buckets, furthest, causal, dtype):
    """In either type, as the library computes it in float32 in both, and in float64 besides."""
    distances = torch.arange(-4096, 4097)[None, None]
    table = torch.arange(buckets, dtype=dtype)[:, None]
    part = Relative(buckets=buckets, max_distance=furthest)
    ours = distance_scores(distances, causal, Weights({"rel_bias.weight": table}), part)
    for context in (torch.no_grad, in_float64):
        with context():
            theirs = T5Attention._relative_position_bucket(distances, not causal, buckets, furthest)
        assert torch.equal(ours[:, 0].long(), theirs)
    seen = ours[0, 0, 0].long().tolist()
    assert set(seen) == set(range(buckets)) - (set() if causal else {buckets // 2})


def test_texts_far_longer_than_the_last_bucket(tmp_path):
    theirs = saved(small("t5"), tmp_path)
    model = open_model(str(tmp_path))
    inputs = fed(model, lengths=(160, 200))
    with in_float64():
        expected = run_theirs(theirs, inputs).logits
    assert_near(logits_of(tmp_path, inputs), expected, 1e-9)


# Padding


@pytest.mark.parametrize("name", ["marian", "bart", "t5"])
def test_padding_of_either_text_changes_nothing(name, tmp_path):
    """Left of a source and of a text; the library, which counts padding as positions, has it on the right."""
    theirs = saved(case(name), tmp_path)
    inputs = fed(open_model(str(tmp_path)))
    ids, source = inputs.ids, inputs.source.ids
    mask, source_mask = torch.ones_like(ids, dtype=torch.bool), torch.ones_like(source, dtype=torch.bool)
    mask[1, :5] = source_mask[1, :7] = False
    padded = Inputs(ids, mask=mask, source=Inputs(source, mask=source_mask))
    together = logits_of(tmp_path, padded)
    for text, (skipped, source_skipped) in enumerate(((0, 0), (5, 7))):
        alone = Inputs(ids[text, None, skipped:], source=Inputs(source[text, None, source_skipped:]))
        assert_same(together[text, None, skipped:], logits_of(tmp_path, alone))
        last = Inputs(ids, mask=mask, source=padded.source, rows="last")
        assert_same(logits_of(tmp_path, last), together[:, -1:])
    turned = torch.stack((source[0], source[1].roll(-7)))
    with in_float64(), torch.no_grad():
        right = {"input_ids": turned, "attention_mask": source_mask.flip(1).long()}
        expected = theirs(**right, decoder_input_ids=ids, use_cache=False).logits
    ours = logits_of(tmp_path, Inputs(ids, source=padded.source))
    assert_near(ours, expected, 1e-9)
    assert float((ours - logits_of(tmp_path, inputs)).abs().max()) > 1e-3  # what is hidden would have been heard


# Configs


@pytest.mark.parametrize("kind", SMALL)
def test_defaults_are_the_library_s(kind):
    options = AutoConfig.for_model(kind)
    stated = resolve(options.to_dict(), FAMILIES[kind], "default", "config.json")
    assert not stated.unknown
    bare = resolve({"model_type": kind}, FAMILIES[kind], "default", "config.json")
    assert stated.spec == bare.spec
    start = options.pad_token_id if kind == "t5" else options.decoder_start_token_id
    assert stated.start == bare.start == start
    with torch.device("meta"):
        theirs = AutoModelForSeq2SeqLM.from_config(options)
    # A tied weight counts once in both. The head's bias is a buffer there; sinusoids are parameters that never train.
    own = sum(p.numel() for p in theirs.parameters() if p.requires_grad)
    assert count.total(layout(stated.spec)) == own + (0 if kind == "t5" else options.vocab_size)


def test_what_a_decoder_s_text_begins_with():
    for kind in SMALL:
        assert read(small(kind, {"decoder_start_token_id": 7})).start == 7
    for kind in ("marian", "t5"):  # the padding, which is what their decoders were trained on
        assert read(small(kind, {"decoder_start_token_id": None, "pad_token_id": 5})).start == 5
    with pytest.raises(GptcliError, match="decoder_start_token_id: -1 is not a whole number from 0 on"):
        read(small("bart", {"decoder_start_token_id": -1}))


OPUS_SIZES = {"d_model": 512, "max_position_embeddings": 512, "scale_embedding": True, "activation_function": "swish"}
for stack in ("encoder", "decoder"):
    OPUS_SIZES |= {f"{stack}_layers": 6, f"{stack}_ffn_dim": 2048, f"{stack}_attention_heads": 8}
OLD_WORDS = {
    "_num_labels": 3,
    "add_bias_logits": False,
    "add_final_layer_norm": False,
    "classif_dropout": 0.0,
    "encoder_layerdrop": 0.0,
    "forced_eos_token_id": 0,
    "gradient_checkpointing": False,
    "init_std": 0.02,
    "normalize_before": False,
    "num_hidden_layers": 6,
}
# What published files of some models say, the words of their time among it, and their known numbers of parameters.
PUBLISHED = {
    # Two tables of sinusoids are parameters in the library, and the head's bias is none.
    "marian": (
        OLD_WORDS
        | OPUS_SIZES
        | {"normalize_embedding": False, "static_position_embeddings": True, "extra_pos_embeddings": 0}
        | {"vocab_size": 58101, "decoder_vocab_size": 58101, "bad_words_ids": [[58100]], "num_beams": 6},
        74_410_496 - 2 * 512 * 512 + 58101,
    ),
    "bart": (
        OLD_WORDS
        | OPUS_SIZES
        | {"d_model": 768, "encoder_ffn_dim": 3072, "decoder_ffn_dim": 3072, "extra_pos_embeddings": 2}
        | {"encoder_attention_heads": 12, "decoder_attention_heads": 12, "max_position_embeddings": 1024}
        | {"normalize_embedding": True, "scale_embedding": False, "activation_function": "gelu"},
        139_420_416 + 50265,
    ),
    "t5": (
        {"architectures": ["T5ForConditionalGeneration"], "d_ff": 1024, "d_kv": 64, "d_model": 512, "dropout_rate": 0.1}
        | {"feed_forward_proj": "gated-gelu", "initializer_factor": 1.0, "layer_norm_epsilon": 1e-6, "num_layers": 8}
        | {"num_decoder_layers": 8, "num_heads": 6, "output_past": True, "tie_word_embeddings": False}
        | {"n_positions": 512, "task_specific_params": {}, "vocab_size": 32128, "dense_act_fn": "gelu_new"},
        76_961_152,
    ),
}


@pytest.mark.parametrize("kind", PUBLISHED)
def test_published_configs(kind):
    config, size = PUBLISHED[kind]
    found = resolve(config, FAMILIES[kind], "published", "config.json")
    assert not found.unknown
    assert count.total(layout(found.spec)) == size


REFUSED = [
    *[(kind, {"is_encoder_decoder": False}, "is_encoder_decoder: False") for kind in SMALL],
    *[(kind, {"is_decoder": True}, "is_decoder: True") for kind in SMALL],
    *[(kind, {"is_causal": False}, "is_causal: False") for kind in SMALL],
    *[(kind, {"hidden_size": 48}, "hidden_size: 48 contradicts d_model: 24") for kind in SMALL],
    *[(kind, {"tie_word_embeddings": "yes"}, "tie_word_embeddings: 'yes'") for kind in SMALL],
    *[(kind, {"activation_function": "mish"}, "activation_function: 'mish'") for kind in ("marian", "bart")],
    *[(kind, {"normalize_before": True}, "normalize_before: True") for kind in ("marian", "bart")],
    *[(kind, {"add_final_layer_norm": True}, "add_final_layer_norm: True") for kind in ("marian", "bart")],
    *[(kind, {"encoder_attention_heads": 5}, "attention.n_heads: 5") for kind in ("marian", "bart")],
    *[(kind, {"d_model": "wide"}, "d_model: 'wide'") for kind in ("marian", "t5")],
    ("marian", {"normalize_embedding": True}, "normalize_embedding: True"),
    ("marian", {"static_position_embeddings": False}, "static_position_embeddings: False"),
    ("marian", {"share_encoder_decoder_embeddings": "no"}, "share_encoder_decoder_embeddings: 'no'"),
    (
        "marian",
        {"tie_word_embeddings": False, "decoder_vocab_size": 89},
        "decoder_vocab_size: 89 is not vocab_size: 97",
    ),
    ("bart", {"normalize_embedding": False}, "normalize_embedding: False"),
    ("bart", {"static_position_embeddings": True}, "static_position_embeddings: True"),
    ("bart", {"extra_pos_embeddings": 1}, "extra_pos_embeddings: 1"),
    ("t5", {"feed_forward_proj": "gated-mish"}, "feed_forward_proj: 'mish'"),
    ("t5", {"feed_forward_proj": "new-relu"}, "feed_forward_proj: 'new-relu'"),
    ("t5", {"feed_forward_proj": "gated-relu-new"}, "feed_forward_proj: 'gated-relu-new'"),
    ("t5", {"feed_forward_proj": 3}, "feed_forward_proj: 3"),
    ("t5", {"dense_act_fn": "mish"}, "dense_act_fn: 'mish'"),
    ("t5", {"is_gated_act": "yes"}, "mlp.gated: 'yes'"),
    ("t5", {"scale_decoder_outputs": 3}, "scale_decoder_outputs: 3"),
    ("t5", {"relative_attention_num_buckets": 6}, "position.buckets: 6"),
    ("t5", {"relative_attention_max_distance": 4}, "position.max_distance: 4"),
    ("t5", {"num_attention_heads": 2}, "num_attention_heads: 2 contradicts num_heads: 4"),
]


@pytest.mark.parametrize(("kind", "config", "said"), REFUSED, ids=[f"{kind}: {said}" for kind, _, said in REFUSED])
def test_what_is_known_and_not_implemented_is_refused_by_name(kind, config, said):
    with pytest.raises(GptcliError) as caught:
        read(small(kind, config))
    assert said in caught.value.message


def test_general_words_are_the_encoder_s():
    """The library's names for any model mean the encoder's layers and heads here."""
    words = {"d_model": "hidden_size", "encoder_layers": "num_hidden_layers"}
    words |= {"encoder_attention_heads": "num_attention_heads"}
    for kind in ("marian", "bart"):
        config = small(kind)
        assert read({words.get(key, key): value for key, value in config.items()}).spec == read(config).spec
    words = {"d_model": "hidden_size", "num_layers": "num_hidden_layers", "num_heads": "num_attention_heads"}
    config = small("t5")
    assert read({words.get(key, key): value for key, value in config.items()}).spec == read(config).spec


@pytest.mark.parametrize("kind", ["marian", "bart"])
@pytest.mark.parametrize("lengths", [(41, 5), (5, 41)])
def test_no_more_tokens_than_the_context_holds(kind, lengths):
    spec = read(small(kind)).spec
    text, source = (torch.zeros(1, length, dtype=torch.long) for length in lengths)
    with pytest.raises(GptcliError, match="41 tokens are more than the context of 40"):
        forward(Inputs(text, source=Inputs(source)), Weights({}), spec)


SHORT = small("t5", {"n_positions": 12})


@pytest.mark.parametrize("lengths", [(31, 5), (5, 31), (24, 17)])
def test_a_context_that_no_table_ends_bounds_nothing(lengths, tmp_path):
    """Texts and sources beyond n_positions, and beyond the distance from which on all share a bucket (10)."""
    theirs = saved(SHORT, tmp_path)
    inputs = fed(open_model(str(tmp_path)), lengths=lengths)
    with in_float64():
        expected = run_theirs(theirs, inputs).logits
    assert_near(logits_of(tmp_path, inputs), expected, 1e-9)


def test_a_context_that_bounds_nothing_is_told_as_the_config_has_it(tmp_path):
    saved(SHORT, tmp_path)
    [told] = gptcli("inspect", tmp_path, "--json").json["checkpoints"]
    assert told["spec"]["context_length"] == told["spec"]["encoder"]["context_length"] == 12
    assert "relative positions in 8 buckets, context 12" in told["summary"]


READS_LENGTHS = [
    *("params --seq-len 13", "params --seq-len 5 --source-len 13", "params --seq-len 12", "params --memory 1MiB"),
    "lab heads --tokens 13 --source-tokens 14",
]


@pytest.mark.parametrize("words", READS_LENGTHS)
def test_what_costs_are_counted_for_ends_at_no_context_either(words, tmp_path):
    """The context is no size of such a model: all is as in a model whose config has a longer one."""
    found = []
    for name, positions in (("short", 12), ("long", 1000)):
        saved(SHORT | {"n_positions": positions}, tmp_path / name)
        command, options = re.fullmatch("([a-z ]+) (--.*)", words).groups()
        ran = gptcli(*command.split(), tmp_path / name, *options.split(), "--json")
        found.append(ran.json | {"model": None})
    assert found[0] == found[1]


def test_bench_runs_a_text_beyond_such_a_context(tmp_path):
    saved(SHORT, tmp_path)
    assert gptcli("bench", tmp_path, "--seq-len", "20", "--repeat", "1", "--json").json["tokens"] == 20


@pytest.mark.parametrize("name", CASES)
def test_every_point_is_recorded_in_its_shape(name, tmp_path):
    saved(case(name), tmp_path)
    model, recorder = open_model(str(tmp_path)), Recorder("*")
    inputs = fed(model)
    forward(inputs, model.weights(torch.float64, CPU), model.spec, recorder)
    assert list(recorder.kept) == [path for path, _ in points(model.spec)]


# Files


def rewritten(folder: Path, change) -> dict[str, torch.Tensor]:
    """The file's tensors as `change` leaves them, saved again."""
    file = folder / "model.safetensors"
    tensors = change(load_file(file))
    save_file({name: x.contiguous().clone() for name, x in tensors.items()}, file, metadata={"format": "pt"})
    return tensors


def shared_name(tensors: dict) -> str:
    return next(name for name in tensors if name.endswith("shared.weight"))


def copies_of(tensors: dict) -> list[str]:
    """Every other name by which a file may hold the one table."""
    prefix = shared_name(tensors).removesuffix("shared.weight")
    return [f"{prefix}encoder.embed_tokens.weight", f"{prefix}decoder.embed_tokens.weight", "lm_head.weight"]


every_family = pytest.mark.parametrize("kind", SMALL)


@every_family
def test_a_file_may_hold_the_table_by_all_its_names(kind, tmp_path):
    saved(small(kind), tmp_path)
    inputs = fed(open_model(str(tmp_path)))
    before = logits_of(tmp_path, inputs)
    rewritten(tmp_path, lambda held: held | dict.fromkeys(copies_of(held), held[shared_name(held)]))
    model = open_model(str(tmp_path))
    weights = model.weights(torch.float64, CPU)
    assert not model.notes
    assert_same(forward(inputs, weights, model.spec), before)
    assert weights.tensors.keys() == {p.name for p in model.layout if not p.tied_to}  # copies are not kept


@every_family
def test_a_pickle_of_old_days(kind, tmp_path):
    """pytorch_model.bin: the table by four names, tables of positions, and what the library no longer reads."""
    theirs = saved(small(kind), tmp_path)
    inputs = fed(open_model(str(tmp_path)))
    before = logits_of(tmp_path, inputs)
    (tmp_path / "model.safetensors").unlink()
    beside = {
        "bart": {"model.encoder.version": torch.tensor([3.0]), "model.decoder.version": torch.tensor([3.0])},
        "t5": {"decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight": torch.ones(8, 4)},
        "marian": {},
    }[kind]
    torch.save(theirs.state_dict() | beside, tmp_path / "pytorch_model.bin")
    model = open_model(str(tmp_path))
    assert_same(forward(inputs, model.weights(torch.float64, CPU), model.spec), before)
    tables = ["model.decoder.embed_positions.weight", "model.encoder.embed_positions.weight"]
    buffers = {"marian": tables, "bart": sorted(beside), "t5": []}[kind]
    assert sorted(model.checkpoint.binding.buffers) == buffers
    assert model.checkpoint.binding.unused == (list(beside) if kind == "t5" else [])


@every_family
@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_file_may_hold_the_table_by_one_other_name_alone(kind, which, tmp_path):
    saved(small(kind), tmp_path)
    inputs = fed(open_model(str(tmp_path)))
    before = logits_of(tmp_path, inputs)

    def renamed(held):
        name = copies_of(held)[which]
        return {name if old.endswith("shared.weight") else old: x for old, x in held.items()}

    rewritten(tmp_path, renamed)
    assert_same(logits_of(tmp_path, inputs), before)
    assert not open_model(str(tmp_path)).notes


@every_family
def test_no_table_at_all_is_missed_by_all_its_names(kind, tmp_path):
    saved(small(kind), tmp_path)
    rewritten(tmp_path, lambda held: {name: x for name, x in held.items() if not name.endswith("shared.weight")})
    prefix = "" if kind == "t5" else "model."
    with pytest.raises(GptcliError) as caught:
        open_model(str(tmp_path))
    assert (
        f"tensor '{prefix}decoder.embed_tokens.weight' is missing, and so are '{prefix}shared.weight', "
        f"'lm_head.weight', '{prefix}encoder.embed_tokens.weight' (embed.weight [97, 24])"
    ) in caught.value.message


@every_family
def test_another_head_than_the_config_says_is_used_and_said(kind, tmp_path):
    """So does the library: where a file holds two that differ, nothing ties them."""
    saved(small(kind), tmp_path)
    inputs = fed(open_model(str(tmp_path)))
    rewritten(tmp_path, lambda held: held | {"lm_head.weight": held[shared_name(held)].flip(0)})
    model = open_model(str(tmp_path))
    ours = forward(inputs, model.weights(torch.float64, CPU), model.spec)
    said = (
        "the config ties the head, but lm_head.weight in the file differs from the embedding: the file's head is used"
    )
    assert model.notes == [said]
    theirs = AutoModelForSeq2SeqLM.from_pretrained(tmp_path, dtype=torch.float64).eval()
    with in_float64():
        assert_near(ours, run_theirs(theirs, inputs).logits, 1e-6)  # its sinusoids come from float32


@every_family
def test_another_table_of_the_encoder_is_used_and_said(kind, tmp_path):
    saved(small(kind), tmp_path)
    inputs = fed(open_model(str(tmp_path)))
    held = rewritten(tmp_path, lambda held: held | {copies_of(held)[0]: held[shared_name(held)].flip(0)})
    model = open_model(str(tmp_path))
    ours = forward(inputs, model.weights(torch.float64, CPU), model.spec)
    assert model.notes == [
        f"the config ties the encoder table, but {copies_of(held)[0]} in the file differs from the embedding: "
        "the file's encoder table is used"
    ]
    theirs = AutoModelForSeq2SeqLM.from_pretrained(tmp_path, dtype=torch.float64).eval()
    with in_float64():
        assert_near(ours, run_theirs(theirs, inputs).logits, 1e-6)


@every_family
def test_a_table_that_nothing_reads_is_said_to_differ(kind, tmp_path):
    """The decoder reads the one that goes by its own name, in the library too."""
    saved(small(kind), tmp_path)
    inputs = fed(open_model(str(tmp_path)))
    before = logits_of(tmp_path, inputs)

    def change(held):
        name = shared_name(held)
        return held | dict.fromkeys(copies_of(held), held[name]) | {name: held[name] + 1}

    held = rewritten(tmp_path, change)
    model = open_model(str(tmp_path))
    assert_same(forward(inputs, model.weights(torch.float64, CPU), model.spec), before)
    assert model.notes == [f"{shared_name(held)} in the file differs from {copies_of(held)[1]}, which is used"]


@pytest.mark.parametrize("kind", ["marian", "bart"])
def test_an_untied_config_parts_all_tables(kind, tmp_path):
    """The library then ties nothing: neither the head nor the encoder's table, and it reads the shared one nowhere."""
    config = small(kind, {"tie_word_embeddings": False})
    theirs = saved(config, tmp_path)
    model = open_model(str(tmp_path))
    inputs = fed(model)
    with in_float64():
        expected = run_theirs(theirs, inputs).logits
    assert_near(forward(inputs, model.weights(torch.float64, CPU), model.spec), expected, 1e-9)
    names = [f"model.{stack}.embed_tokens.weight" for stack in ("encoder", "decoder")]
    assert model.notes == [f"model.shared.weight in the file differs from {name}, which is used" for name in names]
    # Files of its older versions, which shared the table all the same, hold it once.
    held = rewritten(tmp_path, lambda held: held | dict.fromkeys(names, held["model.shared.weight"]))
    both = logits_of(tmp_path, inputs)
    rewritten(tmp_path, lambda _: {name: x for name, x in held.items() if name not in names})
    assert_same(logits_of(tmp_path, inputs), both)
    rewritten(tmp_path, lambda _: {name: x for name, x in held.items() if name != "lm_head.weight"})
    with pytest.raises(GptcliError, match=r"'lm_head\.weight' is missing"):
        open_model(str(tmp_path))


@pytest.mark.parametrize("kind", ["marian", "bart"])
def test_the_bare_model_s_file(kind, tmp_path):
    """No prefix, and no bias of the head: the library takes zeros."""
    saved(small(kind), tmp_path).base_model.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(small(kind)))
    model = open_model(str(tmp_path))
    assert model.checkpoint.binding.prefix == ""
    assert model.notes == ["final_logits_bias is not in the file: zeros stand for it"]
    inputs = fed(model)
    weights = model.weights(torch.float64, CPU)
    assert torch.equal(weights["lm_head.bias"], torch.zeros(V, dtype=torch.float64))
    theirs = AutoModelForSeq2SeqLM.from_pretrained(tmp_path, dtype=torch.float64).eval()
    with in_float64():
        assert_near(forward(inputs, weights, model.spec), run_theirs(theirs, inputs).logits, 1e-6)


@pytest.mark.parametrize("kind", ["marian", "bart"])
def test_the_head_s_bias_is_a_row(kind, tmp_path):
    saved(small(kind), tmp_path)
    held = load_file(tmp_path / "model.safetensors")["final_logits_bias"]
    assert held.shape == (1, V) and float(held.std()) > 0.1
    model = open_model(str(tmp_path))
    assert torch.equal(model.weights(torch.float64, CPU)["lm_head.bias"], held[0])
    rewritten(tmp_path, lambda tensors: tensors | {"final_logits_bias": held[0]})
    with pytest.raises(GptcliError, match=r"'final_logits_bias' is \[97\], but lm_head.bias needs \[1, 97\]"):
        open_model(str(tmp_path))


def test_a_gated_file_as_the_library_saves_it(tmp_path):
    """Its config then says that the head is tied, though it never was, and has another word for what that changes."""
    theirs = saved(small("t5", {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}), tmp_path)
    theirs.config.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["tie_word_embeddings"] and not written["scale_decoder_outputs"]
    model = open_model(str(tmp_path))
    inputs = fed(model)
    with in_float64():
        expected = run_theirs(theirs, inputs).logits
    assert_near(forward(inputs, model.weights(torch.float64, CPU), model.spec), expected, 1e-9)
    assert [note.partition(",")[0] for note in model.notes] == ["the config ties the head"] and not model.unknown


def test_heads_of_other_tasks_are_set_aside(tmp_path):
    saved(small("bart"), tmp_path)
    inputs = fed(open_model(str(tmp_path)))
    before = logits_of(tmp_path, inputs)
    extra = {"classification_head.dense.weight": torch.ones(24, 24), "qa_outputs.bias": torch.ones(2)}
    rewritten(tmp_path, lambda held: held | extra)
    model = open_model(str(tmp_path))
    assert sorted(model.checkpoint.binding.unused) == sorted(extra)
    assert_same(logits_of(tmp_path, inputs), before)


@every_family
def test_unknown_keys_are_named(kind, tmp_path):
    saved(small(kind), tmp_path)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"warp_factor": 9}))
    assert open_model(str(tmp_path)).unknown == ("warp_factor",)


# Tokenizers

WORDS = {
    "source": "the a cat dog sat on mat ran fast slow house tree river under over with and or not was were is walking",
    "target": "der die das katze hund saß auf matte lief schnell langsam haus baum fluß unter über mit und oder nicht",
}
PIECES = 45
PLAIN, WITH_SPECIAL = Rule(bos=False), Rule(special=True)


@cache
def trained(language: str, **options) -> bytes:
    """A sentencepiece model of a few hundred lines of these words, in random order."""
    draw, words = random.Random(0), WORDS[language].split()
    lines = [" ".join(draw.choices(words, k=draw.randint(3, 9))) + draw.choice([".", "!", "?"]) for _ in range(300)]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, vocab_size=PIECES, minloglevel=2, **options
    )
    return model.getvalue()


def pieces_of(model: bytes) -> list[str]:
    run = sentencepiece.SentencePieceProcessor(model_proto=model)
    return [run.id_to_piece(id_) for id_ in range(run.get_piece_size())]


LANGUAGES = [">>deu<<", ">>fra<<"]
FRAME = ["</s>", "<unk>"]


def numbered(folder: Path, separate: bool = False, **settings) -> MarianTokenizer:
    """source.spm, target.spm and vocab.json, where pieces stand in an order of their own, and some of them don't."""
    found = {}
    for language in WORDS:
        model = trained(language)
        (folder / f"{language}.spm").write_bytes(model)
        found[language] = pieces_of(model)[3:]
        random.Random(1).shuffle(found[language])
    joint = list(dict.fromkeys([*found["target"], *found["source"][:-4]]))
    tables = {"vocab": [*FRAME, *joint, *LANGUAGES, "<pad>"]}
    if separate:
        tables = {"vocab": [*FRAME, *found["source"], *LANGUAGES, "<pad>"], "target_vocab": [*FRAME, *found["target"]]}
        settings |= {"separate_vocabs": True}
    for name, words in tables.items():
        (folder / f"{name}.json").write_text(json.dumps({word: id_ for id_, word in enumerate(words)}))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return MarianTokenizer.from_pretrained(folder)


TEXTS = [
    *(
        "the cat sat on the mat.",
        " the  cat\n sat ",
        "",
        " ",
        "der hund lief über die matte!",
        "２０ ﬁne naïve 日本 ζ 🙂",
    ),
    *(">>deu<< the cat", ">>deu<<the cat", ">>xxx<< the cat", ">>deu<<", ">>deu the", ">><< a", ">>a\nb<< the"),
    *("the >>deu<< cat", " >>deu<< the", ">>deu<<>>fra<< the"),
]


@pytest.mark.parametrize("separate", [False, True])
def test_numbered_pieces_are_transformers_marian(separate, tmp_path):
    theirs = numbered(tmp_path, separate)
    ours = from_files(tmp_path)
    assert isinstance(ours, NumberedSentences) and ours.size == len(theirs)
    for text in TEXTS:
        for tokenizer, ids in ((ours, theirs(text)["input_ids"]), (ours.target, theirs(text_target=text)["input_ids"])):
            encoded = tokenizer.marked(text)
            assert encoded.ids == ids
            assert [id_ for id_, added in zip(*encoded) if added] == [0]
            assert tokenizer.encode(text, PLAIN) == ids[:-1]
    for text in ("a</s>b", "<unk> z", "the <pad>cat", "<pad> >>deu<< cat", "<pad>>>deu<< cat", "</s>"):
        assert ours.encode(text, WITH_SPECIAL) == theirs(text)["input_ids"]
        assert set(ours.encode(text)) & {0, ours.size - 1} == {0}  # the one at the end
    words = json.loads((tmp_path / "vocab.json").read_text())
    for word, id_ in words.items():
        assert visible(ours.piece(id_)) == word.replace("▁", "␣")
    assert ours.piece(len(words)) is None and ours.piece(-1) is None
    assert ours.find("the") == ours.find(" the") == words["▁the"] and ours.unknown == 1
    assert ours.find(">>fra<<") == words[">>fra<<"]
    assert ours.target.target is ours.target and ours.target.find("hund") != ours.unknown
    with pytest.raises(GptcliError, match=r"--bos: source\.spm names no BOS"):
        ours.encode("the", Rule(bos=True))


def test_numbered_pieces_as_the_library_saves_them(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    numbered(first, source_lang="en", target_lang="de").save_pretrained(second)
    (second / "config.json").write_text(json.dumps(small("marian")))
    theirs = AutoTokenizer.from_pretrained(second)
    assert isinstance(theirs, MarianTokenizer)
    assert [from_files(second).encode(text) for text in TEXTS] == [theirs(text)["input_ids"] for text in TEXTS]


def test_other_words_than_usual_end_a_text_and_stand_for_what_is_unknown(tmp_path):
    numbered(tmp_path)
    words = json.loads((tmp_path / "vocab.json").read_text())
    words |= {"<end>": words.pop("</s>"), "<what>": words.pop("<unk>")}
    (tmp_path / "vocab.json").write_text(json.dumps(words))
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "<end>", "unk_token": "<what>"}')
    theirs, ours = MarianTokenizer.from_pretrained(tmp_path), from_files(tmp_path)
    for text in TEXTS:
        assert ours.encode(text) == theirs(text)["input_ids"]
    assert ours.encode("ζ<end>", WITH_SPECIAL) == theirs("ζ<end>")["input_ids"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"</s>": None}, r"vocab\.json: '</s>' is not in it \(eos_token\)"),
        ({"<unk>": None}, r"vocab\.json: '<unk>' is not in it \(unk_token\)"),
        ({"▁the": "5"}, r"vocab\.json: not a table of words and their ids"),
        ({"▁the": -1}, r"vocab\.json: not a table of words and their ids"),
    ],
)
def test_a_broken_vocabulary_is_one_error(change, said, tmp_path):
    numbered(tmp_path)
    words = json.loads((tmp_path / "vocab.json").read_text()) | change
    (tmp_path / "vocab.json").write_text(json.dumps({word: id_ for word, id_ in words.items() if id_ is not None}))
    with pytest.raises(GptcliError, match=said):
        from_files(tmp_path)


def test_a_vocabulary_of_the_target_that_is_lost(tmp_path):
    numbered(tmp_path, separate=True)
    (tmp_path / "target_vocab.json").unlink()
    with pytest.raises(GptcliError, match=r"target_vocab\.json: No such file"):
        from_files(tmp_path)


def test_a_broken_model_of_the_target_is_named(tmp_path):
    numbered(tmp_path)
    (tmp_path / "target.spm").write_bytes(b"no model")
    with pytest.raises(GptcliError, match=r"target\.spm: not a model of sentencepiece"):
        from_files(tmp_path)


OLD_PIECES = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1, "normalization_rule_name": "identity"}


def spiece(folder: Path, **settings) -> T5Tokenizer:
    """A directory with spiece.model, and the library's tokenizer of the same pieces."""
    model = trained("source", **OLD_PIECES)
    (folder / "spiece.model").write_bytes(model)
    if settings:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    run = sentencepiece.SentencePieceProcessor(model_proto=model)
    scored = [(piece, run.get_score(id_)) for id_, piece in enumerate(pieces_of(model))]
    return T5Tokenizer(**T5Converter.convert_from_spm(vocab=scored, **settings))


@pytest.mark.parametrize("settings", [{}, {"extra_ids": 100}, {"extra_ids": 7}, {"extra_ids": 0}])
def test_spiece_model_is_transformers_t5(settings, tmp_path):
    """An end after each text, and words for gaps that have the last ids, the first of them the very last."""
    theirs = spiece(tmp_path, **settings)
    ours = from_files(tmp_path)
    assert isinstance(ours, Sentences) and ours.size == len(theirs) == PIECES + settings.get("extra_ids", 100)
    for text in ("the cat sat on the mat.", " the  cat ", "", "ζ dog 日本"):
        assert ours.encode(text) == theirs(text)["input_ids"]
        assert ours.marked(text).added == [False] * (len(ours.encode(text)) - 1) + [True]
    for text in ("the <extra_id_0> sat <extra_id_1>", "a<extra_id_6>b", "x</s>y"):
        if settings.get("extra_ids") != 0:
            assert ours.encode(text, WITH_SPECIAL) == theirs(text)["input_ids"]
        assert max(ours.encode(text)) < PIECES
    if ours.size > PIECES:
        assert ours.piece(ours.size - 1) == b"<extra_id_0>"
    assert ours.piece(ours.size) is None and ours.piece(1) == b"</s>"
    with pytest.raises(GptcliError, match=r"--bos: spiece\.model names no BOS"):
        ours.encode("the", Rule(bos=True))


def test_a_table_of_ids_goes_before_their_number(tmp_path):
    flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
    table = {str(PIECES + i): flags | {"content": f"<extra_id_{99 - i}>"} for i in range(100)}
    theirs = spiece(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": table, "extra_ids": 100}))
    text = "the <extra_id_0> sat <extra_id_99>"
    ours = from_files(tmp_path)
    assert ours.size == PIECES + 100 and ours.encode(text, WITH_SPECIAL) == theirs(text)["input_ids"]


def test_the_newer_file_of_the_same_pieces(tmp_path):
    """tokenizer.json beside spiece.model says the same."""
    theirs = spiece(tmp_path)
    texts = ["the cat sat on the mat.", " the  cat ", "", "ζ dog 日本", "the cat\nsat"]
    by_pieces = [from_files(tmp_path).encode(text) for text in texts[:-1]]
    theirs.save_pretrained(tmp_path)
    ours = from_files(tmp_path)
    assert isinstance(ours, Library)
    assert [ours.encode(text) for text in texts] == [theirs(text)["input_ids"] for text in texts]
    assert [ours.encode(text) for text in texts[:-1]] == by_pieces
    text = "the <extra_id_0> sat"
    assert ours.encode(text, WITH_SPECIAL) == theirs(text)["input_ids"]


def byte_pairs(folder: Path) -> None:
    """vocab.json and merges.txt of bytes, in no order that GPT-2's have, after five special words."""
    from tokenizers import ByteLevelBPETokenizer

    trainer = ByteLevelBPETokenizer()
    lines = [line for words in WORDS.values() for line in [words, " ".join(reversed(words.split()))]]
    trainer.train_from_iterator(lines, 330, show_progress=False)
    trainer.save_model(str(folder))
    words = sorted(json.loads((folder / "vocab.json").read_text()), key=lambda word: (len(word), word))
    words = ["<s>", "<pad>", "</s>", "<unk>", *words, "<mask>"]
    (folder / "vocab.json").write_text(json.dumps({word: id_ for id_, word in enumerate(words)}))


NAMED = {"bos_token": "<s>", "eos_token": "</s>", "cls_token": "<s>", "sep_token": "</s>", "mask_token": "<mask>"}
NAMED |= {"unk_token": "<unk>", "pad_token": "<pad>"}


@pytest.mark.parametrize("written", ["special_tokens_map.json", "tokenizer_config.json"])
@pytest.mark.parametrize("stripping", [False, True])
def test_byte_pairs_in_two_files_are_framed(written, stripping, tmp_path):
    """By the tokens that a class is told by and that part two texts, as the library does for models that have them."""
    byte_pairs(tmp_path)
    mask = {"content": "<mask>", "lstrip": True, "normalized": False, "rstrip": False, "single_word": False}
    mask |= {"__type": "AddedToken"} if written == "tokenizer_config.json" else {}
    (tmp_path / written).write_text(json.dumps(NAMED | ({"mask_token": mask} if stripping else {})))
    (tmp_path / "config.json").write_text(json.dumps(small("bart")))
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), from_files(tmp_path)
    assert isinstance(theirs, RobertaTokenizer)
    for text in ("the cat sat", " the  cat\n sat ", "", "naïve 日本 <s>"):
        encoded = ours.marked(text)
        assert ours.encode(text, WITH_SPECIAL) == theirs(text)["input_ids"]
        assert [id_ for id_, added in zip(*encoded) if added] == [0, 2]
        assert ours.encode(text, PLAIN) == encoded.ids[1:-1]
    assert ours.encode("the <mask> sat", WITH_SPECIAL) == theirs("the <mask> sat")["input_ids"]
    assert ours.encode("the cat", Rule(bos=True)) == theirs("the cat")["input_ids"]  # a BOS is there once


def test_settings_that_say_what_to_add_go_before(tmp_path):
    byte_pairs(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(NAMED | {"add_bos_token": False}))
    assert from_files(tmp_path).marked("the cat").added.count(True) == 0
