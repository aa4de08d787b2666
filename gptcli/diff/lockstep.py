"""Several runs side by side: each activation is shown of all of them as soon as the last has it, and nothing is kept.

The first side runs in the caller's thread, each other one in a thread of its own that computes only while the first
waits for it: never two at once.
"""

import threading
from collections.abc import Callable, Collection, Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from gptcli.run import Run
from gptcli.trace import EVERYTHING, Selection, Silent, points

if TYPE_CHECKING:
    from torch import Tensor


class _Enough(BaseException):
    """Ends a forward pass from within its probe."""


class _Watch(Silent):
    """A probe that shows what is wanted. Scores and weights are computed for who wants them."""

    def __init__(self, wanted: Collection[str], show: Callable[[str, Any], None], scope: str = ""):
        self.wanted, self.show, self.scope = wanted, show, scope

    def at(self, scope: str) -> "_Watch":
        return _Watch(self.wanted, self.show, f"{self.scope}{scope}.")

    def __call__(self, name: str, x: Any) -> Any:
        if self.scope + name in self.wanted:
            self.show(self.scope + name, x)
        return x

    def selection(self, name: str) -> Selection | None:
        return EVERYTHING if self.scope + name in self.wanted else None


class _Other:
    """A side in a thread of its own, which runs on to its next activation when it is asked for one."""

    def __init__(self, run: Run, wanted: Collection[str]):
        import torch

        self.run, self.wanted, self.cores, self.first_s = run, wanted, torch.get_num_threads(), _defaults()
        self.go: SimpleQueue[bool] = SimpleQueue()
        self.born: SimpleQueue[tuple[str, Any] | BaseException | None] = SimpleQueue()
        self.early: dict[str, Any] = {}  # born before the first side's own
        self.ended = False
        self.thread = threading.Thread(target=self._work, daemon=True)
        self.thread.start()

    def _work(self) -> None:
        import torch

        try:
            self._wait()
            torch.set_num_threads(self.cores)  # which each thread has for itself
            self.run.forward("all", _Watch(self.wanted, self._show))
            self.born.put(None)
        except _Enough:
            pass
        except BaseException as error:
            self.born.put(error)

    def _wait(self) -> None:
        if not self.go.get():
            raise _Enough

    def _show(self, path: str, x: Any) -> None:
        mine = _defaults()
        _set_defaults(*self.first_s)
        self.born.put((path, x))
        self._wait()
        _set_defaults(*mine)

    def of(self, path: str) -> "Tensor | None":
        """Its activation of that name; None where it ends without one. Raises what went wrong in it."""
        while path not in self.early and not self.ended:
            self.go.put(True)
            found = self.born.get()
            if isinstance(found, BaseException):
                raise found
            if found is None:
                self.ended = True
            else:
                self.early[found[0]] = found[1]
        return self.early.pop(path, None)

    def stop(self) -> None:
        self.go.put(False)
        self.thread.join()


def _defaults() -> tuple[Any, Any]:
    """The type of numbers that are made without one: of the whole process, and some sides change it while they run."""
    import torch

    return torch.get_default_dtype(), torch.FloatTensor


def _set_defaults(dtype: Any, single: Any) -> None:
    import torch

    torch.set_default_dtype(dtype)
    torch.FloatTensor = single


def common(*sides: Run) -> list[str]:
    """The activations that all of them have, in the first one's order of birth."""
    known = [{path for path, _ in points(side.model.spec) if side.holds(path)} for side in sides]
    return [path for path, _ in points(sides[0].model.spec) if all(path in paths for paths in known)]


def abreast(sides: Sequence[Run], look: Callable[..., bool], paths: Collection[str]) -> None:
    """look(path, x, y, …) of the activations that are in paths and that every side has, each once, in the first one's
    order of birth. False from it ends them all; so does an error in any of them, which is raised.
    """
    wanted = set(common(*sides)) & set(paths)
    others = [_Other(side, wanted) for side in sides[1:]]

    def meet(path: str, x: Any) -> None:
        theirs = [other.of(path) for other in others]
        if not any(y is None for y in theirs) and not look(path, x, *theirs):
            raise _Enough

    try:
        sides[0].forward("all", _Watch(wanted, meet))
    except _Enough:
        pass
    finally:
        for other in others:
            other.stop()


def together(a: Run, b: Run, look: "Callable[[str, Tensor, Tensor], bool]", paths: Collection[str]) -> None:
    """Two sides abreast: look(path, x of a, y of b)."""
    abreast((a, b), look, paths)
