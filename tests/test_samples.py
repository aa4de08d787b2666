"""The samples that ship are what their script makes."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from gptcli.run import Run
from gptcli.source import open_model

SAMPLES = Path(__file__).resolve().parent.parent / "samples"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("samples")
    subprocess.run([sys.executable, SAMPLES / "make_samples.py", folder], check=True)
    return folder


def files_of(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", ["cats", "tiny-gpt2"])
def test_the_script_makes_the_shipped_bytes(made, name):
    """Only the README beside them is written by hand."""
    shipped = files_of(SAMPLES / name)
    assert shipped.pop("README.md")
    assert files_of(made / name) == shipped


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_cats_checkpoint_is_the_config_with_its_weights(dtype):
    sample, config = open_model("cats"), open_model(config="cats")
    assert (sample.kind, config.kind) == ("checkpoint", "hand-written")
    assert sample.spec == config.spec
    ids = [sample.tokenizer.encode("Cats sit on mats"), [255]]
    assert torch.equal(Run(sample, ids, dtype).forward("all"), Run(config, ids, dtype).forward("all"))
