"""What the names of someone's arrays mean: in which vocabulary, and what a file of --map says."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, get_args

from gptcli.checkpoint.files import read_json
from gptcli.config import read_yaml
from gptcli.errors import GptcliError, nearest
from gptcli.families.gguf import pairs_rows
from gptcli.names import Names, Vocabulary, module_of
from gptcli.source import Model
from gptcli.spec import Spec
from gptcli.trace import points

if TYPE_CHECKING:
    from gptcli.checkpoint.bind import Bound


# What families call a layer's attention and its MLP, whose output is what their last matrix gives.
BLOCKS = """
    attn attention self_attn self_attention encoder_attn SelfAttention EncDecAttention mlp feed_forward DenseReluDense
""".split()


class Meaning(NamedTuple):
    """What an array is: an activation; by whose word; the order of its axes, where that is said; the activation's share
    of the array, where that is what a fused projection gives, and how wide it is.
    """

    path: str
    whose: str
    order: str = ""
    bound: "Bound | None" = None
    width: int = 0


def meanings(model: Model) -> dict[str, list[Meaning]]:
    """By a name in any vocabulary, what it means; the first that knows it is heard."""
    found: dict[str, list[Meaning]] = {}
    for whose in get_args(Vocabulary):
        mine: dict[str, list[Meaning]] = {}
        for path, names in Names(model, whose).known.items():
            for name in names:
                mine.setdefault(name, []).append(Meaning(path, whose))
        found = mine | found
    found = _whole(found) | found
    tuples = {name: [Meaning(path, "huggingface")] for name, path in _tuples(model.spec)}
    return _fused(model) | tuples | found


def _whole(found: dict[str, list[Meaning]]) -> dict[str, list[Meaning]]:
    """Modules that hand on what their last one gives: the attention, with its weights beside it, and the MLP."""
    whole = {}
    for name, meant in found.items():
        path, module = meant[0].path, name.rpartition(".")[0]
        if path.endswith(("attn_out", "cross_out", "mlp_out")) and module.rpartition(".")[2] in BLOCKS:
            whole |= {f"{module}{at}": [Meaning(path, "huggingface")] for at in ("", ".0")}
    return whole


def _tuples(spec: Spec) -> Iterator[tuple[str, str]]:
    """The tuples that the library gives, by their usual spellings. The last hidden state is after the final norm."""
    if spec.encoder is not None:
        for name, path in _tuples(spec.encoder):
            yield f"encoder_{name}", f"encoder.{path}"
    before = "" if spec.encoder is None else "decoder_"
    last = "final_norm" if spec.norm.final else f"layers.{spec.n_layers - 1}.resid_post"
    last = last if spec.embed_size is None else "embed_out"
    yield "last_hidden_state", last
    for i in range(spec.n_layers + 1):
        inside = {f"{before}hidden_states": f"layers.{i}.resid_pre", f"{before}attentions": f"layers.{i}.attn.pattern"}
        inside |= {} if spec.encoder is None else {"cross_attentions": f"layers.{i}.cross.pattern"}
        inside = inside if i < spec.n_layers else {f"{before}hidden_states": last}
        yield from ((f"{name}{at}", path) for name, path in inside.items() for at in (f".{i}", f"_{i}", f"[{i}]"))


def _fused(model: Model) -> dict[str, list[Meaning]]:
    """Modules that give several activations in one, by the checkpoint's words."""
    found: dict[str, list[Meaning]] = {}
    bounds = model.checkpoint.binding.bounds if model.checkpoint else {}
    for path, _ in points(model.spec):
        bound = bounds.get(f"{path}.weight")
        if bound is not None and bound.parts > 1 and bound.item is None:
            shape = model.checkpoint.infos[bound.stored].shape
            width = shape[-1 if bound.transposed else 0]
            meaning = Meaning(path, "huggingface", bound=bound, width=width)
            found.setdefault(module_of(bound.stored, "own", None), []).append(meaning)
    return found


def paired(model: Model) -> bool:
    """Has a .gguf file of this model rows of q and k in pairs?"""
    if model.gguf is not None:
        return any(bound.paired for bound in model.checkpoint.binding.bounds.values())
    config = model.directory and model.directory / "config.json"
    return bool(config and config.is_file()) and pairs_rows(str(read_json(config).get("model_type")))


def mapped(held: Mapping[str, Any], file: Path, spec: Spec) -> dict[str, list[Meaning]]:
    """What --map says of the arrays that are there."""
    try:
        raw = read_json(file) if file.suffix == ".json" else read_yaml(file.read_text(encoding="utf-8"), str(file))
    except (OSError, UnicodeDecodeError) as error:
        said = getattr(error, "strerror", None) or "not UTF-8 text"
        raise GptcliError(f"--map {file}: {said}", "give a YAML or JSON file", "file") from None
    if not isinstance(raw, dict) or not all(isinstance(word, str) for pair in raw.items() for word in pair):
        raise GptcliError(f"--map {file}: no mapping of their names to our paths", "their.{i}.q: layers.{i}.attn.q")
    axes, found = {path: letters(axes) for path, axes in points(spec)}, {}
    for theirs, ours in raw.items():
        said = re.fullmatch(r"([^\[]+)(?:\[([A-Z, ]+)\])?", ours)
        pattern = re.compile(re.escape(theirs).replace(r"\{i\}", r"(\d+)"))
        matches = [match for name in held if (match := pattern.fullmatch(name))]
        if not matches:
            raise GptcliError(f"--map {file}: no array is called {theirs}", nearest(theirs, held), "path")
        for match in matches:
            path = said[1].replace("{i}", match[1]) if said and match.groups() else said and said[1]
            order = re.sub("[, ]", "", (said and said[2]) or "")
            order = f"B{order}" if order and "B" not in order else order
            if axes.get(path, "").endswith("D"):
                order = order.replace("S", "T").replace("H", axes[path][1])
            if path not in axes or (order and sorted(order) != sorted(axes[path])):
                hint = nearest(path, axes) if path not in axes else f"its axes are [{','.join(axes[path])}]"
                raise GptcliError(f"--map {file}: {ours}: no such activation", hint, "path")
            found[match[0]] = [Meaning(path, "map", order)]
    return found


def letters(axes: str) -> str:
    """Axes with T for every position but a key's of a score: each letter once."""
    return axes[:-1].replace("S", "T") + axes[-1]
