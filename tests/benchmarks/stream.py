"""A checkpoint that passes through memory, layer by layer: peak and time beside transformers that holds it.

    python -m tests.benchmarks.stream [FOLDER]

The Llama-3.2-1B-shaped bfloat16 checkpoint of load.py (2.3 GiB), eight ids, whole processes in turn: ours with
`--stream on` and `off`, and transformers. One JSON line each: `seconds` (least of the runs) and `ratio` to
transformers'; `peak_MiB`, all that was resident at once (VmHWM, with the libraries and pages of the file), and its
share of the checkpoint.
"""

import json
import sys
import tempfile
from pathlib import Path

from tests.benchmarks.load import OURS, RUNS, THEIRS, make, run

PEAK = """
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(int(status["VmHWM"].split()[0]) // 1024)
"""


def ours(folder: Path, how: str) -> str:
    words = [*OURS, str(folder), "--stream", how]
    return f"import sys; from gptcli.cli.main import main; sys.argv = {words}; main()"


def measure(folder: Path) -> None:
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors")) / 2**20
    scripts = {"gptcli, streamed": ours(folder, "on"), "gptcli": ours(folder, "off"), "transformers": THEIRS}
    found: dict[str, list] = {name: [] for name in scripts}
    for _ in range(RUNS + 1):  # the first fills the caches
        for name, script in scripts.items():
            found[name].append(run([sys.executable, "-c", script + PEAK, str(folder)]))
    seconds = {name: min(one[0] for one in runs[1:]) for name, runs in found.items()}
    for name, runs in found.items():
        peak = max(int(lines[-1]) for _, lines in runs[1:])
        line = {
            "benchmark": "1B bfloat16 checkpoint to the top ten, T=8",
            "of": name,
            "seconds": round(seconds[name], 3),
            "ratio": round(seconds[name] / seconds["transformers"], 3),
            "peak_MiB": peak,
            "share_of_checkpoint": round(peak / size, 3),
        }
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(dir=sys.argv[1] if len(sys.argv) > 1 else None) as made:
        make(Path(made))
        measure(Path(made))
