"""What several rooms share: two functions that choose by a report's type, a model's title, the ids as they were fed."""

from collections.abc import Callable, Iterable
from functools import singledispatch
from itertools import groupby

from gptcli.render.screen import Screen, exact
from gptcli.report import ModelFacts, Report
from gptcli.tokens import Token


def by_type() -> tuple[Callable, Callable]:
    """`draw` and `verdict` of a room with several reports, each of which registers a function of its own."""

    @singledispatch
    def draw(report: Report, screen: Screen) -> None:
        """Prints the report to the screen."""
        raise TypeError(f"no rendering for {type(report).__name__}")

    @singledispatch
    def verdict(report: Report) -> str:
        """What `-q` prints."""
        raise TypeError(f"no verdict of {type(report).__name__}")

    return draw, verdict


def title(screen: Screen, model: ModelFacts) -> None:
    hand_written = ", hand-written weights" if model.weights == "hand-written" else ""
    said: list = [(model.name, "bold"), f" ({model.source}{hand_written})"]
    if model.seed is not None:
        said += [" ", (f"RANDOM WEIGHTS (seed {model.seed})", "bold yellow")]
    edited = [[(f"EDITED {edit}", "bold yellow")] for edit in model.edits]
    screen.flow(
        [said, *edited, [f"{exact(model.parameters)} parameters"], [model.dtype], [str(model.device)]], gap=" · "
    )


def rank(first: int, tie: tuple[int, int] | None) -> str:
    """A rank, or the ranks that a tie spans."""
    return str(first) if tie is None else f"{tie[0]}–{tie[1]}"


def folded(rows: Iterable, key: Callable) -> list:
    """Of neighbours that `key` says are alike (their logits tie), those asked for by name, else the first."""
    kept = []
    for _, group in groupby(rows, key=key):
        group = list(group)
        kept += [one for one in group if one.asked] or group[:1]
    return kept


def fed(screen: Screen, tokens: list[list[Token]], source: list[list[Token]] = ()) -> None:
    """The ids as they went in, with their positions; source: what the encoder read."""
    if source:
        _ids(screen, source, "source")
    _ids(screen, tokens, "tokens", "text")


def _ids(screen: Screen, tokens: list[list[Token]], name: str, one: str = "source") -> None:
    for text, ids in enumerate(tokens):
        label = name if len(tokens) == 1 else f"{one} {text}"
        shown = [
            [
                (f"{position} ", "dim"),
                (token.token, "cyan"),
                " " if token.token else "",
                str(token.id),
                (" added" if token.added else "", "dim"),
            ]
            for position, token in enumerate(ids)
        ]
        if len(shown) > 24 and not screen.full:
            shown[12:-12] = [[("…", "dim")]]
        screen.flow([[label, "  ", *shown[0]], *shown[1:]], gap="   ", indent=len(label) + 2)
