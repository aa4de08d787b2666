"""What hooks on another library's modules catch while it runs, shown to a probe in our axes and our order of birth."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from gptcli.report.capture import on_the_side, size_of
from gptcli.trace import BESIDE, Silent, points

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module

    from gptcli.checkpoint.bind import Bound
    from gptcli.diff.reference import Reference

EAGER = "eager_attention_forward"  # what a module of the library calls its attention written out


class Tap(NamedTuple):
    """Where an activation is read: what goes `in` to a module or comes `out` of it, the softmax `weights` that it hands
    back beside, or the `query` or `key` that its attention is given. bound: its share of what comes out.
    """

    module: str
    side: Literal["in", "out", "weights", "query", "key"]
    bound: "Bound | None" = None


class Births:
    """Shows a probe what hooks catch, in order of birth: what comes early waits.

    What a run changes for the whole process (types by default, the library's attention) is put back while a probe
    looks: other runs may go on meanwhile.
    """

    def __init__(self, run: "Reference", probe: Silent):
        self.run, self.probe = run, probe
        self.sizes = {path: (axes, shape) for path, axes, shape in size_of(run).points()}
        self.order = [path for path, _ in points(run.model.spec) if run.holds(path)]
        self.early: dict[str, Tensor] = {}
        self.asked: dict[Module, list[tuple[str, str]]] = {}  # of attention that is listened to
        self.changes = ExitStack()

    @contextmanager
    def listening(self) -> Iterator[None]:
        """With hooks on the library's modules, and an ear before each attention that tells what it is given."""
        with ExitStack() as hooks:
            for path, tap in self.run.taps.items():
                module = self.run.modules[tap.module]
                if tap.side == "in":
                    hooks.callback(module.register_forward_pre_hook(self._into(path), with_kwargs=True).remove)
                elif tap.side in ("query", "key"):
                    self.asked.setdefault(module, []).append((path, tap.side))
                else:
                    hooks.callback(module.register_forward_hook(self._out(path, tap)).remove)
            hooks.callback(lambda: self.changes.close())
            self._change()
            yield

    def _change(self) -> None:
        self.changes.enter_context(self.run.typed())
        for home in {sys.modules[type(module).__module__] for module in self.asked}:
            own = getattr(home, EAGER)
            self.changes.callback(setattr, home, EAGER, own)
            setattr(home, EAGER, self._ear(own))

    def _into(self, path: str) -> Callable[..., None]:
        def hook(module: "Module", args: tuple, kwargs: dict) -> None:
            self.note(path, args[0] if args else kwargs["hidden_states"])

        return hook

    def _out(self, path: str, tap: Tap) -> Callable[..., None]:
        def hook(module: "Module", args: tuple, given: Any) -> None:
            given = given if isinstance(given, tuple) else (given,)
            # After an attention's output may stand a table of biases, and then its weights.
            found = given[:1] if tap.side == "out" else [x for x in given[1:] if x is not None and x.ndim == 4]
            if found:
                self.note(path, found[-1], tap.bound)

        return hook

    def _ear(self, own: Callable) -> Callable:
        def attend(module: "Module", query: "Tensor", key: "Tensor", *args: Any, **kwargs: Any) -> Any:
            for path, side in self.asked.get(module, ()):
                self.note(path, query if side == "query" else key)
            return own(module, query, key, *args, **kwargs)

        return attend

    def note(self, path: str, x: "Tensor", bound: "Bound | None" = None) -> None:
        """What was born, and with it all that has waited for it, goes to the probe."""
        self.early[path] = share(x, bound)
        self.changes.close()
        try:
            while self.order and self.order[0] in self.early:
                self._show(self.order.pop(0))
        finally:
            self._change()

    def finish(self) -> None:
        """What has waited in vain is shown all the same: a hook that never fired holds up nothing."""
        for path in self.order:
            if path in self.early:
                self._show(path)

    def _show(self, path: str) -> None:
        axes, shape = self.sizes[path]
        x, (scope, _, name) = shaped(self.early.pop(path), axes, shape), path.rpartition(".")
        here = self.probe.at(scope) if scope else self.probe
        if name in BESIDE:
            on_the_side({name: x}, here)
        else:
            here(name, x)


def share(x: "Tensor", bound: "Bound | None") -> "Tensor":
    """One part of what a fused projection gives: [..., out] → [..., its own rows of out]."""
    from gptcli.model.load import cut

    if bound is None:
        return x
    return cut(x.movedim(-1, 0), bound._replace(transposed=False, item=None)).movedim(0, -1)


def shaped(x: "Tensor", axes: str, shape: tuple[int, ...]) -> "Tensor":
    """In our axes: the library's texts and positions may share one, its heads may stand after positions."""
    if tuple(x.shape) != shape and len(axes) == 4:
        batch, heads, length, size = shape
        return x.reshape(batch, length, heads, size).transpose(1, 2)  # [B, T, H·D] or [B, T, H, D] → [B, H, T, D]
    return x.reshape(shape)
