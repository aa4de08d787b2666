"""Statistics of every tensor in double precision, and digests, beside reading the numbers once.

    python tests/benchmarks/stats.py [MIB]

Makes two files of MIB (512) mebibytes, float32 and bfloat16, in tensors of the shapes of a small model, and measures in
one process with one thread, in turn, after a round that is not counted: `inspect --stats` (mean, standard deviation,
least, largest, zeros, rows that are all alike, NaN and Inf, in one pass), beside torch.amax of every tensor that
safetensors' safe_open gives; and `inspect --hash`, beside SHA-256 of the file's bytes.

Each line is JSON: seconds and peer_seconds are medians of the processor's time, ratio the median over the rounds of
gptcli's by the peer's; MiB_a_second is gptcli's. The files are read from the system's cache. No network is used.
"""

import hashlib
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from gptcli.checkpoint.safetensors import read_header
from gptcli.checkpoint.scan import digest
from gptcli.model.statistics import statistics_of

ROUNDS = 7
SHAPES = [(4096, 1024), (1024, 4096), (1024, 1024), (1024,)]


def make(path: Path, dtype: torch.dtype, mebibytes: int) -> None:
    draw, tensors, left = torch.Generator().manual_seed(0), {}, mebibytes * 2**20
    while left > 0:
        for i, shape in enumerate(SHAPES):
            x = torch.empty(shape).normal_(0, 0.02, generator=draw).to(dtype)
            tensors[f"layers.{len(tensors)}.{i}.weight"], left = x, left - x.nbytes
    save_file(tensors, path)


def nothing(read: int) -> None:
    """A step that is told of the bytes read, and draws no bar."""


def seconds(function: Callable[[], object]) -> float:
    begun = time.process_time()
    function()
    return time.process_time() - begun


def compare(what: str, path: Path, ours: Callable[[], object], peer: str, theirs: Callable[[], object]) -> None:
    times = [(seconds(ours), seconds(theirs)) for _ in range(ROUNDS + 1)][1:]
    own, other = zip(*times)
    line = {
        "benchmark": what,
        "seconds": round(median(own), 4),
        "MiB_a_second": round(path.stat().st_size / 2**20 / median(own)),
        "peer": peer,
        "peer_seconds": round(median(other), 4),
        "ratio": round(median(a / b for a, b in times), 2),
    }
    print(json.dumps(line), flush=True)


def amax(path: Path) -> list[float]:
    with safe_open(path, framework="pt") as file:
        return [float(file.get_tensor(name).amax()) for name in file.keys()]  # noqa: SIM118 - not a mapping


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main() -> None:
    torch.set_num_threads(1)
    mebibytes = int(sys.argv[1]) if len(sys.argv) > 1 else 512
    with tempfile.TemporaryDirectory() as name:
        for dtype in (torch.float32, torch.bfloat16):
            word, path = str(dtype).removeprefix("torch."), Path(name) / f"{dtype}.safetensors"
            make(path, dtype, mebibytes)
            infos = read_header(path)
            found = dict(statistics_of(infos, {}, {}, False, nothing))
            with safe_open(path, framework="pt") as file:
                assert all(found[n].max == float(file.get_tensor(n).amax()) for n in infos)
            compare(
                f"statistics, {word}",
                path,
                lambda infos=infos: list(statistics_of(infos, {}, {}, False, nothing)),
                "safe_open and torch.amax",
                lambda path=path: amax(path),
            )
        compare("digests", path, lambda: digest(infos, {}, nothing), "SHA-256 of the file", lambda: sha256(path))


if __name__ == "__main__":
    main()
