"""Where and in which type a model runs."""

import os
from pathlib import Path

import torch

from gptcli.errors import GptcliError


def choose_device(name: str) -> torch.device:
    """The device that --device names, if it is there. `auto`: cuda, else mps, else cpu. Raises GptcliError."""
    there = ["cpu"]
    if torch.cuda.is_available():
        there += [f"cuda:{i}" for i in range(torch.cuda.device_count())]
    if torch.backends.mps.is_available():
        there.append("mps")
    if name == "auto":
        return torch.device(there[-1] if there[-1] == "mps" else there[1] if len(there) > 1 else "cpu")
    if (f"{name}:0" if name == "cuda" else name) not in there:
        raise GptcliError(f"--device {name}: not on this machine", f"there is: {', '.join(there)}", "device")
    return torch.device(name)


def check_room(bytes_needed: int, device: torch.device, what: str) -> None:
    """Refuses, before anything is allocated, what can't fit into the device's free memory. Raises GptcliError."""
    free = free_bytes(device)
    if free is not None and bytes_needed > free:
        raise GptcliError(
            f"{what}: {bytes_needed / 2**30:,.1f} GiB are needed and {free / 2**30:,.1f} GiB are free on {device}",
            "take a smaller config, or a smaller --dtype",
            "memory",
        )


def free_bytes(device: torch.device) -> int | None:
    """Bytes that can still be had on a device; None where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with Path("/proc/meminfo").open() as file:
            lines = dict(line.split(":") for line in file)
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, AttributeError):
        return None
