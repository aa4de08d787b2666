"""A checkpoint's directory as a .gguf file, written with the gguf package by the published rules of conversion.

The names come from the package's own table, so that they are nobody's belief here. What the rules change of tensors:
rows of q and k of the Llama line (put into pairs), norm weights of the Gemma line (plus 1), matrices that lie [in, out]
(turned), fused projections that go head by head (put part by part), experts (stacked).
"""

import json
import math
import zlib
from pathlib import Path

import gguf
import numpy as np
import torch
from gguf import MODEL_ARCH, GGUFWriter, RopeScalingType
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.oracle import save_toy

# By the model_type of a config.json.
ARCHITECTURES = {
    "llama": MODEL_ARCH.LLAMA, "mistral": MODEL_ARCH.LLAMA, "mixtral": MODEL_ARCH.LLAMA, "qwen2": MODEL_ARCH.QWEN2,
    "qwen3": MODEL_ARCH.QWEN3, "gemma": MODEL_ARCH.GEMMA, "gemma2": MODEL_ARCH.GEMMA2,
    "gemma3_text": MODEL_ARCH.GEMMA3, "gpt2": MODEL_ARCH.GPT2, "phi3": MODEL_ARCH.PHI3,
    "starcoder2": MODEL_ARCH.STARCODER2, "gpt_neox": MODEL_ARCH.GPTNEOX, "gpt_oss": MODEL_ARCH.GPT_OSS,
    "smollm3": MODEL_ARCH.SMOLLM3, "olmo2": MODEL_ARCH.OLMO2,
}  # fmt: skip


def exact_toy(config: dict, folder: Path, seed: int = 0) -> torch.nn.Module:
    """oracle.save_toy with weights that float32 holds exactly, and 1 more than them too: multiples of 1/1024."""

    def rounded(x: Tensor) -> Tensor:
        return (x * 1024).round() / 1024

    model = save_toy(config, folder, seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(rounded(parameter))
    tensors = load_file(folder / "model.safetensors")
    tensors = {name: rounded(tensor).float() for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return model


def to_pairs(x: Tensor, heads: int) -> Tensor:
    """Rows i and i + D/2 of every head side by side: [H · D, …]."""
    return x.reshape(heads, 2, x.shape[0] // heads // 2, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)


def drawn(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """Random numbers that a tensor's name decides: norm weights about 1, others about 0."""
    numbers = np.random.default_rng(zlib.crc32(name.encode())).standard_normal(shape) * 0.2
    return (numbers + ("norm" in name and name.endswith("weight"))).astype(np.float32)


def convert(folder: Path, path: Path, draw: bool = False, **options) -> Path:
    """Writes what a directory holds; options: of GGUFWriter (how many tensors a part takes).

    draw: its sizes alone, with weights that depend on the names of the file's tensors, and a list of tokens.
    """
    config = json.loads((folder / "config.json").read_text())
    kind = config["model_type"]
    arch = ARCHITECTURES[kind]
    writer = GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch], **options)
    _settings(writer, config, kind)
    if draw:
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list([f"t{i}" for i in range(config["vocab_size"])])
        writer.add_pad_token_id(0)
    layers = config.get("num_hidden_layers", config.get("n_layer"))
    table = gguf.get_tensor_name_map(arch, layers)
    for name, tensor in _stacked(_written(load_file(folder / "model.safetensors"), config, kind)).items():
        ending = next((end for end in (".weight", ".bias") if name.endswith(end)), "")
        found = table.get_name(name.removesuffix(ending))
        assert found is not None, name
        name = found + ending
        writer.add_tensor(name, drawn(name, tensor.shape) if draw else np.ascontiguousarray(tensor.numpy()))
    for name, values in _rotations(writer, config, kind).items():
        writer.add_tensor(name, np.array(values, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _settings(writer: GGUFWriter, config: dict, kind: str) -> None:
    get = config.get
    heads = get("num_attention_heads", get("n_head"))
    hidden = get("hidden_size", get("n_embd"))
    size = get("head_dim") or hidden // heads
    writer.add_block_count(get("num_hidden_layers", get("n_layer")))
    writer.add_context_length(get("max_position_embeddings", get("n_positions")))
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(get("intermediate_size", 4 * hidden))
    writer.add_head_count(heads)
    writer.add_vocab_size(get("vocab_size"))
    if get("num_key_value_heads") is not None:
        writer.add_head_count_kv(config["num_key_value_heads"])
    if get("head_dim") is not None:
        writer.add_key_length(size)
        writer.add_value_length(size)
    if get("rms_norm_eps") is not None:
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    for word in ("layer_norm_eps", "layer_norm_epsilon", "norm_epsilon"):
        if get(word) is not None:
            writer.add_layer_norm_eps(config[word])
    if get("rope_theta") is not None:
        writer.add_rope_freq_base(config["rope_theta"])
    if get("rope_local_base_freq") is not None:
        writer.add_rope_freq_base_swa(config["rope_local_base_freq"])
    scaling = get("rope_scaling") or {}
    if scaling.get("rope_type") == "linear":
        writer.add_rope_scaling_type(RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(scaling["factor"])
    if scaling.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(RopeScalingType.YARN)
        writer.add_rope_scaling_factor(scaling["factor"])
        writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
        if "beta_fast" in scaling:
            writer.add_rope_scaling_yarn_beta_fast(scaling["beta_fast"])
    if kind in ("llama", "mistral", "mixtral", "smollm3"):
        writer.add_rope_dimension_count(size)
    if kind == "phi3":
        writer.add_rope_dimension_count(int(get("partial_rotary_factor", 1.0) * hidden) // heads)
        writer.add_rope_scaling_orig_ctx_len(get("original_max_position_embeddings", config["max_position_embeddings"]))
        writer.add_sliding_window(get("sliding_window") or 0)
    if kind == "gpt_neox":
        writer.add_rope_dimension_count(int(config["rotary_pct"] * (hidden // heads)))
        writer.add_parallel_residual(get("use_parallel_residual", True))
    if kind in ("gemma2", "gemma3_text", "gpt_oss"):
        writer.add_sliding_window(config["sliding_window"])
    if kind == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    if get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if get("num_local_experts") is not None:
        writer.add_expert_count(config["num_local_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if kind == "gpt_oss":
        writer.add_expert_feed_forward_length(config["intermediate_size"])


def _rotations(writer: GGUFWriter, config: dict, kind: str) -> dict[str, list[float]]:
    """Divisors of frequencies that stand in tensors, computed in float32 as the rules have it."""
    scaling = config.get("rope_scaling") or {}
    size = config.get("head_dim") or config.get("hidden_size", 0) // config.get("num_attention_heads", 1)
    if scaling.get("rope_type") == "llama3":
        frequencies = 1.0 / (config["rope_theta"] ** (torch.arange(0, size, 2, dtype=torch.float32) / size))
        low, high, factor = (scaling[word] for word in ("low_freq_factor", "high_freq_factor", "factor"))
        context, divisors = scaling["original_max_position_embeddings"], []
        for frequency in frequencies.tolist():
            length = 2 * math.pi / frequency
            smooth = (context / length - low) / (high - low)
            middle = 1 / ((1 - smooth) / factor + smooth) if 0 < smooth < 1 else 0.0
            divisors.append(1.0 if length < context / high else factor if length > context / low else middle)
        return {"rope_freqs.weight": divisors}
    if scaling.get("rope_type") == "longrope":
        original = config["original_max_position_embeddings"]
        longer = config["max_position_embeddings"] / original
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(longer) / math.log(original)))
        return {f"rope_factors_{word}.weight": scaling[f"{word}_factor"] for word in ("long", "short")}
    return {}


def _written(tensors: dict[str, Tensor], config: dict, kind: str) -> dict[str, Tensor]:
    """Tensors as the rules change them, still by their own names."""
    heads, kv_heads = (config.get(f"num_{word}_heads") for word in ("attention", "key_value"))
    found = {}
    for name, x in tensors.items():
        if kind in ("llama", "mistral", "mixtral", "smollm3") and ".q_proj." in name:
            x = to_pairs(x, heads)
        if kind in ("llama", "mistral", "mixtral", "smollm3") and ".k_proj." in name:
            x = to_pairs(x, kv_heads)
        if kind.startswith("gemma") and name.endswith("norm.weight"):
            x = x + 1
        if kind == "gpt2" and name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight")):
            x = x.T
        if kind == "gpt_neox" and ".query_key_value." in name:
            size = config["hidden_size"] // heads
            x = x.reshape(heads, 3, size, *x.shape[1:]).transpose(0, 1).reshape(x.shape)
        if kind == "gpt_oss" and name.endswith("sinks"):
            name += ".weight"
        if kind == "gpt_oss" and ".experts." in name:
            name = name.replace("_bias", ".bias") if name.endswith("_bias") else f"{name}.weight"
            x = x if name.endswith("bias") else x.transpose(-1, -2)
            if "gate_up_proj" in name:
                for part, word in enumerate(("gate_proj", "up_proj")):
                    found[name.replace("gate_up_proj", word)] = x[:, part::2]
                continue
        found[name] = x
    return found


def _stacked(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Experts that have a tensor each become one tensor, under the name that the package's table has for it."""
    found: dict[str, Tensor] = {}
    stacks: dict[str, dict[int, Tensor]] = {}
    for name, x in tensors.items():
        if ".block_sparse_moe.experts." not in name:
            found[name] = x
            continue
        layer, expert, word = name.split(".")[2], int(name.split(".")[5]), name.split(".")[6]
        stacks.setdefault(f"layers.{layer}.feed_forward.experts.{word}.weight", {})[expert] = x
    return found | {name: torch.stack([stack[i] for i in sorted(stack)]) for name, stack in stacks.items()}
