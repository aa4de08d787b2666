"""What gets installed: a wheel alone, and the editable checkout, each used from some other working directory."""

import os
import site
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import gptcli

ROOT = Path(__file__).resolve().parent.parent
WHERE = "import gptcli; print(gptcli.__file__)"


def run(*command, cwd, **environment):
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "GPTCLI"))}
    done = subprocess.run(command, cwd=cwd, env=kept | environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT), cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    folder = tmp_path_factory.mktemp("installed")
    options = ["--no-deps", "--no-index", "--quiet", "--disable-pip-version-check", "--target", str(folder)]
    run(sys.executable, "-m", "pip", "install", *options, str(wheel), cwd=folder)
    return folder


@pytest.fixture(params=["wheel", "checkout"])
def python(request, tmp_path):
    """Runs Python in an empty directory, with gptcli from the installed wheel or from the editable checkout.

    For the wheel, -S leaves out the .pth file through which an editable install reaches the checkout; the dependencies'
    folder is named instead.
    """
    if request.param == "checkout":
        return ROOT, lambda *arguments: run(sys.executable, "-P", *arguments, cwd=tmp_path)
    folder = request.getfixturevalue("installed")
    path = os.pathsep.join([str(folder), *site.getsitepackages()])
    return folder, lambda *arguments: run(sys.executable, "-P", "-S", "-s", *arguments, cwd=tmp_path, PYTHONPATH=path)


def test_wheel_holds_the_configs_the_samples_and_no_tests(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    for folder in ("configs", "samples"):
        files = [p for p in (ROOT / folder).rglob("*") if p.is_file() and "__pycache__" not in p.parts]
        assert len(files) > 5
        assert {f"gptcli/_shipped/{p.relative_to(ROOT)}" for p in files} <= set(names)
    page = {f"gptcli/render/page/page.{kind}" for kind in ("html", "css", "js")}
    assert page <= set(names)
    assert {name.split("/")[0] for name in names} == {"gptcli", f"gptcli-{gptcli.__version__}.dist-info"}
    assert not [name for name in names if name.endswith(".pyc")]


def test_wheel_brings_the_command(installed):
    assert (installed / "bin" / "gptcli").is_file()


def test_where_it_is_imported_from(python):
    folder, run_python = python
    assert Path(run_python("-c", WHERE).strip()) == folder / "gptcli" / "__init__.py"
    if folder != ROOT:
        assert str(ROOT) not in run_python("-c", "import sys; print(*sys.path, sep='\\n')").splitlines()


def test_commands_find_what_ships(python):
    """From the documents: mats, 0.9073, comes first after "Cats sit on"; GPT-2 small has 124,439,808 parameters."""
    _, run_python = python
    said = run_python("-m", "gptcli", "forward", "Cats sit on")
    (mats,) = [line for line in said.splitlines() if "mats" in line]
    assert mats.split()[:4] == ["1", "90", "mats", "0.9073"]
    assert run_python("-m", "gptcli", "params", "gpt2-small", "-q").strip() == "124439808"
    assert "␣cat" in run_python("-m", "gptcli", "topk", "-m", "tiny-gpt2", "The cat")
    listed = run_python("-m", "gptcli", "list", "-q").split()
    configs = sorted(p.stem for p in (ROOT / "configs").glob("*.yaml"))
    samples = sorted(p.parent.name for p in (ROOT / "samples").glob("*/*.safetensors"))
    assert listed == [*configs, *samples]
