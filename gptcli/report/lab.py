"""`lab`: what each experiment found, as plain data. How it is found stands in gptcli/lab/, a room an experiment.

Letters as everywhere: T queries, S keys, C hidden size, H heads, G key/value heads, D head size.
"""

from typing import ClassVar, Literal

from gptcli.data import data, entry, mutable
from gptcli.report import ModelFacts, Report
from gptcli.tokens import Token

Rows = list[list[float]]
Placement = Literal["pre", "post", "output", "sandwich"]

# Each experiment, which is a command called so, and what it shows.
EXPERIMENTS = {
    "attention": "attention in six steps, each matrix shown: project, score, scale, mask, softmax, sum",
    "order": "without mask and positions, permuting the inputs only permutes the outputs",
    "positions": "a learned table beside rotation: what tells attention where a word stands",
    "scaling": "why scores are divided by √d: their spread, and what the softmax lets through",
    "norms": "LayerNorm step by step, RMSNorm beside it",
    "residual": "how the residual stream's size moves over the layers, normed before or after",
    "heads": "what many heads cost, and what they don't",
    "routes": "who may see whom: an encoder, a decoder, and both together",
}


@entry
class Experiment:
    """name: the command; about: what it shows."""

    name: str
    about: str


@mutable
class ExperimentsReport(Report):
    schema = "gptcli.lab/1"
    experiments: list[Experiment]


def experiments_report() -> ExperimentsReport:
    """The experiments that there are, in the order of the documents that they come from."""
    return ExperimentsReport(experiments=[Experiment(*one) for one in EXPERIMENTS.items()])


@mutable
class LabReport(Report):
    """The base of every experiment's report. see: the one line of what to see, true of the numbers of this run."""

    see: str


@data
class Matrix:
    """values: its rows, −∞ where a mask hides; None where they are too many to show.

    formula: how it comes about; path: the activation or the weight that it is; labels: of its rows, where they are
    positions.
    """

    name: str
    formula: str
    path: str
    shape: list[int]
    values: Rows | None
    labels: list[str]


@data
class Step:
    """One of the six steps, counted from 1."""

    number: int
    name: str
    matrices: list[Matrix]


@mutable
class AttentionReport(LabReport):
    """One head of one layer. given: what it reads, and the weights that project it, [in, out] as the documents do.

    kernel: what gave the last matrix; gap: the largest |weights @ V − the last matrix|. hidden: pairs of a query and a
    key that the mask hides. layer_index and head count from 0.
    """

    schema = "gptcli.lab.attention/1"
    model: ModelFacts
    tokens: list[list[Token]]
    both_ways: bool
    layer_index: int
    n_layers: int
    head: int
    kv_head: int
    n_heads: int
    given: list[Matrix]
    steps: list[Step]
    hidden: int
    pairs: int
    kernel: str
    gap: float


@mutable
class OrderReport(LabReport):
    """Attention's output [T, C] for the words, for the words permuted, and the latter with the permutation undone.

    permutation[i] is where the word that now stands at i stood. inputs: the words' vectors, positions added where a
    table tells them; difference: the largest |outputs − undone|, at the word `worst` (a place in the text).
    """

    schema = "gptcli.lab.order/1"
    words: list[str]
    permutation: list[int]
    seed: int
    causal: bool
    position: Literal["none", "rope", "learned"]
    inputs: Rows
    outputs: Rows
    permuted: Rows
    undone: Rows
    difference: float
    worst: int


@data
class Placed:
    """A text with its places told: learned, the inputs [T, 2] (None: the table has not as many rows); rotated, the
    scores [T, T] of every query for every key.
    """

    words: list[str]
    first_position: int
    learned: Rows | None
    rotated: Rows


@data
class Look:
    """The rotated score of one word for another that stands `distance` places to its right (negative: to its left)."""

    query: str
    key: str
    distance: int
    score: float


@mutable
class PositionsReport(LabReport):
    """Learned positions and rotation on words of two numbers.

    plain: the text where it begins at position 0; reversed: its words the other way round; shifted: the text moved
    along. looks: the first word at the last one, to the right and, in the reversed text, to the left. moved: the
    largest change of a rotated score by the shift.
    """

    schema = "gptcli.lab.positions/1"
    degrees: float
    shift: int
    vectors: dict[str, list[float]]
    learned_table: Rows
    plain: Placed
    reversed: Placed
    shifted: Placed
    looks: list[Look]
    moved: float


@data
class Spread:
    """Standard deviations of q·k for vectors of that many numbers, beside the root, and of q·k divided by it."""

    dim: int
    root: float
    measured: float
    divided: float


@data
class Sharpness:
    """A softmax: scores as it reads them, its weights, and how each weight answers its own score (∂pᵢ/∂sᵢ)."""

    divisor: float
    scores: list[float]
    weights: list[float]
    gradients: list[float]


@mutable
class ScalingReport(LabReport):
    """samples: pairs of vectors of N(0, 1) that each spread is measured on."""

    schema = "gptcli.lab.scaling/1"
    samples: int
    seed: int
    divide_dim: int
    spreads: list[Spread]
    raw: Sharpness
    divided: Sharpness


@data
class NormSteps:
    """A norm taken apart. deviations: x less its mean (of an RMSNorm: x itself); mean_square: of the deviations;
    divisor: √(mean_square + eps); gap: the largest |result − the engine's|.
    """

    kind: Literal["layernorm", "rmsnorm"]
    mean: float | None
    deviations: list[float]
    mean_square: float
    divisor: float
    normalised: list[float]
    result: list[float]
    engine: list[float]
    gap: float


@mutable
class NormsReport(LabReport):
    schema = "gptcli.lab.norms/1"
    values: list[float]
    eps: float
    weight: list[float]
    bias: list[float]
    layernorm: NormSteps
    rmsnorm: NormSteps


@data
class LayerSize:
    """Root mean squares in one layer: of the stream that leaves it, and of what each sublayer adds.

    attn_share and mlp_share: of that, over the root mean square of the stream that it is added to.
    """

    layer_index: int
    stream: float
    attn: float
    mlp: float
    attn_share: float
    mlp_share: float


@data
class Stream:
    """start: the root mean square of what enters the first layer."""

    placement: Placement
    start: float
    layers: list[LayerSize]


@mutable
class ResidualReport(LabReport):
    """drawn: how the weights were drawn, the same for every placement."""

    schema = "gptcli.lab.residual/1"
    n_layers: int
    hidden_size: int
    n_heads: int
    mlp_size: int
    norm: Literal["layernorm", "rmsnorm"]
    tokens: int
    seed: int
    std: float
    drawn: str
    streams: list[Stream]


@data
class Cost:
    """What one attention costs in one layer. multiplications: of the scores, and as many of the weighted values.

    seen_multiplications: of those, for the pairs that the mask lets through; map_weights: in all its maps;
    cache_bytes: of its keys and values.
    """

    heads: int
    head_dim: int
    multiplications: int
    seen_multiplications: int
    o_parameters: int
    o_flops_per_token: int
    maps: int
    map_weights: int
    map_bytes: int
    cache_bytes: int


@data
class HeadsOfLayers:
    """Layers (from 0) whose attention is alike: what its heads cost, and one head of the same width.

    kind: `self`, `cross` (a decoder's, of its source), or `encoder` (a source's own). kv_heads: G. A single head needs
    no output projection, which its value projection can take in.
    """

    kind: Literal["self", "cross", "encoder"]
    layer_indices: list[int]
    kv_heads: int
    window: int | None
    causal: bool
    queries: int
    keys: int
    many: Cost
    single: Cost


@mutable
class HeadsReport(LabReport):
    """What all layers cost, and each kind of them. source_tokens: S, where an encoder reads a source."""

    schema = "gptcli.lab.heads/1"
    model: ModelFacts
    tokens: int
    source_tokens: int | None
    layers: list[HeadsOfLayers]
    maps: int
    map_weights: int
    map_bytes: int
    o_parameters: int
    cache_bytes: int


@data
class Mask:
    """Who sees whom: seen[query][key]. kind as in HeadsOfLayers; layer_indices: the layers (from 0) where it holds."""

    kind: Literal["self", "cross", "encoder"]
    layer_indices: list[int]
    n_layers: int
    queries: list[str]
    keys: list[str]
    seen: list[list[bool]]
    seen_pairs: int
    pairs: int


@data
class Route:
    """A config, the route that its structure takes, its masks, and what follows from both."""

    PROPERTIES: ClassVar[tuple[str, ...]] = ("reads", "sees", "gives", "objective", "use")

    name: str
    source: str
    route: Literal["encoder-only", "decoder-only", "encoder-decoder"]
    masks: list[Mask]
    reads: str
    sees: str
    gives: str
    objective: str
    use: str


@mutable
class RoutesReport(LabReport):
    schema = "gptcli.lab.routes/1"
    text: list[str]
    source_text: list[str]
    routes: list[Route]
