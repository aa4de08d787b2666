"""Where the configs and samples that ship with gptcli lie: inside an installed wheel, or beside the package."""

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def folder(name: str) -> Path:
    """`configs` or `samples`: in the package when a wheel put them there, at the top of a checkout otherwise."""
    inside = _PACKAGE / "_shipped" / name
    return inside if inside.is_dir() else _PACKAGE.parent / name


def configs() -> dict[str, Path]:
    """Shipped configs by name."""
    return {path.stem: path for path in sorted(folder("configs").glob("*.yaml"), key=lambda path: path.stem)}


def samples() -> dict[str, Path]:
    """Shipped sample checkpoints by name: the folders of samples/ that hold weights."""
    return {path.parent.name: path.parent for path in sorted(folder("samples").glob("*/*.safetensors"))}
