"""Results as files. What is there is kept unless --force says otherwise, and a file appears whole or not at all."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from gptcli.errors import GptcliError
from gptcli.render.plain import to_json
from gptcli.report import Report

if TYPE_CHECKING:
    from torch import Tensor

Writer = Callable[[Path], None]


def check_outputs(outputs: list[Path], suffixes: tuple[str, ...], force: bool) -> None:
    """Refuses, before any work is done, outputs that can't or must not be written. Raises GptcliError."""
    for path in outputs:
        if path.suffix not in suffixes:
            raise GptcliError(
                f"-o {path}: this command writes {', '.join(suffixes)}", "end the name in one of them", "output"
            )
        try:
            there, has_place = path.exists(), path.parent.is_dir()
        except OSError as error:  # a name too long, a directory that may not be read
            raise refused(path, error) from None
        if there and not force:
            raise GptcliError(f"-o {path}: the file is there", "--force writes over it", "output")
        if not has_place:
            raise GptcliError(f"-o {path}: no such directory", f"make {path.parent} first", "output")


def refused(path: Path, error: OSError) -> GptcliError:
    return GptcliError(f"-o {path}: {error.strerror or error}", "name a place that can be written to", "output")


def write(path: Path, writer: Writer) -> None:
    """Writes beside the file first and then takes its place. Raises GptcliError."""
    draft = path.with_name(f".gptcli.{os.getpid()}.part")
    try:
        draft.touch()
        mode = draft.stat().st_mode
        writer(draft)
        draft.chmod(mode)  # safetensors makes its files for their owner alone, whatever the umask says
        draft.replace(path)
    except OSError as error:
        raise refused(path, error) from None
    finally:
        draft.unlink(missing_ok=True)


def write_report(path: Path, report: Report) -> None:
    write(path, lambda draft: draft.write_text(to_json(report) + "\n", encoding="utf-8"))


def write_logits(path: Path, logits: "Tensor", ids: "Tensor") -> None:
    """`.safetensors`: logits [B, T, V] and ids [B, T]; `.npy`: the logits alone. float64 stays, all else is float32."""
    import torch

    logits = logits.to("cpu", torch.float64 if logits.dtype == torch.float64 else torch.float32).contiguous()

    def writer(draft: Path) -> None:
        if path.suffix == ".npy":
            import numpy

            with draft.open("wb") as file:
                numpy.save(file, logits.numpy())
        else:
            from safetensors import SafetensorError
            from safetensors.torch import save_file

            try:
                save_file({"logits": logits, "ids": ids.cpu().contiguous()}, draft)
            except SafetensorError as error:  # what it says of a full disk
                raise OSError(str(error)) from None

    write(path, writer)
