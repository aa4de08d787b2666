"""How the cost of a forward pass grows with the text and with the layers, measured and drawn.

    python tests/benchmarks/curves.py [PICTURE.png]

GPT-2 small in float32, random weights, logits of the last position. T from 128 to 8,192 at 12 layers; N from 1 to 24 at
T = 256. One JSON line a curve: seconds (least of several passes) at each size, the arithmetic's GFLOP beside them, and
the exponent: the slope of log(seconds) over log(size), by least squares, of all sizes and of the last two. The picture
has both curves, with the FLOPs' own growth through each curve's last point.
"""

import json
import math
import sys
from dataclasses import replace

import matplotlib

matplotlib.use("agg")
from matplotlib import pyplot

from gptcli import count
from gptcli.config import find_config, read_config
from gptcli.run import Run
from gptcli.source import Model
from gptcli.spec import Spec

LENGTHS = (128, 256, 512, 1024, 2048, 4096, 8192)
LAYERS = (1, 2, 4, 8, 12, 24)
LENGTH = 256  # T where N grows


def measured(spec: Spec, tokens: int) -> tuple[float, float]:
    """Seconds and GFLOP of a pass."""
    run = Run(Model(spec=spec, source="random"), [[(7919 * i) % spec.vocab_size for i in range(tokens)]])
    run.forward("last")
    seconds = []
    while len(seconds) < 3 or (sum(seconds) < 2 and len(seconds) < 20):
        run.forward("last")
        seconds.append(run.seconds)
    flops = count.flops_forward(spec, tokens, head_rows=1) - count.flops_spared(spec, tokens)
    return min(seconds), flops / 1e9


def slope(sizes: tuple[int, ...], numbers: list[float]) -> float:
    """Of log(numbers) over log(sizes), by least squares."""
    x, y = [math.log(size) for size in sizes], [math.log(number) for number in numbers]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y)) / sum((a - mean_x) ** 2 for a in x)


def main(picture: str) -> None:
    base = read_config(find_config("gpt2-small")).spec
    curves = {
        "T": (LENGTHS, [measured(replace(base, context_length=tokens), tokens) for tokens in LENGTHS]),
        "N": (LAYERS, [measured(replace(base, n_layers=layers), LENGTH) for layers in LAYERS]),
    }
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 4))
    for plot, (letter, (sizes, found)) in zip(axes, curves.items()):
        seconds, work = ([one[i] for one in found] for i in (0, 1))
        line = {
            "benchmark": f"GPT-2 small, float32, cost against {letter}",
            "sizes": sizes,
            "seconds": [round(one, 4) for one in seconds],
            "gflop": [round(one, 2) for one in work],
            "exponent": round(slope(sizes, seconds), 3),
            "exponent_of_the_last_two": round(slope(sizes[-2:], seconds[-2:]), 3),
            "exponent_of_the_flops": round(slope(sizes, work), 3),
        }
        print(json.dumps(line), flush=True)
        plot.loglog(sizes, seconds, "o-", label=f"measured, exponent {line['exponent']}")
        plot.loglog(sizes, [one * seconds[-1] / work[-1] for one in work], ":", label="as the FLOPs grow")
        plot.set(xlabel=letter, ylabel="seconds")
        plot.set_xticks(sizes, [f"{size:,}" for size in sizes])
        plot.minorticks_off()
        plot.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(picture, dpi=120)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "curves.png")
