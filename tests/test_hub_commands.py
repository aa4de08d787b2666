"""A name on the Hub as the commands take it: from the cache, without the network."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gptcli.shipped import samples

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def home(tmp_path) -> Path:
    """A cache that holds the sample GPT-2 as org/tiny, in the layout that the Hub's library documents."""
    at = tmp_path / "hub" / "models--org--tiny"
    (at / "refs").mkdir(parents=True)
    (at / "refs" / "main").write_text(COMMIT)
    shutil.copytree(samples()["tiny-gpt2"], at / "snapshots" / COMMIT)
    return tmp_path


def gptcli(home: Path, *words: str) -> subprocess.CompletedProcess:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "GPTCLI_"))}
    environment |= {"HF_HOME": str(home), "HF_ENDPOINT": "http://127.0.0.1:9", "PYTHONUTF8": "1"}
    command = [sys.executable, "-m", "gptcli", *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL)


def test_a_cached_name_runs_as_its_directory_does(home):
    from_hub = json.loads(gptcli(home, "topk", "-m", "org/tiny", "The cat", "--json", "--offline").stdout)
    from_disk = json.loads(gptcli(home, "topk", "-m", "tiny-gpt2", "The cat", "--json").stdout)
    assert from_hub["next"] == from_disk["next"]
    assert (from_hub["model"]["name"], from_hub["model"]["source"]) == ("tiny", "Hub, main at 0123456")
    assert gptcli(home, "params", "org/tiny", "-q").stdout == "37760\n"


def test_list_names_what_the_cache_holds(home):
    found = json.loads(gptcli(home, "list", "--json").stdout)["cached"]
    size = sum(path.stat().st_size for path in samples()["tiny-gpt2"].iterdir())
    assert found == [{"name": "org/tiny", "revision": "main", "bytes": size}]
    assert "org/tiny" in gptcli(home, "list").stdout and gptcli(home, "list", "-q").stdout.endswith("org/tiny\n")


@pytest.mark.parametrize(
    "words, said",
    [
        (["topk", "-m", "org/other", "--ids", "1", "--offline"], "not in the cache"),
        (["topk", "-m", "org/tiny", "--revision", "v2", "--ids", "1", "--offline"], "not in the cache"),
        (["topk", "-m", "org/other", "--ids", "1"], "can't be reached"),
        (["topk", "-m", "gpt2-smal", "--ids", "1", "--offline"], 'did you mean "gpt2-small"?'),
        (["params", "cats", "--revision", "v2"], "only a name on the Hub has revisions"),
        (["params", "./org/tiny"], "no such file or directory"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_is_not_there_is_one_line(home, words, said):
    ran = gptcli(home, *words)
    assert ran.returncode == 2 and not ran.stdout
    assert said in ran.stderr and ran.stderr.count("\n") == 1
