"""What a family's record is made of, and how a config.json is read by it.

A template has the shape of a YAML config with a Key (or a From) wherever the config has a word to say. A config key is
consumed by the template, irrelevant to the forward pass, or listed in `fixed` with the only values that are
implemented; any other is unknown, and reported.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import field, replace
from typing import Any, Literal, NamedTuple

from gptcli.data import data
from gptcli.errors import GptcliError
from gptcli.spec import DynamicScaling, Rope, Spec, SpecError, YarnScaling, read_spec, show

REQUIRED = object()
Get = Callable[..., Any]  # a config's `get`: get(key, default)


class Key(NamedTuple):
    """A value of the Spec that one config key decides.

    default: what the family takes where the key is absent or null (a function of the config's get, or a value);
    reads: values translated, by a table or a function.
    """

    name: str
    default: Any = REQUIRED
    reads: Mapping | Callable[[Any], Any] | None = None


class From(NamedTuple):
    """A value of the Spec that several config keys decide: make(get) → the value, or a template of it."""

    keys: tuple[str, ...]
    make: Callable[[Get], Any]


class Stored(NamedTuple):
    """A checkpoint's name for one of our stems, or for several that it keeps fused in one tensor.

    `#` stands for the layer and `@` for the expert (or head); a name without the stem's `@` is one tensor of all of
    them, stacked along its first axis. transposed: matrices lie [in, out]. fused: several stems follow one another
    (`blocks`), follow one another within each head (`heads`), or take turns row by row (`turns`). leaves: what ends the
    names of a weight and of a bias. outside: the family's prefix does not apply. row: a vector lies as the one row of a
    matrix. absent: a file without it is refused, or means `zeros`. paired: the two rows of a head that turn together
    lie side by side, where ours lie half a head apart. plus: what was added to the weights for the file.
    """

    name: str
    transposed: bool = False
    fused: Literal["blocks", "heads", "turns"] = "blocks"
    leaves: tuple[str, str] = (".weight", ".bias")
    outside: bool = False
    row: bool = False
    absent: Literal["refused", "zeros"] = "refused"
    paired: bool = False
    plus: float = 0.0


@data
class Family:
    """names: our stem (or whole name), or a tuple of stems fused in one tensor, to Stored. others: where other files of
    this family differ, each set laid over `names`; a file's own set is the one of which most is found. copies: where a
    file may hold a stem's weight once more, or in the place of its own name.
    defaults: what the library takes for a config key that is absent (null is not absent).

    fixed: config keys that change the forward pass, each with the values that are implemented. aliases: other words for
    a config key. inside: the key of the config that holds the language model's own; what is absent there may stand
    beside it. prefixes: what may stand before every stored name; buffers: patterns of stored tensors that are no
    weights; unused: patterns of weights that another part of the model reads; start: the id that the text of a decoder
    beside an encoder begins with.
    """

    template: dict[str, Any] = field(default_factory=dict)
    defaults: dict[str, Any] = field(default_factory=dict)
    fixed: dict[str, tuple] = field(default_factory=dict)
    irrelevant: tuple[str, ...] = ()
    aliases: dict[str, str] = field(default_factory=dict)
    inside: str = ""
    names: dict[str | tuple[str, ...], Stored] = field(default_factory=dict)
    others: tuple[dict[str | tuple[str, ...], Stored], ...] = ()
    copies: dict[str, tuple[Stored, ...]] = field(default_factory=dict)
    prefixes: tuple[str, ...] = ("",)
    buffers: tuple[str, ...] = ()
    unused: tuple[str, ...] = ()
    start: Key | None = None


# Keys that change the forward pass of any family, and the values of them that are implemented.
FIXED = {"is_causal": (True,), "per_layer_config": ({},)}

# Keys that change nothing in a forward pass: training, generation, bookkeeping, and how the weights are packed, which
# checkpoint/packed.py reads.
IRRELEVANT = frozenset(
    """
    _attn_implementation _commit_hash _name_or_path architectures attention_dropout attn_pdrop auto_map
    bad_words_ids begin_suppress_tokens bos_token_id cache_implementation chunk_size_feed_forward
    classifier_dropout compression_config cross_attention_hidden_size decoder_start_token_id diversity_penalty do_sample
    dtype early_stopping embd_pdrop encoder_no_repeat_ngram_size eos_token_id exponential_decay_length_penalty
    finetuning_task forced_bos_token_id forced_eos_token_id gradient_checkpointing hidden_dropout id2label
    initializer_range is_decoder is_encoder_decoder keys_to_ignore_at_inference label2id length_penalty
    max_length min_length model_type n_ctx no_repeat_ngram_size num_beam_groups num_beams num_labels
    num_return_sequences output_attentions output_hidden_states output_past output_scores pad_token_id prefix
    pretraining_tp problem_type pruned_heads quantization_config remove_invalid_values reorder_and_upcast_attn
    repetition_penalty
    resid_pdrop return_dict return_dict_in_generate sep_token_id summary_activation summary_first_dropout
    summary_proj_to_labels summary_type summary_use_proj suppress_tokens task_specific_params temperature
    tf_legacy_loss tie_encoder_decoder tokenizer_class top_k top_p torch_dtype torchscript transformers_version
    typical_p unk_token_id use_bfloat16 use_cache
    """.split()
)

ACTIVATIONS = {
    "relu": "relu",
    "relu2": "relu_squared",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "quick_gelu": "gelu_sigmoid",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
}


class Origin(NamedTuple):
    """Where a value of the Spec comes from.

    kind: the file says it (`config`), or says what it follows from (`derived`); the file is silent and the family has a
    `default`; or it is so in all models of the `family`. keys: the config's, in the file's own words.
    """

    kind: Literal["config", "derived", "default", "family"]
    keys: tuple[str, ...] = ()


class Resolved(NamedTuple):
    """A Spec read from a config.json, and the keys of it that nobody knows.

    start: the id that the decoder's text begins with, beside an encoder.
    """

    spec: Spec
    unknown: tuple[str, ...]
    start: int | None = None


class Explained(NamedTuple):
    """A Spec read from a config.json, the keys of it that nobody knows, and where the values come from.

    start: as in Resolved; origins: by a value's path or by that of the part that holds it (`position`); idle: keys that
    change nothing in a forward pass; checked: keys that would, and have a value that is implemented.
    """

    spec: Spec
    unknown: tuple[str, ...]
    start: int | None
    origins: dict[str, Origin]
    idle: tuple[str, ...]
    checked: tuple[str, ...]


def resolve(config: dict[str, Any], family: Family, name: str, where: str) -> Resolved:
    """The Spec that a config.json describes. Raises GptcliError naming the key at fault."""
    return Resolved(*explain(config, family, name, where)[:3])


def explain(config: dict[str, Any], family: Family, name: str, where: str) -> Explained:
    """The Spec that a config.json describes, value by value. Raises GptcliError naming the key at fault."""
    inner, outer = config, {}
    if family.inside:
        inner, outer = config.get(family.inside), {k: v for k, v in config.items() if k != family.inside}
        if not isinstance(inner, dict):
            raise GptcliError(f"{where}: {family.inside}: missing", "it holds the language model's settings", "config")
        config = outer | inner
    written, fixed = _in_own_words(config, family, where), FIXED | family.fixed
    config = family.defaults | written
    for key, allowed in fixed.items():
        if config.get(key) is not None and config[key] not in allowed:
            raise GptcliError(
                f"{where}: {key}: {show(config[key])} changes the forward pass and is not implemented",
                f"{key}: {' or '.join(show(value) for value in allowed)} is",
                "config",
            )
    words = {key: word for word, key in family.aliases.items() if word in inner | outer}
    filling = _Filling(config, written, words, set(_single_keys(family.template)))
    try:
        stated = read_spec({"name": name} | filling.fill(family.template))
        start = filling.fill(family.start, made=True)
        start = None if start is None else whole(start, family.start.name, least=0)
        filling.origins.pop("", None)  # no value of the Spec
        spec, consumed, origins = _as_far_as_it_reaches(stated), filling.consumed, filling.origins
        if spec.context_length != stated.context_length:
            origins["context_length"] = Origin("derived", origins.get("position", Origin("family")).keys)
        for key in sorted(consumed & set(inner) & set(outer)):
            said = f"{key}: {show(outer[key])} contradicts {family.inside}.{key}: {show(inner[key])}"
            require_key(outer[key] == inner[key], said)
    except SpecError as error:
        raise SpecError(f"{where}: {error.message}", error.hint, error.code) from None
    idle = (IRRELEVANT | set(family.irrelevant)) - consumed - set(fixed)
    known = consumed | idle | set(fixed)
    return Explained(
        spec,
        tuple(key for key in written if key not in known),
        start,
        origins,
        tuple(key for key in written if key in idle),
        tuple(key for key in written if key in fixed),
    )


def _in_own_words(config: dict[str, Any], family: Family, where: str) -> dict[str, Any]:
    """The config with every alias replaced. Raises GptcliError where two words for one thing differ."""
    for word, key in family.aliases.items():
        if word in config and config.get(key, config[word]) != config[word]:
            said = f"{word}: {show(config[word])} contradicts {key}: {show(config[key])}"
            raise GptcliError(f"{where}: {said}", "they are two words for one thing: leave one out", "config")
    return {family.aliases.get(key, key): value for key, value in config.items()}


class _Filling:
    """A template in the making: every Key and From replaced by what the config says, or by the family's default.

    config: the defaults and over them what the file has `written`; words: what the file calls a key, where that is not
    the key itself; single: keys that decide a value by themselves. Gathers the keys that are consumed, and where each
    value comes from.
    """

    def __init__(self, config: dict[str, Any], written: dict[str, Any], words: dict[str, str], single: set[str]):
        self.written, self.words, self.single = written, words, single
        self.consumed: set[str] = set()
        self.origins: dict[str, Origin] = {}
        self.get = getter(config)

    def fill(self, template: Any, path: str = "", made: bool = False) -> Any:
        """The template of the value at this path, filled in. made: by a From, which has told where it comes from."""
        if isinstance(template, dict):
            return {f: self.fill(value, f"{path}.{f}" if path else f, made) for f, value in template.items()}
        if isinstance(template, list):
            return [self.fill(value, f"{path}.{i}", made) for i, value in enumerate(template)]
        if isinstance(template, From):
            self.consumed.update(template.keys)
            asked: dict[str, None] = {}
            value = template.make(self._listening(asked))
            self.origins[path] = self._origin(template.keys, asked, part=isinstance(value, (dict, list)))
            return self.fill(value, path, made=True)
        if isinstance(template, Key):
            return self._value(template, path)
        if not made:
            self.origins[path] = Origin("family")
        return template

    def _value(self, key: Key, path: str) -> Any:
        self.consumed.add(key.name)
        asked: dict[str, None] = {key.name: None}
        value = self.get(key.name)
        if value is None:
            require_key(key.default is not REQUIRED, f"{key.name}: missing")
            value = key.default(self._listening(asked)) if callable(key.default) else key.default
        self.origins[path] = self._origin((key.name,), asked)
        if isinstance(key.reads, Mapping):
            known = ", ".join(str(word) for word in key.reads)
            listed = isinstance(value, (str, bool, int)) and value in key.reads
            require_key(listed, f"{key.name}: {show(value)} is not implemented (known: {known})")
            return key.reads[value]
        return key.reads(value) if key.reads else value

    def _listening(self, asked: dict[str, None]) -> Get:
        """The config's get, which notes what it is asked."""

        def get(key: str, default: Any = None) -> Any:
            asked[key] = None
            return self.get(key, default)

        return get

    def _origin(self, own: tuple[str, ...], asked: Iterable[str], part: bool = False) -> Origin:
        """own: the keys that decide; asked: all that were looked at.

        A part is not decided by keys that decide a value elsewhere (a head's size, beside a rotation), nor by others.
        """
        said = [key for key in asked if self.written.get(key) is not None]
        own = tuple(key for key in own if key not in self.single) if part else own
        decisive = [key for key in said if key in own]
        if decisive or (said and not part):
            return Origin("config" if decisive else "derived", tuple(self.words.get(k, k) for k in decisive or said))
        return Origin("default", own)


def _single_keys(template: Any) -> Iterator[str]:
    """The keys that decide a value of the template by themselves."""
    if isinstance(template, dict):
        for value in template.values():
            yield from _single_keys(value)
    elif isinstance(template, Key):
        yield template.name
    elif isinstance(template, From) and len(template.keys) == 1:
        yield template.keys[0]


def getter(config: dict[str, Any]) -> Get:
    """config.get, for which null is absent."""

    def get(key: str, default: Any = None) -> Any:
        value = config.get(key)
        return default if value is None else value

    return get


def require_key(condition: bool, message: str) -> None:
    if not condition:
        raise SpecError(message, code="config")


# What families share: rotation, windows by layer, head size.

ROPE_KEYS = (
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "partial_rotary_factor",
    "original_max_position_embeddings",
)
# Words inside a rope_scaling or rope_parameters table.
ROPE_WORDS = frozenset(
    """
    type rope_type rope_theta partial_rotary_factor factor low_freq_factor high_freq_factor short_factor long_factor
    original_max_position_embeddings beta_fast beta_slow attention_factor mscale mscale_all_dim truncate finetuned
    """.split()
)
# A table's rope_type, and our kind of it.
ROPE_TYPES = {
    "default": "none",
    "linear": "linear",
    "dynamic": "dynamic",
    "llama3": "llama3",
    "yarn": "yarn",
    "longrope": "longrope",
    "su": "longrope",
}


def whole(value: Any, key: str, least: int = 1) -> int:
    """A config's whole number, for arithmetic on it."""
    require_key(type(value) is int and value >= least, f"{key}: {show(value)} is not a whole number from {least} on")
    return value


def number(value: Any, key: str) -> float:
    """A config's number, for arithmetic on it."""
    require_key(type(value) in (int, float), f"{key}: {show(value)} is not a number")
    return float(value)


def head_dim(get: Get, heads: str = "num_attention_heads", size: str = "hidden_size") -> int:
    """The config's own word, else hidden size / heads."""
    if get("head_dim") is not None:
        return whole(get("head_dim"), "head_dim")
    return whole(get(size), size) // whole(get(heads), heads)


def rope(
    get: Get,
    layer_type: str = "",
    theta: float = 10_000.0,
    partial: float | None = None,
    pairs: str = "halves",
    size: Callable[[Get], int] = head_dim,
    types: Mapping[str, str] = ROPE_TYPES,
) -> dict[str, Any]:
    """The rotation that a config describes: `rope_theta`, `rope_scaling` (type or rope_type), `rope_parameters`, or
    these by layer type. theta and partial: the family's defaults (no partial: its heads always turn whole); size: the
    head size; types: the kinds that the family knows. Raises SpecError for another kind and for an unknown word.
    """
    name = "rope_scaling" if get("rope_scaling") else "rope_parameters"
    table = get(name) or {}
    require_key(isinstance(table, dict), f"{name}: {show(table)} is not a table")
    if any(isinstance(value, dict) for value in table.values()):
        flat = [word for word, value in table.items() if not isinstance(value, dict | None)]
        require_key(not flat, f"{name}.{', '.join(map(str, flat))}: stands among tables by layer type")
        require_key(layer_type != "", f"{name}: by layer type is not implemented here (all layers turn alike)")
        name, table = f"{name}.{layer_type}", table.get(layer_type) or {}
    unknown = [word for word in table if word not in ROPE_WORDS]
    require_key(not unknown, f"{name}.{', '.join(map(str, unknown))}: not implemented")
    say = getter(table)
    share = say("partial_rotary_factor", get("partial_rotary_factor", 1.0 if partial is None else partial))
    share = number(share, "partial_rotary_factor")
    require_key(partial is not None or share == 1, f"partial_rotary_factor: {share} is not implemented here (1 is)")
    turning = int(size(get) * share)
    if turning == 0:
        return {"kind": "none"}
    return {
        "kind": "rope",
        "theta": say("rope_theta", get("rope_theta", theta)),
        "pairs": pairs,
        "rotary_dim": None if turning == size(get) else turning,
        "scaling": _scaling(say, get, name, types),
    }


LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})


def rope_scaling(get: Get) -> dict[str, Any]:
    """The config's table of that name, empty where there is none."""
    scaling = get("rope_scaling", {})
    require_key(isinstance(scaling, dict), f"rope_scaling: {show(scaling)} is not a table")
    return scaling


def turning(layer_type: str, base: str, scaling: Callable[[Get], dict[str, Any]] = lambda get: {}) -> From:
    """The rotation of one kind of layer: what rope_parameters says of it, a table for each kind; in older configs
    `base` holds its theta, and `scaling` is what changes its frequencies.
    """

    def make(get: Get) -> dict[str, Any]:
        tables = get("rope_parameters", {})
        known = isinstance(tables, dict) and set(tables) <= LAYER_TYPES
        nested = known and all(isinstance(table, dict | None) for table in tables.values())
        require_key(nested, f"rope_parameters: {show(tables)} is not a table for each layer type")
        table = (tables.get(layer_type) or {}) | scaling(get)
        require_key("rope_theta" in table or get(base) is not None, f"{base}: missing")
        keys = ("head_dim", "hidden_size", "num_attention_heads", "max_position_embeddings", "partial_rotary_factor")
        return rope(getter({key: get(key) for key in keys} | {"rope_parameters": table, "rope_theta": get(base)}))

    return From(("rope_parameters", "rope_scaling", "partial_rotary_factor", base), make)


def _scaling(say: Get, get: Get, table: str, types: Mapping[str, str]) -> dict[str, Any]:
    """How a table changes the frequencies. Raises SpecError where a word is missing that its kind can't do without."""
    import math

    def asked(word: str) -> Any:
        require_key(say(word) is not None, f"{table}.{word}: missing")
        return say(word)

    said = "type" if say("rope_type") is None else "rope_type"
    kind = types.get(say(said, "default")) if isinstance(say(said, "default"), str) else None
    known = ", ".join(types)
    require_key(kind is not None, f"{table}.{said}: {show(say(said))} is not implemented (known: {known})")
    if kind in ("none", "linear"):
        return {"kind": kind} if kind == "none" else {"kind": kind, "factor": asked("factor")}
    context, key = get("max_position_embeddings"), "original_max_position_embeddings"
    if kind == "dynamic":
        original = whole(context, "max_position_embeddings")
        return {"kind": kind, "factor": asked("factor"), "original_context": original}
    original = whole(get(key, say(key, context)), key, least=2)
    if kind == "llama3":
        marks = {word: asked(word) for word in ("factor", "low_freq_factor", "high_freq_factor")}
        return {"kind": kind, **marks, "original_context": original}
    factor, attention = say("factor"), say("attention_factor")
    if factor is None:
        factor = whole(context, "max_position_embeddings") / original
    factor = number(factor, f"{table}.factor")
    if kind == "longrope":
        if attention is None:
            attention = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
        sets = {"short_factors": asked("short_factor"), "long_factors": asked("long_factor")}
        return {"kind": kind, **sets, "original_context": original, "attention_factor": attention}

    def magnitude(word: str) -> float:
        return 0.1 * number(say(word), f"{table}.{word}") * math.log(factor) + 1.0 if factor > 1 else 1.0

    if attention is None and say("mscale") and say("mscale_all_dim"):
        attention = magnitude("mscale") / magnitude("mscale_all_dim")
    betas = {"beta_fast": say("beta_fast") or 32.0, "beta_slow": say("beta_slow") or 1.0}
    rest = {"attention_factor": attention, "truncate": say("truncate", True)}
    return {"kind": kind, "factor": factor, "original_context": original, **betas, **rest}


def _as_far_as_it_reaches(spec: Spec) -> Spec:
    """The Spec with the context that its rotation was stretched to: configs often keep the trained one beside a scaling
    that says how much longer texts may be.
    """
    positions = (spec.position, *(variant.position for variant in spec.variants))
    scalings = [part.scaling for part in positions if isinstance(part, Rope)]
    reach = [int(s.factor * s.original_context) for s in scalings if isinstance(s, DynamicScaling | YarnScaling)]
    return replace(spec, context_length=max(spec.context_length, *reach)) if reach else spec


def windows(
    get: Get, window: int | None, sliding: Callable[[int], bool], layers: str = "num_hidden_layers"
) -> list[int]:
    """The layers (from 0) that see a window: what `layer_types` says, else the family's rule `sliding(layer)`."""
    types, number = get("layer_types"), whole(get(layers), layers)
    if types is None:
        return [] if window is None else [i for i in range(number) if sliding(i)]
    require_key(isinstance(types, list) and len(types) >= number, "layer_types: not a word for every layer")
    for word in types:
        listed, known = isinstance(word, str) and word in LAYER_TYPES, ", ".join(sorted(LAYER_TYPES))
        require_key(listed, f"layer_types: {show(word)} is not implemented (known: {known})")
    found = [i for i in range(number) if types[i] == "sliding_attention"]
    require_key(window is not None or not found, "layer_types: sliding_attention, but no sliding_window is in use")
    return found


def windowed(layers: list[int], window: int | None, **others: Any) -> list[dict[str, Any]]:
    """The variant of the layers that see a window; others: what else is theirs."""
    return [{"layers": layers, "attention": {"window": window}, **others}] if layers else []
