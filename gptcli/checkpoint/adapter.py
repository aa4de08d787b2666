"""A PEFT adapter's directory: low-rank changes to another model's weights, told from its config and its header.

LoRA (Hu et al. 2021) adds B·A to a matrix [out, in], with A [rank, in] and B [out, rank], times alpha / rank, or
alpha / √rank where it is rank-stabilised (Kalajdzievski 2023). DoRA (Liu et al. 2024) adds a magnitude for each output.
"""

import re
from collections import Counter
from collections.abc import Mapping
from math import prod, sqrt
from pathlib import Path
from typing import Any

from gptcli.checkpoint.files import READERS, read_json
from gptcli.checkpoint.safetensors import TensorInfo, shown
from gptcli.data import data
from gptcli.errors import GptcliError

CONFIG = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")  # the first that is there
# What a directory holds that is a model with an adapter beside it.
MODELS = tuple(f"{name}{end}" for name in ("model.safetensors", "pytorch_model.bin") for end in ("", ".index.json"))
PREFIX = "base_model.model."
A, B, EMBEDDING_A, EMBEDDING_B = "lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B"
MAGNITUDE = "lora_magnitude_vector"
# `q_proj.lora_A.weight`; training tools may leave the adapter's own name in it: `q_proj.lora_A.default.weight`.
PART = re.compile(rf"(.*)\.({A}|{B}|{EMBEDDING_A}|{EMBEDDING_B}|{MAGNITUDE})(?:\.(?!bias$)\w+){{0,2}}", re.DOTALL)


@data
class Touched:
    """Modules of one name that are changed alike. layers: which have it, none where it stands outside the layers.

    shape: of the matrix, [out, in], or of the table, [V, C]; scale: what B·A is multiplied by; parameters: of them all.
    """

    module: str
    layers: list[int]
    shape: list[int]
    rank: int
    alpha: float
    scale: float
    parameters: int


@data
class Fault:
    """What does not fit. code: `incomplete` (a part is missing) or `mismatch` (two things disagree)."""

    code: str
    said: str


@data
class Adapter:
    """What an adapter's directory holds.

    kind: PEFT's word for the method (`LORA`); base: the model that it changes, with its revision; rank, alpha: the
    config's, which its patterns may change for some modules; ranks: how many modules have each rank, by the tensors.
    targets: names of modules, or one regular expression; bias: which biases come along; saved: whole modules that come
    along, by name, and their parameters. parameters: numbers of all tensors; low_rank: of those, A's and B's.
    """

    directory: str
    file: str
    kind: str
    base: str
    revision: str
    task: str
    rank: int
    alpha: float
    ranks: dict[int, int]
    targets: list[str]
    bias: str
    dora: bool
    rslora: bool
    parameters: int
    low_rank: int
    bytes: int
    dtypes: dict[str, int]
    touched: list[Touched]
    saved: dict[str, int]
    biases: int
    faults: list[Fault]

    @property
    def said(self) -> str:
        """One line: `a PEFT adapter (LORA, rank 8) for 'org/name'`."""
        rank = f", rank {' and '.join(map(str, sorted(self.ranks)))}" if self.ranks else ""
        base = shown(self.base) if self.base else "a model that it does not name"
        return f"a PEFT adapter ({ascii(self.kind)[1:-1][:40]}{rank}) for {base}"


def is_adapter(path: Path) -> bool:
    """Whether this is an adapter's directory or its file of weights, and no model with an adapter beside it."""
    folder = path if path.is_dir() else path.parent
    if not (folder / CONFIG).is_file():
        return False
    return not any((folder / name).is_file() for name in MODELS) if path.is_dir() else path.name in WEIGHTS


def refuse(path: Path) -> None:
    """Raises GptcliError for an adapter: what it is, and the model that it belongs to."""
    if is_adapter(path):
        found = read(path if path.is_dir() else path.parent)
        plain = re.fullmatch(r"[\w./~-]{1,200}", found.base, re.ASCII)
        model = f"give that model by -m {found.base}" if plain else "give the model that it belongs to"
        raise GptcliError(f"{path}: {found.said}, not a model of its own", model, "adapter")


def read(directory: Path) -> Adapter:
    """What an adapter's directory holds, with all that does not fit. Reads the config and the header.

    Raises GptcliError where the config or the header can't be read.
    """
    path = directory / CONFIG
    config = _Config(read_json(path), path)
    file = next((directory / name for name in WEIGHTS if (directory / name).is_file()), None)
    infos = READERS[file.suffix](file) if file else {}
    faults = [] if file else [Fault(code="incomplete", said=f"{' or '.join(WEIGHTS)} is missing")]
    lora = config.kind == "LORA"  # what other kinds store is not looked into
    modules, others = _by_module(infos if lora else {})
    touched = _touched(modules, config, faults)
    saved: Counter[str] = Counter()
    biases = 0
    for name, info in others.items():
        module = name.rpartition(".")[0]
        if name.endswith(".bias") and not config.saves(module):
            biases += prod(info.shape)
        else:
            saved[module] += prod(info.shape)
            if not config.saves(module):
                faults.append(Fault(code="mismatch", said=f"tensor {info.key!r} is no part of what is known"))
    dtypes: Counter[str] = Counter()
    for info in infos.values():
        dtypes[info.dtype] += prod(info.shape)
    ranks: Counter[int] = Counter()
    for one in touched:
        ranks[one.rank] += max(len(one.layers), 1)
    if lora and file:
        faults += [
            Fault(code="mismatch", said=f"the config targets {target!r}, and no tensor changes such a module")
            for target in config.listed
            if not any(name == target or name.endswith(f".{target}") for name in modules)
        ]
    return Adapter(
        directory=str(directory),
        file=file.name if file else "",
        kind=config.kind,
        base=config.text("base_model_name_or_path"),
        revision=config.text("revision"),
        task=config.text("task_type"),
        rank=config.rank,
        alpha=config.alpha,
        ranks=dict(sorted(ranks.items())),
        targets=config.targets,
        bias=config.text("bias") or "none",
        dora=bool(config.raw.get("use_dora")),
        rslora=config.rslora,
        parameters=sum(prod(info.shape) for info in infos.values()),
        low_rank=sum(prod(info.shape) for parts in modules.values() for info in parts.values()),
        bytes=sum(info.end - info.start for info in infos.values()),
        dtypes=dict(dtypes.most_common()),
        touched=touched,
        saved=dict(saved),
        biases=biases,
        faults=faults,
    )


class _Config:
    """What an adapter_config.json says. Raises GptcliError where a value is of no use."""

    def __init__(self, raw: dict[str, Any], path: Path):
        self.raw, self.path = raw, path
        self.kind = self.text("peft_type") or "unknown kind"
        self.rslora = bool(raw.get("use_rslora"))
        self.rank = int(self.number(raw.get("r", 8), "r")) if self.kind == "LORA" else 0
        if self.rank != raw.get("r", 8) and self.kind == "LORA":
            raise self.fault("r")
        self.alpha = self.number(raw.get("lora_alpha", 8), "lora_alpha") if self.kind == "LORA" else 0.0
        targets = raw.get("target_modules") or []
        self.targets = (
            [targets] if isinstance(targets, str) else sorted(map(str, self.items(targets, "target_modules")))
        )
        self.listed = [] if isinstance(targets, str) else self.targets
        self.modules_to_save = [str(name) for name in self.items(raw.get("modules_to_save") or [], "modules_to_save")]

    def fault(self, key: str) -> GptcliError:
        said = f"{self.path}: {key}: {str(self.raw.get(key))[:60]!r} is of no use"
        return GptcliError(said, "mend the config, or fetch it again", "config")

    def text(self, key: str) -> str:
        value = self.raw.get(key)
        if value is not None and not isinstance(value, str):
            raise self.fault(key)
        return value or ""

    def items(self, value: Any, key: str) -> list[Any]:
        if not isinstance(value, list):
            raise self.fault(key)
        return value

    def number(self, value: Any, key: str) -> float:
        if type(value) not in (int, float) or not 0 < value < 2**31:
            raise self.fault(key)
        return value

    def of_module(self, module: str, key: str, otherwise: float) -> float:
        """What a table by patterns (`rank_pattern`, `alpha_pattern`) says of a module."""
        table = self.raw.get(key) or {}
        if not isinstance(table, dict):
            raise self.fault(key)
        values = (value for pattern, value in table.items() if _names(pattern, module))
        return self.number(next(values, otherwise), key)

    def saves(self, module: str) -> bool:
        """Whether a module comes along whole: the config says so, or it is a table whose rows were added to."""
        names = [*self.modules_to_save, "embed_tokens", "lm_head", "wte"]
        return any(module == name or module.endswith(f".{name}") for name in names)


def _names(pattern: str, module: str) -> bool:
    """Whether a pattern means this module: it is the end of the name, or a regular expression for it.

    One that could take long to match (three repetitions, or a repeated group) is taken by its letters alone.
    """
    if module == pattern or module.endswith(f".{pattern}"):
        return True
    slow = len(re.findall(r"[*+{]", pattern)) > 2 or re.search(r"\)[*+?{]", pattern) or len(module) > 200
    try:
        return not slow and re.fullmatch(rf"(.*\.)?({pattern})", module) is not None
    except re.error:
        return False


Modules = dict[str, dict[str, TensorInfo]]


def _by_module(infos: Mapping[str, TensorInfo]) -> tuple[Modules, dict[str, TensorInfo]]:
    """The low-rank tensors by module and part, and all others by name; the wrapper's prefix is off."""
    modules: Modules = {}
    others: dict[str, TensorInfo] = {}
    for stored, info in infos.items():
        name = stored.removeprefix(PREFIX)
        if found := PART.fullmatch(name):
            modules.setdefault(found[1], {})[found[2]] = info
        else:
            others[name.replace(".modules_to_save", "").replace(".base_layer", "")] = info
    return modules, others


def _touched(modules: Modules, config: _Config, faults: list[Fault]) -> list[Touched]:
    """Rows of modules that are changed alike. Adds what does not fit to the faults."""
    rows: dict[tuple[Any, ...], list[tuple[int | None, int]]] = {}
    for module, parts in modules.items():
        matrix = _matrix(module, parts, config, faults)
        if matrix is None:
            continue
        shape, rank = matrix
        alpha = float(config.of_module(module, "alpha_pattern", config.alpha))
        name, layer = _layer_of(module)
        size = sum(prod(info.shape) for info in parts.values())
        rows.setdefault((name, shape, rank, alpha), []).append((layer, size))
    return [
        Touched(
            module=name,
            layers=sorted(layer for layer, _ in found if layer is not None),
            shape=list(shape),
            rank=rank,
            alpha=alpha,
            scale=alpha / (sqrt(rank) if config.rslora else rank),
            parameters=sum(size for _, size in found),
        )
        for (name, shape, rank, alpha), found in rows.items()
    ]


def _matrix(
    module: str, parts: Mapping[str, TensorInfo], config: _Config, faults: list[Fault]
) -> tuple[tuple[int, int], int] | None:
    """The shape of the matrix that a module's A and B change, and their rank; None where they are no pair."""

    def fault(code: str, said: str) -> None:
        faults.append(Fault(code=code, said=f"{module!r} {said}"))

    table = EMBEDDING_A in parts or EMBEDDING_B in parts
    first, second = (EMBEDDING_A, EMBEDDING_B) if table else (A, B)
    down, up = parts.get(first), parts.get(second)
    if down is None or up is None:
        return fault("incomplete", f"has no {first if down is None else second}")
    rank = down.shape[0] if down.shape else 0
    if len(down.shape) < 2 or len(up.shape) < 2 or up.shape[1] != rank or rank == 0:
        return fault("mismatch", f"has A {list(down.shape)} and B {list(up.shape)}, with no rank in common")
    wanted = int(config.of_module(module, "rank_pattern", config.rank))
    if rank != wanted and not (config.raw.get("target_parameters") and rank % wanted == 0):  # experts side by side
        fault("mismatch", f"has rank {rank}, and the config says {wanted}")
    magnitude, dora = parts.get(MAGNITUDE), bool(config.raw.get("use_dora"))
    if dora != (magnitude is not None):
        said = f"no {MAGNITUDE}, which use_dora asks for" if dora else f"a {MAGNITUDE}, and the config has no use_dora"
        fault("incomplete" if dora else "mismatch", f"has {said}")
    elif magnitude is not None and prod(magnitude.shape) != up.shape[0]:
        fault("mismatch", f"has a {MAGNITUDE} {list(magnitude.shape)} for {up.shape[0]} outputs")
    out, into = up.shape[0], down.shape[1]
    return ((into, out) if table else (out, into)), rank  # a table is [V, C], and its rows are the outputs


def _layer_of(module: str) -> tuple[str, int | None]:
    """`model.layers.3.self_attn.q_proj` → `self_attn.q_proj` and 3; without a number the name and None."""
    parts = module.split(".")
    numbers = (i for i, part in enumerate(parts[:-1]) if i and part.isascii() and part.isdigit() and len(part) < 7)
    at = next(numbers, None)
    return (module, None) if at is None else (".".join(parts[at + 1 :]), int(parts[at]))
