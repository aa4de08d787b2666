"""`tokens`, `config` and `list`: small reports that run no model."""

from typing import Any

from gptcli import count, shipped
from gptcli.config import read_config
from gptcli.data import entry, mutable
from gptcli.errors import GptcliError
from gptcli.report import Report
from gptcli.run import Run
from gptcli.source import Model
from gptcli.spec import to_dict
from gptcli.tokens import Token


@mutable
class TokensReport(Report):
    """tokens: each text's; source: what an encoder would read; text: what the tokens decode to, if that was asked for
    (UTF-8, bytes that are no text escaped).
    """

    schema = "gptcli.tokens/1"
    tokenizer: str
    size: int
    tokens: list[list[Token]]
    source: list[list[Token]]
    text: list[str] | None


@mutable
class ConfigReport(Report):
    """yaml: the config as text to edit; spec: every value of it, defaults stated."""

    schema = "gptcli.config/1"
    name: str
    source: str
    yaml: str
    spec: dict[str, Any]


@entry
class Shipped:
    name: str
    kind: str
    parameters: int
    about: str
    path: str


@entry
class Cached:
    """A name on the Hub of which the cache holds a revision, and the bytes that it takes."""

    name: str
    revision: str
    bytes: int


@mutable
class ListReport(Report):
    """What ships, and what the Hub's cache holds."""

    schema = "gptcli.list/1"
    shipped: list[Shipped]
    cached: list[Cached]


def tokens_report(run: Run, decode: bool = False) -> TokensReport:
    """Raises GptcliError where the model has no tokenizer, and for an id to decode that stands for no token."""
    tokenizer = run.model.tokenizer.target if run.source else run.model.tokenizer
    tokens = run.tokens()
    unknown = [token.id for text in tokens for token in text if token.bytes is None]
    if decode and unknown:
        raise GptcliError(f"id {unknown[0]} is no token of {tokenizer.name}", "leave --decode out to see the others")
    pieces = ([bytes(token.bytes) for token in text] for text in tokens) if decode else ()
    texts = [tokenizer.between.join(text).decode("utf-8", "backslashreplace") for text in pieces]
    return TokensReport(
        tokenizer=tokenizer.name,
        size=tokenizer.size,
        tokens=tokens,
        source=run.source_tokens(),
        text=texts if decode else None,
    )


def config_report(model: Model) -> ConfigReport:
    """The config file as it is written, comments and all, or a Spec that a config.json describes, written as YAML."""
    import yaml

    spec = to_dict(model.spec)
    if model.config is not None and model.config.path is not None:
        text = model.config.path.read_text(encoding="utf-8")
    else:
        text = yaml.safe_dump(spec, sort_keys=False, default_flow_style=None, allow_unicode=True, width=120)
    return ConfigReport(name=model.spec.name, source=model.source, yaml=text, spec=spec)


def list_report() -> ListReport:
    """Configs and samples that ship, with what each says of itself, and models that the Hub's cache holds."""
    from gptcli.checkpoint.hub import cached_names
    from gptcli.source import open_model

    found = []
    for name, path in shipped.configs().items():
        config = read_config(path)
        kind = "config with weights" if config.weights else "config"
        total = count.total(Model(spec=config.spec, source=name).layout)
        found.append(Shipped(name, kind, total, _about(path.read_text(encoding="utf-8")), str(path)))
    for name, path in shipped.samples().items():
        model = open_model(str(path))
        about = path / "README.md"
        text = about.read_text(encoding="utf-8") if about.is_file() else ""
        found.append(Shipped(name, "sample", count.total(model.layout), _about(text), str(path)))
    return ListReport(shipped=found, cached=[Cached(*one) for one in cached_names()])


def _about(text: str) -> str:
    """The first line's comment or heading."""
    first = text.partition("\n")[0]
    return first.lstrip("# ").strip() if first.startswith("#") else ""
