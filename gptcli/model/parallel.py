"""One model on several ranks: each holds its share of the weights, and partial products are joined where they are made.

Started by torchrun, one process a rank; gloo joins tensors on CPUs, nccl on CUDA devices. No GPU has run this.
"""

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from gptcli.errors import GptcliError
from gptcli.layout import Param, layout
from gptcli.model.ops import wide
from gptcli.model.weights import EVERY_ROW, Lazy, Weights
from gptcli.shard import axis, called, span, summed
from gptcli.spec import Spec

PATIENCE = timedelta(minutes=5)  # how long a rank waits for another that is alive


class Group(Protocol):
    """The ranks that compute together: which of them this is, and how many there are."""

    rank: int
    ranks: int

    def sum(self, x: Tensor) -> Tensor:
        """The sum of what each rank gives, on every rank."""

    def concat(self, x: Tensor) -> Tensor:
        """What each rank gives, alike in shape, side by side along the last axis, on every rank."""


class Processes:
    """The processes that torchrun started. Raises GptcliError where it started none, and where another has gone."""

    def __init__(self, device: torch.device):
        if "TORCHELASTIC_RUN_ID" not in os.environ:
            hint = "start it as `torchrun --nproc-per-node 2 -m gptcli …`"
            raise GptcliError("--parallel tensor: this is one process alone", hint, "parallel")
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=PATIENCE)
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()

    def sum(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        self._join(lambda: dist.all_reduce(x))
        return x

    def concat(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.ranks)]
        self._join(lambda: dist.all_gather(parts, x))
        return torch.cat(parts, -1)

    def _join(self, how: Callable[[], object]) -> None:
        try:
            how()
        except RuntimeError as error:
            raise lost(self, str(error).splitlines()[0][:100]) from None


def lost(group: Group, how: str) -> GptcliError:
    """What a rank says when another has gone."""
    hint = "its own message, if it left one, stands above; start all of them again"
    return GptcliError(f"rank {group.rank} of {group.ranks} has lost another ({how})", hint, "parallel")


def own_device(wanted: str) -> str:
    """The CUDA device that is this process's among those of its machine; of `auto`, the CPU where there is none."""
    local = int(os.environ.get("LOCAL_RANK", 0))
    return f"cuda:{local}" if wanted == "cuda" or local < torch.cuda.device_count() else "cpu"


def first_to_tell() -> bool:
    """Is this the first of the ranks that has something to say? True where nobody else can be asked."""
    with suppress(Exception):
        store = dist.distributed_c10d._get_default_store()
        return store.add("gptcli/told", 1) == 1
    return True


class Shared(Weights):
    """A rank's share of the weights. joined: partial products added up, and the parts of the logits put together."""

    def __init__(self, tensors: Lazy, group: Group, sums: frozenset[str], vocabulary: int, scope: str = ""):
        super().__init__(tensors, scope=scope)
        self.group, self.sums, self.vocabulary = group, sums, vocabulary

    def at(self, scope: str) -> "Shared":
        return Shared(self.tensors, self.group, self.sums, self.vocabulary, f"{self.scope}{scope}.")

    def joined(self, name: str, x: Tensor) -> Tensor:
        path = self.scope + name
        if path in self.sums:
            return self.group.sum(x.to(wide(x.dtype))).to(x.dtype)
        if path != "lm_head":
            return x
        step = -(-self.vocabulary // self.group.ranks)
        padded = torch.nn.functional.pad(x, (0, step - x.shape[-1]))
        return self.group.concat(padded)[..., : self.vocabulary]


def shared(weights: Weights, spec: Spec, group: Group) -> Shared:
    """A rank's share of these weights, each cut out when it is first read, and kept."""
    sums = frozenset(summed(spec, group.ranks))
    params = list(layout(spec))
    makers = dict(_makers(weights, params, spec, group, sums))
    tables = {param.name for param in params if param.role == "table"}  # read by rows, from where they lie
    vocabulary = next((param.shape[0] for param in params if param.name == "lm_head.weight"), 0)
    return Shared(Lazy(makers, tables - {"rel_bias.weight", "encoder.rel_bias.weight"}), group, sums, vocabulary)


def _makers(
    weights: Weights, params: Iterable[Param], spec: Spec, group: Group, sums: frozenset[str]
) -> Iterator[tuple[str, Callable[..., Tensor]]]:
    for param in params:
        name, stem = param.name, param.name.removesuffix(".bias")
        if name not in weights or (stem != name and stem in sums and group.rank > 0):
            continue  # a bias beside partial products is added once, by the first rank
        cut = axis(param, spec, group.ranks)
        part = None if cut is None else span(param.shape[cut], group.ranks, group.rank)
        if cut == 0:
            yield name, lambda name=name, part=part: weights.rows(name, part)
        elif cut == 1:
            yield name, lambda name=name, part=part: weights[name][:, part].contiguous()
        elif (own := called(param, spec, group.ranks, group.rank)) is not None:
            yield own, lambda name=name: weights[name]
        elif param.role == "table":
            yield name, lambda rows=EVERY_ROW, name=name: weights.rows(name, rows)
