"""Options that several commands share, declared once, and the decorator that puts them into a command's signature."""

import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import MISSING, fields, is_dataclass
from functools import partial, wraps
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from gptcli import shipped
from gptcli.data import mutable
from gptcli.errors import GptcliError
from gptcli.report import Report
from gptcli.source import EXAMPLE, TRANSLATION, Model, Streaming, open_model

Text = Annotated[
    list[str] | None, typer.Argument(metavar="[TEXT]...", help="Words, joined by spaces; - reads standard input.")
]
Repeat = Annotated[
    int, typer.Option("--repeat", metavar="N", min=1, help="Run N times; the time is the least.", rich_help_panel="Run")
]
Source = Annotated[str | None, typer.Argument(metavar="[MODEL]", help="As for --model.")]
_model, _run, _text, _output = (
    partial(typer.Option, rich_help_panel=panel) for panel in ("Model", "Run", "Text", "Output")
)


@mutable
class ModelOptions:
    """Which model."""

    model: Annotated[
        str | None,
        _model("--model", "-m", metavar="SOURCE", envvar="GPTCLI_MODEL", show_envvar=True,
               help="A directory, a file, a shipped sample or config, a name on the Hub."),
    ] = None  # fmt: skip
    config: Annotated[
        str | None,
        _model("--config", "-c", metavar="FILE|NAME",
               help="An architecture; alone: random weights. Beside -m: describes lone weights."),
    ] = None  # fmt: skip
    seed: Annotated[int, _model(metavar="N", help="Seed of random weights.", min=0)] = 0
    revision: Annotated[str | None, _model(metavar="REV", help="Of a name on the Hub.")] = None
    offline: Annotated[bool, _model("--offline", help="Never touch the network.")] = False
    strict: Annotated[bool, _model("--strict", help="Refuse a config with unknown keys.")] = False

    def open(
        self,
        positional: str | None = None,
        configs_first: bool = False,
        config_only: bool = False,
        example: str = EXAMPLE,
    ) -> Model:
        """The model named by an option, by the argument of a command that takes no text, or by GPTCLI_MODEL.

        configs_first: the argument names a shipped config before it names a shipped sample; config_only: of a name on
        the Hub nothing but the config is wanted; example: what runs when nothing is named.
        """

        def opened(model: str | None, config: str | None) -> Model:
            return open_model(model, config, self.seed, self.offline, self.revision, config_only, self.strict, example)

        from_environment = came_from("model", "ENVIRONMENT")
        for said, name in (("MODEL", positional), ("-m", self.model), ("-c", self.config)):
            if name is not None and not name.strip():  # most often a shell variable that isn't set
                raise GptcliError(f"{said} {name!r}: names no model", "give a path or a name, or leave it out")
        if positional is not None:
            if self.model is not None and not from_environment:
                raise GptcliError(f"two models: {positional} and -m {self.model}", "name one")
            if configs_first and self.config is None and positional.removesuffix(".yaml") in shipped.configs():
                return opened(None, positional)
            return opened(positional, self.config)
        if from_environment and self.config is not None:
            return opened(None, self.config)
        try:
            return opened(self.model, self.config)
        except GptcliError as error:
            said = " (named by GPTCLI_MODEL)" if from_environment else ""
            raise GptcliError(error.message + said, error.hint, error.code) from None


def typer_context() -> Any:
    """The running command's context, whichever parser this Typer brings."""
    try:
        from typer._click.globals import get_current_context
    except ImportError:
        from click import get_current_context
    return get_current_context(silent=True)


def came_from(name: str, where: str) -> bool:
    """Did the value of the running command's parameter come from there: COMMANDLINE, ENVIRONMENT, DEFAULT?"""
    context = typer_context()
    source = context and context.get_parameter_source(name)
    return source is not None and source.name == where


@mutable
class RunOptions:
    """How it runs."""

    device: Annotated[str, _run(metavar="DEVICE", help="auto, cpu, cuda, cuda:1, mps.")] = "auto"
    dtype: Annotated[str, _run(metavar="TYPE", help="auto (as stored), f32, bf16, f16, f64, or the long names.")] = (
        "auto"
    )
    # Beyond some thousands, OpenMP ends the process when it can't make another.
    threads: Annotated[int | None, _run(metavar="N", min=1, max=1024, help="CPU threads.")] = None
    stream: Annotated[Streaming, _run(help="Keep no weights beyond their use; auto: in one pass, or short memory.")] = (
        "auto"
    )


@mutable
class TextOptions:
    """What it reads."""

    ids: Annotated[str | None, _text("--ids", metavar="IDS", help="12,45,78 or [[12, 45, 78]] or @FILE.")] = None
    batch: Annotated[bool, _text("--batch", help="Each argument, or each line of `-`, is a text.")] = False
    bos: Annotated[bool | None, _text("--bos/--no-bos", help="Begin with BOS or don't; by default as the model.")] = (
        None
    )
    special: Annotated[bool, _text("--special", help="`<|endoftext|>` in the text is that token.")] = False
    source: Annotated[
        list[str] | None, _text("--source", metavar="TEXT", help="What the encoder reads (one a text).")
    ] = None
    source_ids: Annotated[str | None, _text("--source-ids", metavar="IDS", help="The same as ids.")] = None
    segments: Annotated[str | None, _text("--segments", metavar="IDS", help="0,0,1,1: each token's part.")] = None
    chat: Annotated[bool, _text("--chat", help="The text is a user's message in a chat.")] = False

    @property
    def example(self) -> str:
        """What runs when no model is named: one that reads a source, where a source was given."""
        return TRANSLATION if self.source or self.source_ids else EXAMPLE


@mutable
class OutputOptions:
    """What comes out."""

    json: Annotated[bool, _output("--json", help="One JSON object.")] = False
    output: Annotated[
        list[Path] | None, _output("--output", "-o", metavar="FILE", help="Write a file; its suffix decides.")
    ] = None
    force: Annotated[bool, _output("--force", help="Write over a file.")] = False
    quiet: Annotated[bool, _output("--quiet", "-q", help="The verdict or the values alone.")] = False
    digits: Annotated[int, _output(metavar="N", min=0, max=17, help="Decimals.")] = 4
    full: Annotated[bool, _output("--full", help="Every number.")] = False
    color: Annotated[Literal["auto", "always", "never"], _output(help="Colour.")] = "auto"

    def check(self, *suffixes: str) -> None:
        """Refuses outputs that this command can't write, before it runs. Every command writes `.json`."""
        if self.output:
            from gptcli.render.files import check_outputs

            check_outputs(self.output, (*suffixes, ".json"), self.force)

    def show(self, report: Report, notes: Sequence[str] = (), seconds: float | None = None, tokens: int = 0) -> None:
        """Prints the report to standard output, notes and time to standard error, and sets the exit status."""
        for path in self.output or ():
            if path.suffix == ".json":
                from gptcli.render.files import write_report

                write_report(path, report)
        for note in notes:
            say(f"note: {note}")
        if self.json:
            from gptcli.render.plain import to_json

            print(to_json(report, sys.stdout.encoding))
        else:
            from gptcli.render.screen import Screen
            from gptcli.render.terminal import draw, verdict

            screen = Screen(sys.stdout, self.color, self.digits, self.full)
            if self.quiet:
                screen.verbatim(verdict(report) + "\n")
            else:
                draw(report, screen)
            screen.show()
        for finding in () if report.tells_findings else report.findings:
            say(f"finding {finding.code}: {finding.message}")
        if seconds and not self.quiet:
            rate = f"{tokens / seconds:,.0f} tokens/s"
            say(f"{seconds * 1000:,.1f} ms · {tokens:,} token{'s' * (tokens != 1)} · {rate}")
        if report.status != "ok":
            raise typer.Exit(2 if report.status == "error" else 1)


def say(text: str) -> None:
    """A line for the person, on standard error."""
    from gptcli.render.signs import harmless, printable

    sys.stdout.flush()
    print(printable(harmless(text), sys.stderr.encoding), file=sys.stderr)


def command(function: Callable) -> Callable[[], Callable]:
    """Marks a command, which is built when it is called: building all of them costs more than running one."""

    @wraps(function)
    def build() -> Callable:
        return _built(function)

    return build


def _built(function: Callable) -> Callable:
    """Spreads a command's parameters of the classes above into options of its own, and gathers their values again."""
    groups: dict[str, type] = {}
    parameters = []
    for parameter in inspect.signature(function).parameters.values():
        if is_dataclass(parameter.annotation):
            groups[parameter.name] = parameter.annotation
            parameters += [_parameter(f.name, f.type, f.default) for f in fields(parameter.annotation)]
        else:
            parameters.append(_parameter(parameter.name, parameter.annotation, parameter.default))

    def run(**values: Any) -> None:
        given = {n: group(**{f.name: values.pop(f.name) for f in fields(group)}) for n, group in groups.items()}
        function(**values, **given)

    run.__name__, run.__doc__ = function.__name__, function.__doc__
    run.__signature__ = inspect.Signature(parameters)
    run.__annotations__ = {p.name: p.annotation for p in parameters}
    return run


def _parameter(name: str, hint: Any, default: Any) -> inspect.Parameter:
    default = inspect.Parameter.empty if default is MISSING else default
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hint)
