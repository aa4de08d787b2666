"""What stands beside the weights, as hypotheses: positions, ids, and which key/value head a query head reads.

H heads, G key/value heads, D head size, C hidden size.
"""

from collections.abc import Iterator

from gptcli.diff.causes_fields import MIXED, TURNED
from gptcli.diff.causes_scene import Guess, Scene, put
from gptcli.diff.causes_weights import held
from gptcli.spec import Learned, Rope, Sinusoidal


def of_inputs(scene: Scene) -> Iterator[Guess]:
    """Positions that count from elsewhere, and ids that stand before or behind a text on one side alone."""
    import torch

    from gptcli.model.part import Change

    position, counted = scene.spec.position, {"embed"} if scene.part.x is None else set(TURNED.split())
    if scene.window & counted and isinstance(position, Learned | Sinusoidal | Rope):
        for shift, said in ((1, "one later"), (-1, "one earlier")):
            said = f"B counts positions {said} than A does"
            yield Guess("position-off-by-one", said, "positions count from 0", Change(shift=shift))
    if "embed" in scene.window and scene.parted == "embed":
        mend = "add the BOS once, as the tokenizer's own rule says"
        texts = {
            "B lacks the first token that A has": ("bos-missing", lambda ids: ids[:, 1:]),
            "B has A's first token twice": ("bos-doubled", lambda ids: torch.cat((ids[:, :1], ids), 1)),
            "B lacks the last token that A has": ("eos-missing", lambda ids: ids[:, :-1]),
        }
        for said, (code, ids) in texts.items():
            yield Guess(code, said, mend, Change(ids=ids))


def of_heads(scene: Scene) -> Iterator[Guess]:
    """Query head h reads key/value head h mod G where A's reads h // (H / G): keys and values repeated in turns."""
    from gptcli.model.part import Change

    a = scene.spec.attention
    if not scene.window.intersection(MIXED.split()) or not 1 < a.n_kv_heads < a.n_heads:
        return
    if a.qk_norm in ("each", "whole"):  # whose weights belong to G heads
        return
    weights = held(scene, "attn.k", "attn.v")
    turns = a.n_heads // a.n_kv_heads
    weights = {name: x.repeat(turns, *[1] * (x.ndim - 1)) for name, x in weights.items()}  # [G · D, C] → [H · D, C]
    said = "B's query head h reads key/value head h mod G where A's reads h // (H/G)"
    change = Change(spec=lambda spec: put(spec, "attention.n_kv_heads", a.n_heads), weights=weights)
    yield Guess(
        "kv-head-order", said, "repeat each key/value head H/G times in a row (repeat_interleave, not tile)", change
    )
