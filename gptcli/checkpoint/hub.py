"""Models that are named on the Hub: found in its cache, or fetched into it.

The cache is read by its documented layout (`models--org--name/{refs,snapshots,blobs}`), without a network library;
huggingface_hub does the fetching. Something is fetched when a snapshot lacks it, never because it is old.
"""

import json
import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from glob import escape
from pathlib import Path

from gptcli.errors import GptcliError, nearest

CONFIG = "config.json"
VOCABULARIES = ("tokenizer.json", "vocab.json", "tokenizer.model")
TOKENIZER = (
    *VOCABULARIES, "merges.txt", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "chat_template.jinja",
)  # fmt: skip
WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # the first that is there; in shards, each has an index

# The Hub's rules for a name, as huggingface_hub has them: importing its own check takes 160 ms.
NAME = re.compile(r"(\b[\w\-.]{1,96}\b/)?\b[\w\-.]{1,96}\b(?<!\.git)", re.ASCII)
COMMIT = re.compile(r"[0-9a-f]{40}")
SUFFIXES = (
    ".bin", ".ckpt", ".gguf", ".h5", ".json", ".msgpack", ".npy", ".npz", ".onnx", ".pt", ".pth", ".safetensors",
    ".txt", ".yaml", ".yml",
)  # fmt: skip


def is_name(source: str) -> bool:
    """Whether this has the form of a Hub name, `org/name` or `name`, and not the look of a path on this machine."""
    if not NAME.fullmatch(source) or "--" in source or ".." in source or source.lower().endswith(SUFFIXES):
        return False
    folder, slash, _ = source.partition("/")
    return not (slash and Path(folder).is_dir())


def snapshot(name: str, revision: str | None = None, config_only: bool = False, offline: bool = False) -> Path:
    """The directory of a snapshot, called after its commit: config, tokenizer and weights, or the config alone.

    What is cached is used as it is; the rest is fetched, unless offline or HF_HUB_OFFLINE forbids. Raises GptcliError.
    """
    from huggingface_hub import constants

    revision = revision or constants.DEFAULT_REVISION
    folder = Path(constants.HF_HUB_CACHE) / f"models--{name.replace('/', '--')}"
    forbidden = "--offline was given" if offline else "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else ""
    cached = folder / "snapshots" / (_commit(folder, revision) or "none")
    if _holds(cached, config_only, bare=bool(forbidden)):
        return cached
    if forbidden:
        raise _not_cached(name, revision, _files(cached), forbidden)
    return _fetch(name, revision, config_only)


def cached_names() -> list[tuple[str, str, int]]:
    """What the cache holds: each model's name, its revision (a branch or a tag, else the commit) and its bytes."""
    from huggingface_hub import constants

    found = []
    for folder in Path(constants.HF_HUB_CACHE).glob("models--*/"):
        names = {_commit(folder, ref): ref for ref in sorted(_files(folder / "refs"))}
        names[_commit(folder, constants.DEFAULT_REVISION)] = constants.DEFAULT_REVISION
        for commit in (folder / "snapshots").glob("*/"):
            if blobs := {(commit / file).resolve() for file in _files(commit)}:
                name = folder.name.removeprefix("models--").replace("--", "/")
                found.append((name, names.get(commit.name, commit.name), sum(blob.stat().st_size for blob in blobs)))
    return sorted(found)


def _commit(folder: Path, revision: str) -> str | None:
    """The commit that a revision meant when it was last fetched."""
    if COMMIT.fullmatch(revision):
        return revision
    try:
        commit = (folder / "refs" / revision).read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return None
    return commit if COMMIT.fullmatch(commit) else None


def _files(folder: Path) -> set[str]:
    """The files in a folder, by their paths from there. A link that leads nowhere is none."""
    found = set()
    for path in folder.rglob("*"):
        with suppress(OSError):  # a link to where one may not look
            if path.is_file():
                found.add(path.relative_to(folder).as_posix())
    return found


def _holds(snapshot: Path, config_only: bool, bare: bool = False) -> bool:
    """Whether a cached snapshot has all that is wanted.

    huggingface_hub may have noted which files the repository has. Where it has not, any vocabulary is a tokenizer; bare
    does without.
    """
    held = _files(snapshot)
    if config_only or CONFIG not in held:
        return CONFIG in held
    listed = _listing(snapshot)
    if not (listed or bare or held.intersection(VOCABULARIES)):
        return False
    weights = _weights(listed or held, snapshot.joinpath)
    return bool(weights) and held.issuperset([*weights, *listed.intersection(TOKENIZER)])


def _listing(snapshot: Path) -> set[str]:
    """The repository's files at this commit, empty where nobody noted them."""
    try:
        path = snapshot.parent.parent / "trees" / f"{snapshot.name}.json"
        return set(json.loads(path.read_text(encoding="utf-8"))["files"])
    except (OSError, ValueError, LookupError, TypeError):
        return set()


def _weights(names: Collection[str], path: Callable[[str], str | Path]) -> list[str]:
    """Of a repository's files those to take for weights: one, or an index and its shards. path: where an index lies."""
    for whole in WEIGHTS:
        index = f"{whole}.index.json"
        if whole in names:
            return [whole]
        if index in names:
            where = Path(path(index))
            try:
                shards = set(json.loads(where.read_text(encoding="utf-8"))["weight_map"].values())
                return [index, *sorted(shards)]
            except (OSError, ValueError, LookupError, TypeError, AttributeError):
                return []
    return []


def _fetch(name: str, revision: str, config_only: bool) -> Path:
    """Downloads what is wanted and not there yet. Progress goes to standard error."""
    from huggingface_hub import HfApi, constants, hf_hub_download, snapshot_download

    with _explained(name, revision, "the Hub can't be reached"):
        # One request that soon gives up: the others try for half a minute, too long to learn that there is no network.
        siblings = HfApi().model_info(name, revision=revision, timeout=constants.HF_HUB_ETAG_TIMEOUT).siblings
    names = {sibling.rfilename for sibling in siblings or ()}
    if CONFIG not in names:
        raise _unusable(name, f"no {CONFIG}", names)
    with _explained(name, revision, "the download broke off"):
        # By its revision, so that the cache learns what that means; everything else by this commit.
        snapshot = Path(hf_hub_download(name, CONFIG, revision=revision)).parent
        if config_only:
            return snapshot
        weights = _weights(names, lambda index: hf_hub_download(name, index, revision=snapshot.name))
    if not weights:
        raise _unusable(name, f"no {' or '.join(WEIGHTS)}, whole or with an index of shards,", names)
    if not names.issuperset(weights):
        raise _unusable(name, f"no {', '.join(sorted(set(weights) - names)[:3])}, which {weights[0]} names,", names)
    with _explained(name, revision, "the download broke off"):
        wanted = [escape(file) for file in (CONFIG, *TOKENIZER, *weights) if file in names]
        snapshot_download(name, revision=snapshot.name, allow_patterns=wanted)
    if not _holds(snapshot, config_only):
        # What can't be fetched it may pass over in silence, and a proxy may answer with another commit.
        raise GptcliError(f"-m {name}: the Hub gave less than it lists, or another commit", "try again", "hub")
    return snapshot


@contextmanager
def _explained(name: str, revision: str, failure: str) -> Iterator[None]:
    """Telemetry is off, and what goes wrong on the way to the Hub is told as one GptcliError."""
    from huggingface_hub import constants

    told, constants.HF_HUB_DISABLE_TELEMETRY = constants.HF_HUB_DISABLE_TELEMETRY, True
    try:
        yield
    except Exception as error:  # httpx, a file lock, the transfer library: each raises kinds of its own
        what, hint = _explain(error, name, revision, failure)
        raise GptcliError(f"-m {name}: {what}", hint, "hub") from None
    finally:
        constants.HF_HUB_DISABLE_TELEMETRY = told


def _explain(error: BaseException, name: str, revision: str, failure: str) -> tuple[str, str]:
    """What happened, and what to do instead."""
    from huggingface_hub import constants, errors

    while isinstance(error, errors.LocalEntryNotFoundError) and error.__cause__:
        error = error.__cause__  # "not in the cache either" stands before what the Hub said
    status = getattr(getattr(error, "response", None), "status_code", None)
    line = ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])
    if isinstance(error, errors.GatedRepoError):
        return "access to it must be granted", "ask for it on the model's page, then `hf auth login` or set HF_TOKEN"
    if isinstance(error, errors.RepositoryNotFoundError):
        meant = nearest(name, {cached for cached, _, _ in cached_names()})
        hint = "check the name; if it is private, `hf auth login` or set HF_TOKEN"
        return "no such model on the Hub, or a private one", f"{meant} {hint}".strip()
    if isinstance(error, errors.RevisionNotFoundError):
        return f"no revision {revision!r}", "give a branch, a tag or a whole commit"
    if status in (401, 403):
        return f"the Hub refused access ({status})", "`hf auth login`, or check HF_TOKEN"
    if status is not None:
        return f"the Hub failed ({line})", "try again later; --offline takes what is cached"
    if isinstance(error, errors.FileMetadataError):
        return f"{constants.ENDPOINT} doesn't answer as a Hub does ({line})", "check HF_ENDPOINT and the proxy"
    if isinstance(error, OSError) and error.strerror:
        return (
            f"{error.filename or constants.HF_HUB_CACHE}: {error.strerror}",
            "check that it can be written and has room, or set HF_HOME",
        )
    return f"{failure} ({constants.ENDPOINT}; {line})", "try again; --offline takes what is cached"


def _unusable(name: str, lack: str, names: Collection[str]) -> GptcliError:
    others = sorted(file for file in names if file.lower().endswith(SUFFIXES) and file not in (CONFIG, *TOKENIZER))
    holds = f" (it has {', '.join(others[:3])}{' …' * (len(others) > 3)})" if others else ""
    return GptcliError(f"-m {name}: {lack} in this repository{holds}", "name another model or --revision", "hub")


def _not_cached(name: str, revision: str, files: set[str], forbidden: str) -> GptcliError:
    """What is cached instead, and how to fetch this."""
    from huggingface_hub import constants

    part = f"only {', '.join(sorted(files)[:4])}{' …' * (len(files) > 4)} of it" if files else "not"
    held = cached_names()
    models = sorted({model for model, _, _ in held})
    others = [f"--revision {other}" for model, other, _ in held if model == name and other != revision]
    cached = ", ".join((others or models)[:6]) or "nothing"
    again = "without --offline" if forbidden.startswith("--") else "with HF_HUB_OFFLINE=0"
    return GptcliError(
        f"-m {name} ({revision}): {part} in the cache {constants.HF_HUB_CACHE}, and {forbidden}",
        f"{nearest(name, set(models) - {name})} cached: {cached}; run once {again} to fetch it".strip(),
        "hub",
    )
