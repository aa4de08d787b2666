"""Renders a chat template that comes with a model: a script that gptcli runs in a process of its own.

It reads one JSON object on standard input and writes one, with `text` or `error`, on standard output. A template is
foreign code. jinja2's sandbox keeps it from the machine; that it ends, and soon, and stays small, is kept by limits on
this process, where the system has them.
"""

import contextlib
import datetime
import json
import signal
import sys

SECONDS = 1  # of the processor's time, for a template; it takes some milliseconds
MEBIBYTES = 200  # beyond what Python and jinja2 take
LETTERS = 2**22  # in the text that comes out


def main() -> None:
    asked = json.load(sys.stdin)
    # As in the process that asks, which may have found its packages in a way of its own.
    sys.path[:] = asked["path"]
    # Made before the limits are set, so that the modules it loads don't count.
    box = sandbox()
    limit()
    try:
        text = render(box, asked)
    except MemoryError:
        found = {"error": f"it takes more than {MEBIBYTES} MiB"}
    except Exception as error:  # whatever it is, the template did it
        found = {"error": f"{error}"[:1000] or type(error).__name__}
    else:
        found = {"text": text} if len(text) <= LETTERS else {"error": f"it makes more than {LETTERS:,} characters"}
    print(json.dumps(found))


def limit() -> None:
    """Ends this process when it runs for long, and fails what asks for much memory, where the system can do that."""
    with contextlib.suppress(AttributeError):
        # No handler of Python's, which would wait for a huge power to be finished.
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123
            pages = int(file.read().split()[0])
        most = pages * resource.getpagesize() + MEBIBYTES * 2**20
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def sandbox():
    """jinja2's, with what chat templates are written for."""
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

    class Generation(Extension):
        """`{% generation %}` marks what a model is trained to say, and changes nothing of the text."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser):
            line = next(parser.stream).lineno
            return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)

    def raise_exception(said):
        raise TemplateError(said)

    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    class Box(ImmutableSandboxedEnvironment):
        def unsafe_undefined(self, obj, attribute):
            """At once: jinja2 would print nothing for it, and complain only if it is used further."""
            raise SecurityError(f"it reaches for {attribute!r} of a {type(obj).__name__}")

    box = Box(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, Generation])
    box.filters["tojson"] = tojson
    box.globals["raise_exception"] = raise_exception
    box.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return box


def render(box, asked: dict) -> str:
    messages = [{"role": "user", "content": asked["message"]}]
    template = box.from_string(asked["template"])
    return template.render(
        messages=messages, add_generation_prompt=True, tools=None, documents=None, **asked["special"]
    )


if __name__ == "__main__":
    main()
