"""Two models' weights compared, beside the same in plain torch.

    python tests/benchmarks/weights.py

Makes three directories of GPT-2's size (124,439,808 numbers, float32) with random weights: the second is the first
again, the third differs everywhere. Measures in one process with one thread, in turn, after a round that is not
counted: `weights_report` of opened models, which compares every tensor (and of those that differ gives max absolute,
relative, cosine, share of changed numbers, tries what may have been done, and looks for a low rank), beside reading
both files by safetensors' safe_open with torch.equal and, where that fails, the largest difference and two norms.

Each line is JSON: seconds and peer_seconds are medians of the processor's time, ratio the median over the rounds of
gptcli's by the peer's; anonymous_MiB is how much more memory, files apart, the first comparison took, where the system
says. The files are read from the system's cache. No network is used.
"""

import json
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
import yaml
from safetensors import safe_open
from safetensors.torch import save_file

from gptcli.report.diff_weights import weights_report
from gptcli.source import Model, open_model
from gptcli.spec import to_dict

ROUNDS = 5


def make(folder: Path, moved: float) -> Path:
    model = open_model(config="gpt2-small")
    weights = model.weights(torch.float32, torch.device("cpu")).tensors
    draw = torch.Generator().manual_seed(1)
    tensors = {name: x + moved * torch.randn(x.shape, generator=draw) for name, x in weights.items()}
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.yaml").write_text(yaml.safe_dump(to_dict(model.spec)))
    return folder


def ours(a: Model, b: Model) -> str:
    return weights_report(a, b).verdict


def theirs(a: Path, b: Path) -> dict[str, tuple[float, float]]:
    found = {}
    with (
        safe_open(a / "model.safetensors", framework="pt") as one,
        safe_open(b / "model.safetensors", framework="pt") as other,
    ):
        for name in one.keys():  # noqa: SIM118 - not a mapping
            x, y = one.get_tensor(name), other.get_tensor(name)
            if not torch.equal(x, y):
                apart = y - x
                found[name] = float(apart.abs().max()), float(apart.norm() / x.norm())
    return found


def seconds(function: Callable[[], object]) -> float:
    begun = time.process_time()
    function()
    return time.process_time() - begun


def anonymous() -> float:
    """MiB of this process that no file lies behind; 0 where the system does not say."""
    try:
        lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return int(lines["RssAnon"].split()[0]) / 1024
    except (OSError, KeyError):
        return 0.0


def most(function: Callable[[], object]) -> float:
    """How much more of it a function takes at most, looked at every millisecond."""
    before, seen, done = anonymous(), [0.0], threading.Event()

    def watch() -> None:
        while not done.wait(0.001):
            seen.append(anonymous() - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    function()
    done.set()
    watcher.join()
    return max(seen)


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        a, same, other = (make(Path(name) / word, moved) for word, moved in (("a", 0), ("same", 0), ("other", 1e-3)))
        for what, b, verdict in (("identical", same, "identical"), ("all tensors differ", other, "different")):
            opened = open_model(str(a)), open_model(str(b))
            taken = most(lambda opened=opened: ours(*opened))
            assert ours(*opened) == verdict and bool(theirs(a, b)) == (verdict == "different")
            times = [(seconds(lambda o=opened: ours(*o)), seconds(lambda b=b: theirs(a, b))) for _ in range(ROUNDS)]
            own, peer = zip(*times)
            line = {
                "benchmark": f"weights, {what}",
                "seconds": round(median(own), 3),
                "peer": "safe_open, torch.equal, norms",
                "peer_seconds": round(median(peer), 3),
                "ratio": round(median(x / y for x, y in times), 2),
                "anonymous_MiB": round(taken, 1),
            }
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
