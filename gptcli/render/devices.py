"""What each of several ranks holds and does, below what the whole model costs."""

from gptcli.render.costs import scaled, size, title
from gptcli.render.screen import Part, Screen
from gptcli.report.devices import Devices, Share


def draw(devices: Devices, run: str, screen: Screen) -> None:
    """Prints it to the screen. run: B, T and S in a few words."""
    share, encodes = devices.share, devices.source_sums is not None
    of = " of the text" if encodes else ""
    title(screen, f"One of {share.ranks:,} ranks, tensor parallel", run)
    rows = [
        ("weights", size(share.weights), "the embedding's table is left in the file"),
        ("cache", size(share.cache), ""),
        ("activations", size(share.activations), "the head on the last position"),
        ("in all", size(share.bytes), f"{_fits(share)[0]} into {size(devices.memory)}" if devices.memory else ""),
        ("FLOPs", scaled(devices.flops), "for T tokens"),
        ("", scaled(devices.flops_next), "for one token more"),
        ("sends", size(devices.sent), f"a token{of}, in {devices.sums:,} sums of partial products"),
        ("", size(devices.gathered), "a position whose logits are put together"),
    ]
    if encodes:
        said = f"a token of the source, in {devices.source_sums:,} sums of the encoder's"
        rows.insert(-1, ("", size(devices.source_sent), said))
    screen.table([[(name, "dim"), number, (what, "dim")] for name, number, what in rows], right=(1,))
    for said in devices.whole:
        screen.line(("whole on every rank  ", "yellow"), said)
    if devices.plan:
        cells = [[f"{one.ranks:,}", size(one.weights), size(one.bytes), _fits(one)] for one in devices.plan]
        screen.table(cells, ("ranks", "weights", "in all", f"into {size(devices.memory)} each"), right=(0, 1, 2))


def _fits(share: Share) -> Part:
    return ("fits", "green") if share.fits else ("doesn't fit", "red")
