"""What a page of a run is to hold, and what that costs in bytes of a file and of memory: before anything runs.

No torch, nothing allocated. What the file holds of weights depends on the weights; here stands the most that they can
take, for a row of them sums to 1.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from gptcli.cost import Choice, Size, listed
from gptcli.errors import GptcliError
from gptcli.report.room import Room
from gptcli.report.view import Attending, View, layer_path, layer_spec, stack_of
from gptcli.run import Run, positions
from gptcli.trace import points

LIMIT = 10_000_000  # bytes of the file
OWN = 120_000  # of them the page's own
WHOLE = 2_000_000  # bytes up to which all maps are held as they are
WALKED = 1_500_000  # and walks of heads and queries that were not asked for
LEVELS = (254, 180, 127, 90, 63, 45, 31, 22, 15)  # steps of a code of 8 bits, by how much room there is
BASE64 = 4 / 3


@dataclass
class Plan:
    """What a page is to hold, by what its numbers take: chosen before anything runs.

    layers: whose weights; asked: the layers, heads and queries that the command named; whole: every number as it is;
    coarse: the heads asked for get codes of 8 bits as well; walks: layers, heads and queries to walk through.
    """

    size: Size
    attending: Attending
    layers: list[int]
    asked: tuple[list[int], list[int], list[int]]
    whole: bool = False
    coarse: bool = False
    walks: tuple[list[int], list[int], list[int]] = field(default_factory=lambda: ([], [], []))

    @property
    def queries(self) -> int:
        return self.size.source_width if self.attending == "encoder" else self.size.width

    @property
    def keys(self) -> int:
        return self.size.width if self.attending == "self" else self.size.source_width

    def heads(self, layers: Sequence[int]) -> Iterator[tuple[int, int]]:
        """(layer, head) of all their heads."""
        for layer in layers:
            number = layer_spec(self.attending, self.size.spec, layer).attention.n_heads
            yield from ((layer, head) for head in range(number))

    def chosen(self) -> set[tuple[int, int]]:
        """The heads that were asked for."""
        return {one for one in self.heads(self.asked[0]) if one[1] in self.asked[1]}

    def fine(self) -> set[tuple[int, int]]:
        """The heads that get codes of 16 bits."""
        return set() if self.coarse else self.chosen()

    def pairs(self, layer: int) -> int:
        """How many pairs of query and key the mask of a layer leaves."""
        a, width = layer_spec(self.attending, self.size.spec, layer).attention, self.keys
        if a.causal:
            return sum(min(i + 1, a.window or width) for i in range(width))
        return sum(
            min(width, i + a.window) - max(0, i - a.window + 1) if a.window else width for i in range(self.queries)
        )

    def weights(self, layers: Sequence[int]) -> int:
        """Weights of so many layers' heads."""
        return sum(self.pairs(layer) for layer, _ in self.heads(layers))

    def walked(self, layers: list[int], heads: list[int], queries: list[int]) -> int:
        """Numbers that the file holds of walks: what walks share, it holds once."""
        number, stack = 0, stack_of(self.attending, self.size.spec)
        for layer in layers:
            a, before = layer_spec(self.attending, self.size.spec, layer).attention, layer_path(self.attending, layer)
            mine = [shape[-1] for path, _, shape in self.size.points() if path.startswith(f"{before}.")]
            stream = sum(mine) + stack.hidden_size
            of_heads = sum(head < a.n_heads for head in heads)
            number += len(queries) * (stream + of_heads * (8 * a.head_dim + self.keys * (2 * a.head_dim + 8)))
            number += min(of_heads, a.n_kv_heads) * self.keys * 2 * a.head_dim
        return number

    def lens(self) -> int:
        """Numbers of the lens."""
        return 2 * self.size.width * (self.size.spec.n_layers + 1) * best_of(self.size)

    def fixed(self) -> float:
        """Bytes of the file but for weights of 8 bits."""
        item = 1 if self.coarse else 2
        number = len(self.chosen()) * self.queries * self.keys * item + 4 * (self.walked(*self.walks) + self.lens())
        number += sum(2 * self.pairs(layer) for layer, _ in self.fine())
        return OWN + BASE64 * number + 200 * (self.queries + self.keys)

    def least(self, layers: Sequence[int]) -> float:
        """Bytes of a file with weights of these layers in the largest steps, at most."""
        rest = [one for one in self.heads(layers) if one not in self.fine()]
        bits = sum(row_bits(LEVELS[-1], self.pairs(layer), self.queries) for layer, _ in rest)
        return self.fixed() + BASE64 * bits / 8

    def held(self, as_json: bool) -> int:
        """Bytes of memory, beside the run itself."""
        item = 4 if self.whole else 2
        scored = len(list(self.heads(self.layers if self.whole else self.asked[0])))
        maps = self.weights(self.layers) * item + 2 * scored * self.queries * self.keys * item
        one = self.queries * self.keys * 4 * (4 + 2)  # scores, those behind the mask, weights, and codes of them
        return maps + one + 2 * LIMIT + listed(self.walked(*self.walks) + 2 * self.lens(), as_json)


def best_of(size: Size) -> int:
    """How many tokens a cell of the lens opens to."""
    return 10 if size.width <= 64 else 5


def row_bits(levels: int, pairs: int, queries: int) -> float:
    """Bits of a head's weights in steps of their root, at most: a row sums to 1, the squares of its codes to levels².

    Of all numbers with that mean square those of half a bell have the largest entropy; Huffman's code adds a little.
    """
    per_row = max(1.0, pairs / queries)
    mean = levels**2 / per_row
    bits = 0.5 * math.log2(math.pi * math.e / 2 * (mean + math.sqrt(mean) + 1 / 3))
    return pairs * (min(bits, math.log2(levels + 1)) + 0.3)


def plan_of(run: Run, layers: list[int], heads: list[int], position: str, attending: Attending, memory: Room) -> Plan:
    """What a page of this run is to hold. Raises GptcliError, before anything runs, where it doesn't fit."""
    view = View(run, attending)
    run.single("a page is of one")
    view.check(layers, heads)
    queries = positions(position, len(view.queries))
    every = [layer for layer in range(view.stack.n_layers) if run.holds(view.inner(layer, "pattern"))]
    lacking = [layer for layer in layers if layer not in every]
    if lacking:
        said = f"-o x.html: the trace's file holds no weights of layer {lacking[0] + 1}"
        raise GptcliError(said, "--list says what it holds", "output")
    plan = Plan(memory.size, attending, every, (layers, heads, queries))
    if all(_whole(run, view, layer) for layer in layers):
        plan.walks = plan.asked
    plan.whole = 4 * (plan.weights(every) + 2 * sum(plan.queries * plan.keys for _ in plan.heads(every))) <= WHOLE
    _refuse(plan)
    if plan.held(memory.as_json) > memory.limit:
        plan.layers = layers
    memory.refuse(Choice("a page of its maps", plan.held(memory.as_json)))
    most, places = max(plan.heads(every), key=lambda one: one[1])[1] + 1, list(range(plan.queries))
    for more in (every, layers):
        wider = replace(plan, walks=(more, list(range(most)), places))
        fits = 4 * BASE64 * wider.walked(*wider.walks) <= WALKED and wider.held(memory.as_json) <= memory.limit
        if fits and plan.walks[0] and all(_whole(run, view, layer) for layer in more):
            return wider
    return plan


def _whole(run: Run, view: View, layer: int) -> bool:
    """Can everything of a layer be had?"""
    return all(run.holds(path) for path, _ in points(run.model.spec) if path.startswith(f"{view.path(layer)}."))


def _refuse(plan: Plan) -> None:
    """Raises GptcliError where not even the layers that were asked for fit into the file, in the largest steps."""
    layers, heads, queries = plan.asked
    plan.coarse = plan.least(layers) > LIMIT
    if plan.least(layers) <= LIMIT:
        return
    narrower = {
        f"--position {queries[-1]}": (layers, heads, queries[-1:]),
        f"--layer {layers[0] + 1}": (layers[:1], heads, queries),
        f"--layer {layers[0] + 1} --head {heads[0]}": (layers[:1], heads[:1], queries),
        f"--layer {layers[0] + 1} --head {heads[0]} --position {queries[-1]}": (layers[:1], heads[:1], queries[-1:]),
    }
    hint = "take a shorter text, or --map -o x.png"
    for said, asked in narrower.items():
        other = replace(plan, coarse=True, asked=asked, walks=asked if plan.walks[0] else plan.walks)
        if other.least(asked[0]) <= LIMIT:
            hint = f"{said} takes {other.least(asked[0]) / 1e6:.1f} MB at most"
            break
    said = f"a page of that would be {plan.least(layers) / 1e6:,.1f} MB, and {LIMIT / 1e6:.0f} MB is the most"
    raise GptcliError(f"-o x.html: {said}", hint, "output")
