"""A PEFT adapter's directory is told for what it is: its config, its low-rank tensors, and whether they agree."""

import json
import subprocess
import sys
from math import sqrt
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from gptcli.checkpoint.adapter import Adapter, Touched, is_adapter, read, refuse
from gptcli.errors import GptcliError
from tests.command import gptcli
from tests.packed_toys import LLAMA

C, F, LAYERS, RANK = 64, 96, 3, 8
BASE = "meta-llama/Llama-3.1-8B"
# What PEFT writes for LoRA, with the keys that are of interest.
CONFIG = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": BASE,
    "revision": None,
    "r": RANK,
    "lora_alpha": 16,
    "lora_dropout": 0.05,
    "bias": "none",
    "fan_in_fan_out": False,
    "target_modules": ["q_proj", "down_proj"],
    "modules_to_save": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "use_dora": False,
    "use_rslora": False,
}


def pair(module: str, out: int, into: int, rank: int = RANK, name: str = "") -> dict[str, Tensor]:
    """A and B of a matrix [out, in] as PEFT saves them."""
    at = f"base_model.model.{module}"
    return {
        f"{at}.lora_A{name}.weight": torch.zeros(rank, into),
        f"{at}.lora_B{name}.weight": torch.zeros(out, rank),
    }


def lora(layers: int = LAYERS) -> dict[str, Tensor]:
    """q and down of every layer."""
    tensors: dict[str, Tensor] = {}
    for layer in range(layers):
        at = f"model.layers.{layer}"
        tensors |= pair(f"{at}.self_attn.q_proj", C, C) | pair(f"{at}.mlp.down_proj", C, F)
    return tensors


def written(folder: Path, tensors: dict[str, Tensor] | None = None, **changes: object) -> Path:
    save_file(lora() if tensors is None else tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps(CONFIG | changes))
    return folder


def faults(found: Adapter) -> list[tuple[str, str]]:
    return [(fault.code, fault.said) for fault in found.faults]


def test_what_a_directory_holds(tmp_path):
    found = read(written(tmp_path))
    numbers = LAYERS * RANK * ((C + C) + (F + C))  # A is [rank, in], B [out, rank]
    assert found.parameters == found.low_rank == numbers and found.bytes == 4 * numbers
    assert (found.kind, found.base, found.revision, found.task) == ("LORA", BASE, "", "CAUSAL_LM")
    assert (found.rank, found.alpha, found.ranks, found.bias) == (RANK, 16, {RANK: 2 * LAYERS}, "none")
    assert (found.dora, found.rslora, found.saved, found.biases) == (False, False, {}, 0)
    assert found.targets == ["down_proj", "q_proj"] and found.dtypes == {"F32": numbers}
    assert sorted(found.touched, key=lambda one: one.module, reverse=True) == [
        Touched(
            module="self_attn.q_proj",
            layers=[0, 1, 2],
            shape=[C, C],
            rank=RANK,
            alpha=16,
            scale=2.0,
            parameters=LAYERS * RANK * 2 * C,
        ),
        Touched(
            module="mlp.down_proj",
            layers=[0, 1, 2],
            shape=[C, F],
            rank=RANK,
            alpha=16,
            scale=2.0,
            parameters=LAYERS * RANK * (F + C),
        ),
    ]
    assert not found.faults
    assert found.said == f"a PEFT adapter (LORA, rank 8) for '{BASE}'"


def test_a_pickle_is_listed_as_well(tmp_path):
    written(tmp_path)
    (tmp_path / "adapter_model.safetensors").unlink()
    torch.save(lora(), tmp_path / "adapter_model.bin")
    found = read(tmp_path)
    assert found.file == "adapter_model.bin" and len(found.touched) == 2 and not found.faults


def test_patterns_change_rank_and_alpha_of_some_modules(tmp_path):
    """A key is the end of a module's name, or a regular expression for it (`(.*\\.)?key`)."""
    tensors = (
        lora() | pair("model.layers.1.self_attn.q_proj", C, C, rank=4) | pair("model.layers.2.mlp.down_proj", C, F, 2)
    )
    patterns = {"layers.1.self_attn.q_proj": 4, r"^model\.layers\.2\..*down_proj": 2}
    found = read(written(tmp_path, tensors, rank_pattern=patterns, alpha_pattern={"q_proj": 32}, use_rslora=True))
    assert not found.faults and found.ranks == {2: 1, 4: 1, RANK: 4} and found.rslora
    rows = {(one.module, one.rank): one for one in found.touched}
    assert rows["self_attn.q_proj", RANK].layers == [0, 2] and rows["self_attn.q_proj", 4].layers == [1]
    assert rows["self_attn.q_proj", RANK].scale == 32 / sqrt(RANK) and rows["self_attn.q_proj", 4].scale == 16
    assert rows["mlp.down_proj", 2].scale == 16 / sqrt(2) and rows["mlp.down_proj", 2].alpha == 16


@pytest.mark.parametrize("pattern", ["(a+)+$", "(.*)*x", "((a|aa)+)+", "[", "*", ".*.*.*.*.*x", "(?:a*)*b"])
def test_a_pattern_that_would_take_for_ever_takes_no_time(pattern, tmp_path):
    tensors = pair("a" * 5000, C, C) | pair("a" * 60, C, C)
    found = read(written(tmp_path, tensors, rank_pattern={pattern: 4}, target_modules=["a" * 60]))
    assert len(found.touched) == 2


def test_a_name_of_the_adapter_s_own_and_every_other_kind_of_tensor(tmp_path):
    """An adapter's name within names, an embedding's table, DoRA's magnitudes, biases and whole modules."""
    tensors = pair("model.layers.0.self_attn.q_proj", C, C, name=".default")
    tensors |= {
        "base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector": torch.zeros(C),
        "base_model.model.model.embed_tokens.lora_embedding_A": torch.zeros(RANK, 97),
        "base_model.model.model.embed_tokens.lora_embedding_B": torch.zeros(C, RANK),
        "base_model.model.model.embed_tokens.lora_magnitude_vector": torch.zeros(C),
        "base_model.model.model.layers.0.self_attn.q_proj.bias": torch.zeros(C),
        "base_model.model.model.layers.0.self_attn.q_proj.lora_B.bias": torch.zeros(C),
        "base_model.model.lm_head.modules_to_save.weight": torch.zeros(97, C),
    }
    changes = {"use_dora": True, "bias": "lora_only", "modules_to_save": ["lm_head"]}
    found = read(written(tmp_path, tensors, target_modules=["q_proj", "embed_tokens"], **changes))
    assert not found.faults, found.faults
    assert found.dora and found.bias == "lora_only" and found.biases == 2 * C
    assert found.saved == {"lm_head": 97 * C}
    table, q = sorted(found.touched, key=lambda one: one.module)
    assert (q.module, q.layers, q.shape, q.parameters) == ("self_attn.q_proj", [0], [C, C], 2 * RANK * C + C)
    assert (table.module, table.layers, table.shape) == ("model.embed_tokens", [], [97, C])
    assert found.parameters == sum(tensor.numel() for tensor in tensors.values())


AT = "model.layers.1.self_attn.q_proj"


def without(name: str) -> dict[str, Tensor]:
    return {one: tensor for one, tensor in lora().items() if one != f"base_model.model.{AT}.{name}"}


WRONG = {
    "no A": (without("lora_A.weight"), {}, "incomplete", f"'{AT}' has no lora_A"),
    "no B": (without("lora_B.weight"), {}, "incomplete", f"'{AT}' has no lora_B"),
    "another rank than the config's": (
        lora() | pair(AT, C, C, rank=4),
        {},
        "mismatch",
        f"'{AT}' has rank 4, and the config says 8",
    ),
    "A and B of two ranks": (
        lora() | {f"base_model.model.{AT}.lora_B.weight": torch.zeros(C, 4)},
        {},
        "mismatch",
        f"'{AT}' has A [8, 64] and B [64, 4], with no rank in common",
    ),
    "B of one axis": (
        lora() | {f"base_model.model.{AT}.lora_B.weight": torch.zeros(C)},
        {},
        "mismatch",
        f"'{AT}' has A [8, 64] and B [64], with no rank in common",
    ),
    "a rank of zero": (lora() | pair(AT, C, C, rank=0), {}, "mismatch", "with no rank in common"),
    "a target that nothing changes": (
        lora(),
        {"target_modules": ["q_proj", "down_proj", "k_proj"]},
        "mismatch",
        "the config targets 'k_proj', and no tensor changes such a module",
    ),
    "no magnitude": (lora(), {"use_dora": True}, "incomplete", "has no lora_magnitude_vector, which use_dora asks for"),
    "a magnitude": (
        lora() | {f"base_model.model.{AT}.lora_magnitude_vector": torch.zeros(C)},
        {},
        "mismatch",
        f"'{AT}' has a lora_magnitude_vector, and the config has no use_dora",
    ),
    "a magnitude of another size": (
        {name: tensor for name, tensor in lora().items() if AT in name}
        | {f"base_model.model.{AT}.lora_magnitude_vector": torch.zeros(C + 1)},
        {"use_dora": True, "target_modules": ["q_proj"]},
        "mismatch",
        f"'{AT}' has a lora_magnitude_vector [65] for 64 outputs",
    ),
    "a tensor of no known kind": (
        lora() | {"base_model.model.strange.weight": torch.zeros(2)},
        {},
        "mismatch",
        "tensor 'base_model.model.strange.weight' is no part of what is known",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_a_fault(name, tmp_path):
    tensors, changes, code, said = WRONG[name]
    found = faults(read(written(tmp_path, tensors, **changes)))
    assert any(one == code and said in text for one, text in found), found
    if not changes.get("use_dora"):
        assert len(found) == 1


def test_a_directory_without_its_weights_is_incomplete(tmp_path):
    written(tmp_path)
    (tmp_path / "adapter_model.safetensors").unlink()
    found = read(tmp_path)
    assert faults(found) == [("incomplete", "adapter_model.safetensors or adapter_model.bin is missing")]
    assert found.rank == RANK and found.parameters == 0


def test_ranks_of_experts_side_by_side_are_no_fault(tmp_path):
    """PEFT's target_parameters keep all experts' ranks in one tensor: 4 experts of rank 8."""
    tensors = pair("model.layers.0.mlp.experts", 96, C, rank=4 * RANK)
    changes = {"target_parameters": ["mlp.experts.gate_up_proj"], "target_modules": []}
    assert read(written(tmp_path, tensors, **changes)).faults == []
    assert read(written(tmp_path, tensors, target_modules=[])).faults != []


@pytest.mark.parametrize("kind", ["IA3", "PREFIX_TUNING"])
def test_other_kinds_are_named_and_not_looked_into(kind, tmp_path):
    found = read(written(tmp_path, {"prompt_embeddings": torch.zeros(4, C)}, peft_type=kind))
    assert (found.kind, found.touched, found.faults, found.rank) == (kind, [], [], 0)
    assert found.parameters == 4 * C and found.said == f"a PEFT adapter ({kind}) for '{BASE}'"


@pytest.mark.parametrize(
    "changes",
    [
        {"r": "8"},
        {"r": 0},
        {"r": 3.5},
        {"r": True},
        {"lora_alpha": -1},
        {"lora_alpha": float("nan")},
        {"target_modules": {"q_proj": 1}},
        {"modules_to_save": "lm_head"},
        {"base_model_name_or_path": 7},
        {"rank_pattern": [4]},
        {"alpha_pattern": {"q_proj": "x"}},
    ],
    ids=str,
)
def test_a_config_of_no_use_is_refused_by_its_key(changes, tmp_path):
    with pytest.raises(GptcliError, match=rf"adapter_config\.json: {next(iter(changes))}: ") as caught:
        read(written(tmp_path, **changes))
    assert "\n" not in str(caught.value)


def test_regular_expressions_as_targets_are_told(tmp_path):
    assert read(written(tmp_path, target_modules=".*(q|down)_proj")).targets == [".*(q|down)_proj"]
    assert read(written(tmp_path, target_modules="all-linear")).faults == []


# What commands do with one


@pytest.mark.parametrize("named", ["directory", "file"])
@pytest.mark.parametrize("command", ["forward", "params"])
def test_commands_refuse_an_adapter_in_one_line_that_names_its_model(command, named, tmp_path):
    written(tmp_path)
    path = tmp_path if named == "directory" else tmp_path / "adapter_model.safetensors"
    ran = gptcli(command, "-m", path, *(["--ids", "1,2"] if command == "forward" else []))
    assert ran.status == 2 and not ran.out and ran.err.count("\n") == 1
    said = f"{path}: a PEFT adapter (LORA, rank 8) for '{BASE}', not a model of its own; give that model by -m {BASE}"
    assert said in ran.err


def test_a_base_with_escapes_in_its_name_reaches_no_terminal(tmp_path):
    written(tmp_path, base_model_name_or_path="\x1b[31mred\nmodel", peft_type="\x1b[31m")
    with pytest.raises(GptcliError) as caught:
        refuse(tmp_path)
    assert "\x1b" not in str(caught.value) and "\n" not in str(caught.value)


def test_a_model_with_an_adapter_beside_it_is_a_model(tmp_path):
    assert is_adapter(written(tmp_path)) and is_adapter(tmp_path / "adapter_model.safetensors")
    for name in ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"):
        (tmp_path / name).touch()
        assert not is_adapter(tmp_path) and not is_adapter(tmp_path / name)
        (tmp_path / name).unlink()
    assert is_adapter(tmp_path)
    (tmp_path / "adapter_config.json").unlink()
    assert not is_adapter(tmp_path)
    refuse(tmp_path)


def test_a_model_s_directory_with_an_adapter_s_file_opens(tmp_path):
    from tests.oracle import save_toy

    save_toy(LLAMA, tmp_path)
    written(tmp_path)
    ran = gptcli("params", tmp_path, "--json")
    assert ran.status == 0 and "adapter_model.safetensors" in " ".join(ran.json["model"]["notes"])


def test_reading_one_loads_no_torch(tmp_path):
    written(tmp_path)
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from gptcli.checkpoint.adapter import read\n"
        f"print(read(Path({str(tmp_path)!r})).rank, {{'torch', 'numpy', 'safetensors'}} & set(sys.modules))\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.stdout == f"{RANK} set()\n"
