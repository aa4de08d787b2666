"""What a model costs each of several ranks that run it together (`--parallel tensor`): arithmetic, as in costs.py."""

from math import prod

from gptcli import count
from gptcli.data import data
from gptcli.layout import layout
from gptcli.memory import peak
from gptcli.shard import axis, local, span, splits, whole
from gptcli.spec import Dense, Experts, Spec


@data
class Share:
    """What one of so many ranks holds, in bytes: of the weights, the cache after T tokens, and a pass at its peak."""

    ranks: int
    weights: int
    cache: int
    activations: int
    bytes: int
    fits: bool | None


@data
class Devices:
    """One rank's share; its FLOPs for T tokens (the head on the last) and for one token more; bytes that it sends for
    each token in the sums of partial products (`sums` of them), for each position whose logits are gathered, and for
    each token of a source in the encoder's sums (None without an encoder).

    whole: what every rank computes by itself, and why; plan: shares of other numbers of ranks, up to the first that
    fits into `memory` bytes.
    """

    share: Share
    memory: int | None
    flops: int
    flops_next: int
    sums: int
    sent: int
    gathered: int
    source_sums: int | None
    source_sent: int | None
    whole: list[str]
    plan: list[Share]


def devices_of(spec: Spec, ranks: int, tokens: int, batch: int, source: int, dtype: str, memory: int | None) -> Devices:
    """Of B texts of T tokens (and of S of a source) in that type. The embedding's table is read from the file."""
    here, rows = local(spec, ranks), -(-spec.vocab_size // ranks)  # rows of the head that a rank has

    def flops(tokens: int, before: int = 0) -> int:
        spared = (
            0 if spec.lm_head is None else 2 * batch * (spec.vocab_size - rows) * (spec.embed_size or spec.hidden_size)
        )
        return sum(count.flops_by_part(here, tokens, batch, True, 1, source, before).values()) - spared

    wide, encoder = max(4, count.ITEM_BYTES[dtype]), spec.encoder
    plan = []
    for number in _numbers(spec, ranks) if memory is not None else ():
        plan.append(_share(spec, number, tokens, batch, source, dtype, memory))
        if plan[-1].fits:
            break
    return Devices(
        share=_share(spec, ranks, tokens, batch, source, dtype, memory),
        memory=memory,
        flops=flops(tokens),
        flops_next=flops(1, tokens),
        sums=_sums(spec, ranks),
        sent=_sent(spec, ranks, wide),
        gathered=(ranks - 1) * rows * wide if spec.lm_head is not None else 0,
        source_sums=None if encoder is None else _sums(encoder, ranks),
        source_sent=None if encoder is None else _sent(encoder, ranks, wide),
        whole=whole(spec, ranks),
        plan=plan,
    )


def _numbers(spec: Spec, ranks: int) -> list[int]:
    """Ranks that a plan tries: those that its heads divide into, and the number that was asked for."""
    heads = spec.attention.n_heads
    return sorted({ranks, *(number for number in range(1, heads + 1) if heads % number == 0)})


def _share(spec: Spec, ranks: int, tokens: int, batch: int, source: int, dtype: str, memory: int | None) -> Share:
    here, item = local(spec, ranks), count.ITEM_BYTES[dtype]
    weights = 0
    for param in layout(spec):
        if param.role == "table":
            continue
        cut = axis(param, spec, ranks)
        own = 1 if cut is None else span(param.shape[cut], ranks, 0).stop
        weights += item * prod(size for i, size in enumerate(param.shape) if i != cut) * own
    cache = count.kv_cache_bytes(here, tokens, item, batch, source)
    activations = peak(here, tokens, dtype, batch, "last", source).bytes
    held = weights + cache + activations
    return Share(
        ranks=ranks,
        weights=weights,
        cache=cache,
        activations=activations,
        bytes=held,
        fits=None if memory is None else held <= memory,
    )


def _sent(stack: Spec, ranks: int, wide: int) -> int:
    """Bytes that a rank of a ring sends in a stack's sums for one token, its numbers of `wide` bytes."""
    return 2 * (ranks - 1) * _sums(stack, ranks) * stack.hidden_size * wide // ranks


def _sums(stack: Spec, ranks: int) -> int:
    """Sums of partial products that one token goes through in a stack."""
    total = 0
    for here, layers in count.kinds(stack):
        a, cross, mlp = here.attention, here.cross, here.mlp
        each = splits(a, ranks) + (cross is not None and splits(cross, ranks))
        if isinstance(mlp, Dense):
            each += mlp.size % ranks == 0
        if isinstance(mlp, Experts):
            each += mlp.top_k * (mlp.size % ranks == 0)
            each += mlp.shared_size is not None and mlp.shared_size % ranks == 0
        total += each * len(layers)
    return total
