"""The console entry: finds the command, runs it, and turns what goes wrong into one line and an exit status.

0 done; 1 findings; 2 could not run; 3 a defect of gptcli itself. Only the command that is called is built.
"""

import gc
import os
import signal
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from gptcli import __version__
from gptcli.errors import GptcliError

if TYPE_CHECKING:
    import typer

# Name, function in commands.py, group in --help.
COMMANDS = (
    ("forward", "forward", "Run a model"),
    ("topk", "topk", "Run a model"),
    ("score", "score", "Run a model"),
    ("trace", "trace", "Look inside"),
    ("lens", "lens", "Look inside"),
    ("heads", "heads", "Look inside"),
    ("params", "params", "What it is"),
    ("inspect", "inspect", "What it is"),
    ("diff", "diff", "What it is"),
    ("draw", "draw", "What it is"),
    ("bench", "bench", "Around it"),
    ("tokens", "tokens", "Around it"),
    ("config", "config", "Around it"),
    ("list", "list_", "Around it"),
)
# Name of a group of commands, module in cli/ that holds it, group in --help.
GROUPS = (("lab", "lab", "Learn"),)

RUNNING = ("forward", "topk", "score", "trace", "lens", "heads", "bench")  # commands whose buffers are large
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # glibc's numbers for what mallopt sets, in bytes

CONTEXT = {"help_option_names": ["-h", "--help"]}


def build(wanted: str | None, inner: str | None = None) -> "typer.Typer":
    """The app with one command, or with all of them where none was named. inner: the command of a group, likewise."""
    import typer

    from gptcli.cli import commands

    app = typer.Typer(
        name="gptcli",
        add_completion=wanted is None,
        pretty_exceptions_enable=False,
        context_settings=CONTEXT,
        rich_markup_mode="rich" if wants_help() else None,
    )

    @app.callback(invoke_without_command=True)
    def root(
        context: typer.Context,
        version: Annotated[bool, typer.Option("--version", "-V", help="Print the version.")] = False,
    ) -> None:
        """A microscope for GPT models: every shape and every number between a text and the next token.

        gptcli forward "Cats sit on"  runs the worked example.
        """
        if version:
            print(f"gptcli {__version__}")
            raise typer.Exit()
        if context.invoked_subcommand is None:
            print(context.get_help())
            raise typer.Exit()

    for name, function, group in COMMANDS:
        if wanted in (None, name):
            app.command(name, rich_help_panel=group, context_settings=CONTEXT)(getattr(commands, function)())
    for name, module, panel in GROUPS:
        if wanted in (None, name):
            of_group = import_module(f"gptcli.cli.{module}").group(inner, CONTEXT)
            app.add_typer(of_group, name=name, rich_help_panel=panel)
    if wanted is None:
        app.command("generate", hidden=True, context_settings={"ignore_unknown_options": True})(commands.generate())
    return app


def wants_help() -> bool:
    """Rich's own help is worth its loading only where help is printed."""
    return len(sys.argv) < 2 or any(word in ("-h", "--help") for word in sys.argv[1:])


def main() -> int:
    """Runs the command line in sys.argv; returns the exit status."""
    try:
        status = attempt()
        sys.stdout.flush()
        return status
    except GptcliError as error:
        return fail(error)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader has gone, as `head` does when it has enough
        silence()
        return 0
    except OSError as error:  # a disk that is full, a file that can't be read
        where = f"{error.filename}: " if error.filename else ""
        return fail(GptcliError(f"{where}{error.strerror or error}", code="file"))
    except Exception as error:
        if hasattr(error, "format_message"):  # the parser's own complaints, whichever parser this Typer brings
            command = getattr(getattr(error, "ctx", None), "command_path", "gptcli")
            said = " ".join(error.format_message().split()).rstrip(".").replace("valid int range", "whole number")
            return fail(GptcliError(said, f"see {command} --help"))
        if is_out_of_memory(error):
            return fail(
                GptcliError("out of memory", "take a smaller model, a shorter text or a smaller --dtype", "memory")
            )
        return defect(error)


def attempt() -> int:
    """Runs the command line in sys.argv; returns the exit status of what could run, and raises what went wrong."""
    import typer

    if "TORCHELASTIC_RUN_ID" in os.environ and not any(word.startswith("--parallel") for word in sys.argv[1:]):
        if os.environ.get("RANK") != "0":
            return 2
        raise GptcliError("torchrun started this", "add --parallel tensor, or start gptcli without it", "parallel")
    names = [name for name, _, _ in (*COMMANDS, *GROUPS)]
    wanted, inner = [*sys.argv[1:3], None, None][:2]
    wanted = wanted if wanted in names else None
    try:
        status = build(wanted, inner)(prog_name="gptcli", standalone_mode=False)
    except typer.Abort:
        raise KeyboardInterrupt from None
    except SystemExit as stop:
        # Typer and Rich make an exit with status 1 of a reader that has gone.
        if isinstance(stop.__context__, BrokenPipeError):
            raise stop.__context__ from None
        raise
    return status if isinstance(status, int) else 0


def silence() -> None:
    """Lets standard output go nowhere, so that nothing complains of it at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def is_out_of_memory(error: Exception) -> bool:
    """Python's own, CUDA's, and the CPU allocator's, which torch raises as a RuntimeError."""
    named = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return named or "not enough memory" in str(error)


def fail(error: GptcliError, status: int = 2) -> int:
    """One line on standard error; with --json, the error as an object on standard output too. Of several processes that
    run one model, the first that fails tells.
    """
    from gptcli.render.signs import harmless, printable

    if (parallel := sys.modules.get("gptcli.model.parallel")) is not None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun's, once one has failed: there is time to say why
        if not parallel.first_to_tell():
            return status
        if getattr(sys.stderr, "name", "") == os.devnull:
            sys.stdout, sys.stderr = sys.__stdout__, sys.__stderr__
    try:
        if "--json" in sys.argv:
            from gptcli.render.plain import error_json

            print(error_json(error, sys.stdout.encoding))
        sys.stdout.flush()
    except OSError:  # it was standard output that failed
        silence()
    with suppress(OSError):
        print(printable(harmless(f"gptcli: {error}"), sys.stderr.encoding), file=sys.stderr, flush=True)
    return status


def defect(error: Exception) -> int:
    """Something that gptcli should have foreseen."""
    frames, last = error.__traceback__, None
    while frames is not None:
        last, frames = frames, frames.tb_next
    where = f"{Path(last.tb_frame.f_code.co_filename).name}:{last.tb_lineno}" if last else "?"
    said = " ".join(f"{type(error).__name__}: {error}".split())
    if os.environ.get("GPTCLI_DEBUG"):
        import traceback

        traceback.print_exception(error)
    what = f"a defect of gptcli {__version__} at {where} ({said})"
    hint = "GPTCLI_DEBUG=1 shows the stack: please report it with the command that you ran"
    return fail(GptcliError(what, hint, "defect"), status=3)


def keep_memory() -> None:
    """Lets glibc keep a freed buffer for the next one: pages that come from the system again are cleared again."""
    import ctypes

    if sys.platform.startswith("linux") and hasattr(libc := ctypes.CDLL(None), "gnu_get_libc_version"):
        libc.mallopt(MMAP_THRESHOLD, 1 << 30)
        libc.mallopt(TRIM_THRESHOLD, 1 << 30)


def entry() -> None:
    """The console script. What may be done to a whole process, and not by a library to its host, stands here alone."""
    gc.disable()  # a command leaves next to no garbage, and looking for it takes a tenth of the time that modules load
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # torch's idle threads sleep, and leave the cores to others
    if sys.argv[1:2] and sys.argv[1] in RUNNING:
        keep_memory()
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by who started the process
            setattr(sys, name, open(os.devnull, mode))  # noqa: PTH123, SIM115 - open as long as the process
    for stream in (sys.stdout, sys.stderr):  # the help's signs, and whatever else an encoding may lack
        stream.reconfigure(errors="backslashreplace")
    status = main()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except Exception:
        sys.exit(status)  # Python's own end says which stream it was
    os._exit(status)  # that end would take torch apart, which lasts a third as long as loading it
