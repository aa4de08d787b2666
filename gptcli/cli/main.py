"""The console entry: finds the command, runs it, and turns what goes wrong into one line and an exit status.

0 done; 1 findings; 2 could not run; 3 a defect of gptcli itself. Only the command that is called is built, for building
all of them costs more than running one.
"""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from gptcli import __version__
from gptcli.cli import commands
from gptcli.errors import GptcliError

# Name, function, group in --help.
COMMANDS = (
    ("forward", commands.forward, "Run a model"),
    ("topk", commands.topk, "Run a model"),
    ("score", commands.score, "Run a model"),
    ("trace", commands.trace, "Look inside"),
    ("params", commands.params, "What it is"),
    ("tokens", commands.tokens, "Around it"),
    ("config", commands.config, "Around it"),
    ("list", commands.list_, "Around it"),
)

CONTEXT = {"help_option_names": ["-h", "--help"]}


def build(wanted: str | None) -> typer.Typer:
    """The app with one command, or with all of them where none was named."""
    app = typer.Typer(
        name="gptcli",
        add_completion=wanted is None,
        pretty_exceptions_enable=False,
        context_settings=CONTEXT,
        rich_markup_mode="rich" if wants_help() else None,
    )
    app.callback(invoke_without_command=True)(root)
    for name, function, group in COMMANDS:
        if wanted in (None, name):
            app.command(name, rich_help_panel=group, context_settings=CONTEXT)(function)
    if wanted is None:
        app.command("generate", hidden=True, context_settings={"ignore_unknown_options": True})(commands.generate)
    return app


def wants_help() -> bool:
    """Rich's own help is worth its loading only where help is printed."""
    return len(sys.argv) < 2 or any(word in ("-h", "--help") for word in sys.argv[1:])


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


def main() -> int:
    """Runs the command line in sys.argv; returns the exit status."""
    names = [name for name, _, _ in COMMANDS]
    wanted = sys.argv[1] if len(sys.argv) > 1 and sys.argv[1] in names else None
    try:
        status = build(wanted)(prog_name="gptcli", standalone_mode=False)
        sys.stdout.flush()
        return status if isinstance(status, int) else 0
    except GptcliError as error:
        return fail(error)
    except typer.Exit as stop:
        return stop.exit_code
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except BrokenPipeError:
        # The reader has gone; keep Python from complaining about it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if hasattr(error, "format_message"):  # the parser's own complaints, whichever parser this Typer brings
            return fail(GptcliError(" ".join(error.format_message().split()).rstrip("."), "see gptcli --help"))
        if is_out_of_memory(error):
            return fail(
                GptcliError("out of memory", "take a smaller model, a shorter text or a smaller --dtype", "memory")
            )
        if os.environ.get("GPTCLI_DEBUG"):
            raise
        return defect(error)


def is_out_of_memory(error: Exception) -> bool:
    """Python's own, CUDA's, and the CPU allocator's, which torch raises as a RuntimeError."""
    named = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
    return named or "not enough memory" in str(error)


def fail(error: GptcliError) -> int:
    """One line on standard error; with --json, the error as an object on standard output too."""
    from gptcli.render.screen import printable

    if "--json" in sys.argv:
        from gptcli.render.plain import error_json

        print(error_json(error))
    line = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in f"gptcli: {error}")
    sys.stdout.flush()
    print(printable(line, sys.stderr.encoding), file=sys.stderr)
    return 2


def defect(error: Exception) -> int:
    """Something that gptcli should have foreseen."""
    frames, last = error.__traceback__, None
    while frames is not None:
        last, frames = frames, frames.tb_next
    where = f"{Path(last.tb_frame.f_code.co_filename).name}:{last.tb_lineno}" if last else "?"
    said = " ".join(f"{type(error).__name__}: {error}".split())
    print(
        f"gptcli: a defect of gptcli {__version__} at {where} ({said}); GPTCLI_DEBUG=1 shows the stack: please report "
        "it with the command that you ran",
        file=sys.stderr,
    )
    return 3


def entry() -> None:
    """The console script."""
    sys.exit(main())
