"""A bar on standard error while something long goes on, where a person watches it."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress(what: str, size: int) -> Iterator[Callable[[int], object]]:
    """Gives a step that is told the bytes done, of `size` in all. Nothing is drawn where nobody looks."""
    if not sys.stderr.isatty():
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

    console = Console(file=sys.stderr)
    columns = ("{task.description}", BarColumn(), DownloadColumn(binary_units=True), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=size)
        yield lambda done: bar.update(task, advance=done)
