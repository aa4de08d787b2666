"""Whether memory holds what a trace is asked for, said before anything runs."""

from math import prod
from typing import NamedTuple

from gptcli.cost import Choice, Size, kept, listed, refuse_above, streamed, walk
from gptcli.report.trace import selection_of
from gptcli.report.view import Attending, layer_path, layer_spec


class Room(NamedTuple):
    """The bytes that may be held (given: they were given, instead of taken from what is free), and the sizes of a run.

    as_json: the report comes out as JSON too.
    """

    size: Size
    limit: int
    given: bool
    as_json: bool

    def refuse(self, asked: Choice, *others: Choice, otherwise: str = "take a shorter text") -> None:
        """Raises GptcliError where the request is above the limit, with the first of the others that is not."""
        refuse_above(self.limit, asked, others, self.given, otherwise)

    def walks(self, layers: list[int], heads: list[int], position: str, attending: Attending) -> None:
        """Raises GptcliError where walks through these heads don't fit."""

        def choice(said: str, layers: list[int], heads: list[int], position: str) -> Choice:
            return Choice(said, self._walks(layers, heads, position, attending))

        layer, head = f"--layer {layers[0] + 1}", f"--head {heads[0]}"
        several = [f"{len(layers)} layers"] * (len(layers) > 1) + [f"{len(heads)} heads"] * (len(heads) > 1)
        several += ["every position"] * (position == "all")
        one = "-1" if position == "all" else position
        others = [
            choice(layer, layers[:1], heads, position),
            choice(head, layers, heads[:1], position),
            choice(f"{layer} {head}", layers[:1], heads[:1], position),
            choice(f"--position {one}", layers, heads, one),
            choice(f"{layer} --position {one}", layers[:1], heads, one),
            choice(f"{layer} {head} --position {one}", layers[:1], heads[:1], one),
        ]
        asked = choice(f"a trace of {', '.join(several) or 'one head'}", layers, heads, position)
        streams = "take a shorter text, or -o FILE.safetensors, which holds some rows at a time"
        self.refuse(asked, *(other for other in others if other.held < asked.held), otherwise=streams)

    def _walks(self, layers: list[int], heads: list[int], position: str, attending: Attending) -> int:
        width = self.size.source_width if attending == "encoder" else self.size.width
        keys = self.size.width if attending == "self" else self.size.source_width
        queries = range(width) if position == "all" else range(1)
        # Which position is walked through doesn't matter here, and may be beyond the text.
        select = selection_of(width, heads, list(queries))
        before = tuple(f"{layer_path(attending, layer)}." for layer in layers)
        total = kept(self.size, lambda path: path.startswith(before), select)
        for layer in layers:
            part = layer_spec(attending, self.size.spec, layer)
            number = sum(head < part.attention.n_heads for head in heads)
            total += number * len(queries) * walk(self.size, part, keys, self.as_json)
        return total

    def activation(self, path: str) -> None:
        """Raises GptcliError where one activation, whole, doesn't fit on the screen's side of memory."""
        held = kept(self.size, lambda other: other == path)
        numbers = next(prod(shape) for other, _, shape in self.size.points() if other == path)
        streams = Choice("-o FILE.safetensors, which writes it and", streamed(self.size, lambda other: other == path))
        self.refuse(Choice(f"--at {path}", held + listed(numbers, self.as_json)), streams)

    def edits(self) -> None:
        """Raises GptcliError where two runs' logits don't fit beside one another."""
        logits = kept(self.size, lambda path: path == "logits")
        self.refuse(Choice("a run beside its edited one", 2 * logits))
