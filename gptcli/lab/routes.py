"""Three routes: who may see whom in an encoder, in a decoder, and in both together, read off their configs."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from gptcli.lab.engine import listed, require
from gptcli.report.lab import Mask, Route, RoutesReport
from gptcli.source import Model, open_model
from gptcli.spec import Attention, Spec

if TYPE_CHECKING:
    from torch import Tensor

TEXT = "the cat sat on the mat".split()
SOURCE = "le chat est assis sur le tapis".split()
MOST_WORDS, MOST_CONFIGS = 60, 6

Kind = Literal["self", "cross", "encoder"]
NAMES = {"self": "in its decoder", "cross": "across", "encoder": "in its encoder"}


def routes_report(text: list[str], source: list[str], configs: list[str]) -> RoutesReport:
    """The masks of each config for the words, and what follows from its structure.

    An encoder beside a decoder reads `source`, and the decoder the text. Raises GptcliError.
    """
    from gptcli.families.shown import ROUTES

    text, source = text or TEXT, source or SOURCE
    for words in (text, source):
        require(len(words) <= MOST_WORDS, f"{len(words)} words", f"a drawing holds {MOST_WORDS}")
    require(len(configs) <= MOST_CONFIGS, f"{len(configs)} configs", f"give {MOST_CONFIGS} at most")
    routes = [_route(open_model(config=name), text, source) for name in configs or ROUTES]
    return RoutesReport(text=text, source_text=source, routes=routes, see=_see(routes))


def _route(model: Model, text: list[str], source: list[str]) -> Route:
    spec = model.spec
    for words, stack in ((text, spec), (source, spec.encoder)):
        fits = stack is None or len(words) <= stack.most_tokens
        require(fits, f"{model.shown}: {len(words)} words are more than its context", "give fewer", "context")
    masks, causal = list(_masks(spec, text, source)), _causal(spec)
    if spec.encoder is not None:
        route = "encoder-decoder"
    else:
        route = "decoder-only" if causal else "encoder-only"
    return Route(
        name=spec.name,
        source=model.source,
        route=route,
        masks=masks,
        reads=_reads(spec),
        sees=_sees(spec),
        gives=_gives(spec, causal),
        objective=_objective(spec, causal),
        use=_use(route),
    )


def _parts(spec: Spec) -> list[Attention]:
    """Each layer's own attention."""
    return [spec.at(i).attention for i in range(spec.n_layers)]


def _causal(spec: Spec) -> bool:
    return any(part.causal for part in _parts(spec))


def _masks(spec: Spec, text: list[str], source: list[str]) -> Iterator[Mask]:
    if spec.encoder is not None:
        yield from _of_stack("encoder", _parts(spec.encoder), source, source)
    yield from _of_stack("self", _parts(spec), text, text)
    if spec.cross is not None:
        yield from _of_stack("cross", [spec.cross] * spec.n_layers, text, source)


def _of_stack(kind: Kind, parts: list[Attention], queries: list[str], keys: list[str]) -> Iterator[Mask]:
    """One mask for all layers where it is the same."""
    import torch

    from gptcli.model.attention import Sight

    positions = (torch.arange(len(words))[None] for words in (queries, keys))
    of_queries, of_keys = positions
    found: list[tuple[Tensor, list[int]]] = []
    for i, part in enumerate(parts):
        mask = Sight.of(part, of_queries, None, of_keys).mask()[0, 0]  # [T, S]
        alike = next((layers for other, layers in found if torch.equal(mask, other)), None)
        if alike is None:
            found.append((mask, [i]))
        else:
            alike.append(i)
    for mask, layers in found:
        yield Mask(
            kind=kind,
            layer_indices=layers,
            n_layers=len(parts),
            queries=queries,
            keys=keys,
            seen=mask.tolist(),
            seen_pairs=int(mask.sum()),
            pairs=mask.numel(),
        )


def _reads(spec: Spec) -> str:
    if spec.encoder is not None:
        return "a source text, whole, and the beginning of its target"
    whole = "the beginning of one text" if _causal(spec) else "one text, whole"
    return f"{whole}, in up to {spec.n_segments} segments" if spec.n_segments else whole


def _sees(spec: Spec) -> str:
    if spec.encoder is None:
        return f"a token sees {_reach(spec)}"
    return f"a source token sees {_reach(spec.encoder)}; a target token sees {_reach(spec)}, and the whole source"


def _reach(spec: Spec) -> str:
    """How far a token looks; where layers differ, each way that there is."""
    return " or ".join(dict.fromkeys(_reach_of(part) for part in _parts(spec)))


def _reach_of(part: Attention) -> str:
    if part.window is None:
        return "itself and all before it" if part.causal else "every token, on both sides"
    return f"itself and the {part.window - 1:,} before it" if part.causal else f"{part.window - 1:,} to each side"


def _gives(spec: Spec, causal: bool) -> str:
    if spec.lm_head is None:
        return "at each position a vector"
    which = "the next token" if causal else "the token that stands there"
    of_target = " of the target" if spec.encoder is not None else ""
    return f"at each position{of_target} scores for {which}"


def _objective(spec: Spec, causal: bool) -> str:
    if spec.lm_head is None:
        return "none to be read off: it has no head"
    if not causal:
        return "fill in tokens that were masked"
    return "predict each next token" + (" of the target, given the source" if spec.encoder is not None else "")


def _use(route: str) -> str:
    return {
        "encoder-only": "understand a text: classify, tag, search",
        "decoder-only": "go on with a text, task and material written into it",
        "encoder-decoder": "turn one text into another: translate, sum up",
    }[route]


def _see(routes: list[Route]) -> str:
    kinds = {route.route for route in routes}
    alike = f"{'all are' if len(routes) > 2 else 'both are'} {routes[0].route}: " * (len(kinds) == 1 < len(routes))
    lone = all(mask.pairs == 1 for route in routes for mask in route.masks)
    if lone:
        return f"{alike}a token alone sees itself by every route"
    return alike + "; ".join(f"{route.name} {_seen(route)}" for route in routes)


def _seen(route: Route) -> str:
    alone = route.route != "encoder-decoder"
    return "sees " + listed(
        f"{mask.seen_pairs} of {mask.pairs} {'pairs' if alone else NAMES[mask.kind]}" for mask in route.masks
    )
