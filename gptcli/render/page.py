"""A trace as one self-contained HTML page: its data as JSON, its many numbers as one deflated block, its script.

Nothing of a model is markup: texts stand in the JSON, where no `<` and no address is left, and reach the page as text.
"""

import base64
import json
import math
import sys
import zlib
from array import array
from collections.abc import Iterable, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from gptcli.errors import GptcliError
from gptcli.render.files import write
from gptcli.report.page import Origins, PageReport, Plane, Scores
from gptcli.report.page_plan import LIMIT
from gptcli.report.trace import Step
from gptcli.tokens import Token

SCRIPTS = ("data", "parts", "map", "heads", "lens", "walk", "page")
# What a walk holds of each key: as the script calls it, and as the walk does.
KEYS = {name: name for name in ("k", "v", "weighted", "product", "scaled", "weight")}
KEYS |= {"normK": "norm_k", "normWeighted": "norm_weighted"}
LARGEST = 3.4028234663852886e38  # of float32


def write_page(path: Path, report: PageReport) -> None:
    """`.html`. Raises GptcliError where the file can't be written."""
    text = page(report)
    if len(text) > LIMIT:
        said = f"-o {path}: {len(text) / 1e6:.1f} MB, and {LIMIT / 1e6:.0f} MB is the most"
        raise GptcliError(said, "take a shorter text", "output")
    write(path, lambda draft: draft.write_text(text, encoding="utf-8"))


def page(report: PageReport) -> str:
    """The whole file."""
    numbers = Numbers()
    data = json.dumps(_words(_data(report, numbers)), separators=(",", ":"), allow_nan=False)  # ASCII alone
    style, *scripts = (_asset(name) for name in ("page.css", *(f"{name}.js" for name in SCRIPTS)))
    parts = {
        "STYLE": style,
        "DATA": data.replace("<", "\\u003c").replace("/", "\\/").replace(":\\/", "\\u003a\\/"),
        "NUMBERS": numbers.packed(),
        "SCRIPT": "\n".join(scripts),
    }
    before, *rest = _asset("page.html").split("{{")
    return before + "".join(parts[name] + after for name, _, after in (one.partition("}}") for one in rest))


def _asset(name: str) -> str:
    return resources.files("gptcli.render").joinpath("page", name).read_text(encoding="utf-8")


class Numbers:
    """Arrays side by side in one block, each once; a page knows them as [kind, where it begins, how many]."""

    def __init__(self):
        self.block = bytearray()
        self.places: dict[tuple[str, bytes], list] = {}

    def add(self, kind: str, data: bytes) -> list:
        """Where an array lies; f32, i32, u16 or u8, little-endian."""
        if (kind, data) not in self.places:
            self.block += b"\0" * (-len(self.block) % 4)
            size = {"u8": 1, "u16": 2}.get(kind, 4)
            self.places[kind, data] = [kind, len(self.block), len(data) // size]
            self.block += data
        return self.places[kind, data]

    def floats(self, rows: Iterable[float] | Iterable[Sequence[float]]) -> list:
        """Numbers, or rows of them, as float32."""
        flat = [x for row in rows for x in (row if isinstance(row, (list, tuple)) else (row,))]
        return self.add("f32", _bytes("f", [_single(x) for x in flat]))

    def integers(self, flat: Iterable[int]) -> list:
        return self.add("i32", _bytes("i", list(flat)))

    def packed(self) -> str:
        """All of them, deflated, in letters."""
        pack = zlib.compressobj(6, zlib.DEFLATED, -15)
        return base64.b64encode(pack.compress(bytes(self.block)) + pack.flush()).decode()


def _bytes(kind: str, values: list) -> bytes:
    found = array(kind, values)
    if sys.byteorder == "big":
        found.byteswap()
    return found.tobytes()


def _single(x: float) -> float:
    """A number that float32 has; one of float64 that is beyond its largest is infinite there."""
    return x if not math.isfinite(x) or abs(x) <= LARGEST else math.copysign(math.inf, x)


def _words(value: Any) -> Any:
    """Numbers that JSON doesn't have, as words."""
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if value != value else "∞" if value > 0 else "−∞"
    if isinstance(value, dict):
        return {key: _words(one) for key, one in value.items()}
    return [_words(one) for one in value] if isinstance(value, (list, tuple)) else value


def _data(report: PageReport, numbers: Numbers) -> dict:
    """What the script reads."""
    text, source = ([_token(token) for token in (texts or [[]])[0]] for texts in (report.tokens, report.source))
    model, recipes = report.model, {}
    return {
        "model": {name: getattr(model, name) for name in ("name", "source", "weights", "seed", "dtype", "device")}
        | {"parameters": f"{model.parameters:,}", "edits": model.edits},
        "attention": report.attention,
        "layers": report.n_layers,
        "asked": report.asked,
        "replayed": report.replayed,
        "queries": source if report.attention == "encoder" else text,
        "keys": text if report.attention == "self" else source,
        "text": text,
        "spans": [numbers.integers(x for span in spans for x in span) for spans in report.spans],
        "heads": [
            {
                "layer": head.layer_index,
                "path": head.path,
                "head": head.head,
                "heads": head.n_heads,
                "kv": head.kv_head,
                "kvs": head.n_kv_heads,
                "window": head.window,
                "causal": head.causal,
                "seen": head.seen,
                "spans": head.spans,
                "score": head.score,
                "weights": _plane(head.weights, numbers),
                "sink": head.sink and _plane(head.sink, numbers),
                **_scores(head.scores, numbers),
            }
            for head in report.heads
        ],
        "walks": [_walk(origins, numbers, recipes) for origins in report.walks],
        "recipes": list(recipes),
        "lens": report.lens
        and {
            "fills": report.lens.fills,
            "words": report.lens.words,
            "rows": [
                {
                    "name": row.name,
                    "path": row.path,
                    "k": len(row.top[0]),
                    "ids": numbers.integers(one.id for top in row.top for one in top),
                    "logits": numbers.floats(one.logit for top in row.top for one in top),
                    "probs": numbers.floats(one.prob for top in row.top for one in top),
                }
                for row in report.lens.rows
            ],
        },
        "said": report.said,
        "proof": [[check.claim, check.error, check.allowed, check.ok] for check in report.proof],
        "findings": [finding.message for finding in report.findings],
    }


def _token(token: Token) -> list:
    """Id, text, bytes in hexadecimal digits, and whether the tokenizer's rule put it there."""
    return [token.id, token.token, None if token.bytes is None else bytes(token.bytes).hex(" "), int(token.added)]


def _plane(plane: Plane, numbers: Numbers) -> list:
    return [numbers.add(plane.kind, plane.data), plane.low, plane.step, int(plane.root), plane.none]


def _scores(scores: Scores | None, numbers: Numbers) -> dict:
    if scores is None:
        return {"products": None, "scaled": None}
    return {"products": _plane(scores.products, numbers), "scaled": _plane(scores.scaled, numbers)}


def _walk(origins: Origins, numbers: Numbers, recipes: dict[tuple[str, str, str], int]) -> dict:
    """A walk's numbers by name; recipes: of every kind of step its path, its label and its formula, once."""
    walk, keys = origins.walk, origins.walk.keys

    def step(one: Step) -> list:
        recipe = recipes.setdefault((one.path, one.label, one.formula), len(recipes))
        return [recipe, numbers.floats(one.values), one.mean, one.norm]

    return {
        "layer": walk.layer_index,
        "head": walk.head,
        "position": walk.position,
        "score": walk.score,
        "scale": walk.scale,
        "softcap": walk.softcap,
        "sink": walk.sink,
        "weights": walk.weights,
        "heaviest": walk.heaviest,
        "edited": walk.edited,
        "before": [step(one) for one in walk.before],
        "after": [step(one) for one in walk.after],
        "highest": origins.highest,
        "total": origins.total,
        "q": numbers.floats(origins.q),
        "bias": None if keys[0].bias is None else numbers.floats(key.bias for key in keys),
        "visible": numbers.add("u8", bytes(key.visible for key in keys)),
        "terms": numbers.floats(origins.terms),
        "parts": numbers.floats(origins.parts),
        **{name: numbers.floats(getattr(key, field) for key in keys) for name, field in KEYS.items()},
    }
