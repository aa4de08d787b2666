"""Toy models run faster on one thread than on several that wait for one another; those of the library are made once."""

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.oracle import save_toy

torch.set_num_threads(1)
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="session")
def toys(tmp_path_factory):
    """A family's model at toy size as transformers saves it: made once, to be copied and then spoilt."""
    root, made = tmp_path_factory.mktemp("toys"), {}

    def of(config: dict) -> Path:
        key = json.dumps(config, sort_keys=True)
        if key not in made:
            made[key] = root / str(len(made))
            save_toy(config, made[key])
        return made[key]

    return of


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    """A case of a family by its name, as transformers saves it: made once a module, to be read."""
    # Of the test modules, most need no case of every family.
    from tests.test_trace_families import TOYS, auto

    root = tmp_path_factory.mktemp("toys")

    @cache
    def of(name: str) -> Path:
        save_toy(TOYS[name], root / name, auto=auto(name))
        return root / name

    return of


@pytest.fixture
def copy(toys, tmp_path):
    """A copy of such a model, its tensors changed, its config written anew, or keys of it changed (...: left out)."""

    def of(
        config: dict, tensors: Callable[[dict], dict] | None = None, settings: dict | None = None, name: str = "",
        **changes: Any,
    ) -> Path:  # fmt: skip
        here = tmp_path / (name or f"copy{len(list(tmp_path.iterdir()))}")
        shutil.copytree(toys(config), here)
        if tensors:
            changed = tensors(load_file(here / WEIGHTS))
            save_file({key: x.clone().contiguous() for key, x in changed.items()}, here / WEIGHTS)
        if settings is not None or changes:
            kept = {key: value for key, value in ((settings or config) | changes).items() if value is not ...}
            (here / "config.json").write_text(json.dumps(kept))
        return here

    return of
