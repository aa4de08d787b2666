"""One path, looked at step by step: what `inspect` reports of it."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from gptcli import count
from gptcli.checkpoint.bind import Binding, compare
from gptcli.checkpoint.bind import Fault as Misfit
from gptcli.checkpoint.files import bare
from gptcli.checkpoint.gather import gather
from gptcli.checkpoint.patterns import braced, fold
from gptcli.checkpoint.safetensors import FLOATS, TensorInfo
from gptcli.checkpoint.scan import Lay
from gptcli.errors import GptcliError
from gptcli.layout import Param, layout
from gptcli.report import Finding, amount
from gptcli.report.inspect import (
    CODES,
    Counts,
    Digests,
    DtypeRow,
    FileRow,
    Inspected,
    Quantised,
    SectionRow,
    StatisticsRow,
    Tie,
    Vocabulary,
    Wanted,
)
from gptcli.report.inspect_config import Description, shapes_tell
from gptcli.report.inspect_tensors import NO_OWNER, Owned, fits, named, tensor_rows
from gptcli.report.summary import summary
from gptcli.spec import to_dict

if TYPE_CHECKING:
    from gptcli.checkpoint.packed import Packed, Packing

VERDICTS = {code: verdict for verdict, codes in CODES.items() for code in codes}
TABLES = ("embed.weight", "lm_head.weight")  # with a row an id
MOST_REPEATED = 2**30  # bytes of a view that repeats its numbers
FORMS = {
    "safetensors": "safetensors",
    "zip": "PyTorch (zip)",
    "legacy": "PyTorch (before zip files)",
    "torchscript": "TorchScript",
    "gguf": "GGUF",
}


class Inspection:
    """One path, looked at step by step."""

    def __init__(self, source: str, path: Path, config: str | None, wanted: Wanted, strict: bool):
        self.path, self.config, self.wanted, self.strict = path, config, wanted, strict
        self.out = Inspected(source=source)
        if not path.exists():
            raise GptcliError(f"{path}: no such file or directory", "give a checkpoint's directory or file", "file")
        self.found = gather(path)
        self.infos = self.found.infos
        self.owned: dict[str, Owned] = {}
        self.packing: Packing | None = None
        self.described = Description(self.found, self.out)
        self.described_count: int | None = None

    def done(self) -> Inspected:
        """All that is known of it."""
        self.files()
        if self.is_adapter():
            self.adapter()
        else:
            self.told()
            self.tensors()
        self.counts()
        self.lost()
        self.out.tensors = tensor_rows(self.infos, self.owned, self.wanted.each or self.wanted.where, self.wanted.fits)
        if self.wanted.fits is not None and not self.out.tensors:
            self.out.notes.append(f"no tensor's name fits {self.wanted.fits}")
        if self.wanted.stats:
            self.statistics()
        if self.wanted.digests:
            self.digests()
        self.verdict()
        return self.out

    def fault(self, code: str, said: str, place: str = "") -> None:
        self.out.findings.append(Finding(code, said, place))

    def note(self, said: str) -> None:
        """Says it once."""
        self.out.notes += [said] if said not in self.out.notes else []

    # The files

    def files(self) -> None:
        found, out = self.found, self.out
        out.files = [FileRow(one.path.name, FORMS[one.form], one.bytes, one.tensors) for one in found.held]
        out.format = ", ".join(dict.fromkeys(file.format for file in out.files))
        out.index, out.absent, out.beside, out.leftovers = found.index, found.absent, found.beside, found.leftovers
        out.metadata, out.wrappers = found.metadata, list(found.wrappers)
        out.kind = "model" if found.held else "nothing"
        for code, said, place in found.faults:
            # Of several files some may be weights, and then the others are what is missing.
            lacks = found.held and code in CODES["not a checkpoint"]
            self.fault("missing-shard" if lacks else code, said, place)
        for name, foreign in found.foreign.items():
            shown = ", ".join(foreign[:3]) + " …" * (len(foreign) > 3)
            said = f"it holds foreign objects ({shown}), whose code would run if it were unpickled; nothing was run"
            self.fault("foreign-object", said, name)
        pickled = found.pickled
        if pickled is None:
            return
        out.sections = [SectionRow(name, one.tensors, one.bytes) for name, one in pickled.sections.items()]
        plain = (bool, int, float, str, type(None))
        out.settings = {key: value for key, value in pickled.settings.items() if isinstance(value, plain)}
        out.shared, out.opaque = pickled.shared, pickled.opaque
        if pickled.unread:
            held = amount(sum(pickled.unread.values()), "byte")
            out.notes.append(f"{held} in {pickled.file.name} that nothing in it refers to")
        if len(out.sections) > 1:
            out.kind = "training"

    def lost(self) -> None:
        """Tensors that are not to be had, as patterns."""
        for reason in dict.fromkeys(self.found.lost.values()):
            for pattern in fold(name for name, why in self.found.lost.items() if why == reason):
                self.fault("lost-tensor", f"{_several(pattern.text, pattern.names)} {reason}", pattern.text)

    # An adapter

    def is_adapter(self) -> bool:
        if not (self.found.directory / "adapter_config.json").is_file():
            return False
        from gptcli.checkpoint.adapter import is_adapter

        return is_adapter(self.path)

    def adapter(self) -> None:
        from gptcli.checkpoint import adapter

        self.out.kind, self.out.config = "adapter", adapter.CONFIG
        try:
            self.out.adapter = adapter.read(self.found.directory)
        except GptcliError as error:
            if error.code == "config" or not self.out.findings:
                self.fault("adapter", error.message.removeprefix(f"{self.found.directory}/"), adapter.CONFIG)
            return
        self.owned = {name: Owned((), "adapter") for name in self.infos}
        for one in self.out.adapter.faults:
            self.fault("missing-part" if one.code == "incomplete" else "adapter", one.said, self.out.adapter.file)

    # What describes it

    def told(self) -> None:
        self.described.read(self.config)
        out, spec = self.out, self.described.spec
        if spec is not None:
            out.spec, out.summary = to_dict(spec), summary(spec)
        if self.strict and out.unknown:
            self.fault("unknown-key", f"unknown keys: {', '.join(out.unknown)}", out.config)

    def tensors(self) -> None:
        """Joins the tensors to the layout, or to the names of a family that fits."""
        spec, record = self.described.spec, self.described.record
        logical = self.unpacked() if self.infos else None
        if logical is None:
            return
        if spec is None or record is None:
            self.guessed(logical)
            return
        params = tuple(layout(spec))
        self.described_count = count.total(params)
        binding, misfits = compare(params, logical, record)
        self.out.prefix = binding.prefix
        self.own(params, binding, misfits)
        self.misfits(misfits)
        embed, head = (binding.bounds[name].stored if name in binding.bounds else "" for name in TABLES)
        self.tie(embed, head, logical)
        self.vocabulary(spec.vocab_size, next(iter(logical[embed].shape), None) if embed else None)

    def unpacked(self) -> Mapping[str, TensorInfo] | None:
        """The tensors as they would be if nothing was packed; None where packed ones can't be made out."""
        from gptcli.checkpoint import packed

        try:
            self.packing = packed.recognise(self.infos, self.described.raw)
        except GptcliError as error:
            if error.code == "file":
                raise
            said = error.message.rpartition(f"{self.found.directory}/")[2]
            if error.code == "packed":  # of a kind that is not known: as any other config that is not understood
                self.out.notes.append(said)
            else:
                self.fault({"incomplete": "missing-part", "config": "config"}.get(error.code, "packing"), said)
                self.out.notes.append("packed as they are, the tensors are not held against the config")
                return None
        p = self.packing
        if p is None:
            return self.infos
        roles = dict(Counter(role for one in p.weights.values() for role in one.parts if role != "numbers"))
        bits = round(p.bits_a_weight, 4)
        self.out.quantised = Quantised(p.method, p.schemes, p.count, p.stored, p.bytes, bits, roles)
        return p.logical(self.infos)

    def guessed(self, logical: Mapping[str, TensorInfo]) -> None:
        """No config that is understood: names tell the family, and shapes the sizes."""
        from gptcli.families.guess import guess

        if not self.out.config:
            self.out.notes.append("no config describes it: names tell the family, and shapes the sizes")
        found = guess(logical)
        if found is None:
            self.out.notes.append("the names are of no family that gptcli knows")
            self.own_packed({})
            return
        self.out.families, self.out.prefix = self.out.families or list(found.families), found.prefix
        if self.described.spec is None and not self.out.values:
            self.out.values = shapes_tell(found.values)
        ours = {name: found.ours(name) for name in logical}
        self.owned = {name: Owned((our,), "weight") for name, our in ours.items() if our and name in self.infos}
        self.own_packed({name: (our,) for name, our in ours.items() if our})
        rows = next((one.value for one in found.values if one.path == "vocab_size"), None)
        self.vocabulary(None, rows)

    # How the tensors lie in the layout

    def own(self, params: Sequence[Param], binding: Binding, misfits: list[Misfit]) -> None:
        names: dict[str, list[str]] = {}
        for param in params:
            if param.name in binding.bounds:
                names.setdefault(binding.bounds[param.name].stored, []).append(param.name)
        self.owned = {name: Owned(tuple(ours), "weight") for name, ours in names.items() if name in self.infos}
        self.own_packed(names)
        if self.packing is not None:
            order = {param.name: i for i, param in enumerate(params)}
            own = {name: next(iter(owned.names), "").partition(" ")[0] for name, owned in self.owned.items()}
            self.owned = {name: self.owned[name] for name in sorted(own, key=lambda n: order.get(own[n], len(order)))}
        left = [misfit.stored for misfit in misfits if misfit.code == "left-over-tensor"]
        for kind, stored in (("buffer", binding.buffers), ("unused", binding.unused), ("left over", left)):
            self.owned |= {name: Owned((), kind) for name in stored if name in self.infos}

    def packed(self) -> Iterator[tuple[str, "Packed", dict[str, str]]]:
        """Every packed weight under the name that it has unpacked, and its parts' names among the tensors, by role."""
        for name, weight in self.packing.weights.items() if self.packing else ():
            stored = {role: bare(part.key) if self.found.wrappers else part.key for role, part in weight.parts.items()}
            yield name, weight, stored

    def own_packed(self, names: Mapping[str, Sequence[str]]) -> None:
        """The parts of packed weights; names: ours by the name that a weight has unpacked."""
        for name, weight, parts in self.packed():
            ours = tuple(names.get(name, ()))
            for role, stored in parts.items():
                beside = Owned(tuple(f"{our} ({role})" for our in ours), "scale")
                self.owned[stored] = Owned(ours, "packed", weight.shape) if role == "numbers" else beside
        self.owned |= {name: Owned((), "scale") for name in (self.packing.ignored if self.packing else ())}

    def misfits(self, misfits: list[Misfit]) -> None:
        """What does not fit the layout, alike things together."""
        lost = {bare(name) for name in self.found.lost}
        groups: dict[tuple, dict[str, str]] = {}
        for one in misfits:
            if one.code != "missing-tensor" or one.stored not in lost:
                groups.setdefault((self.code(one), one.found, one.needed), {})[one.stored] = one.param
        for (code, found, needed), ours in groups.items():
            for pattern in fold(ours):
                many, params = _several(pattern.text, pattern.names), [ours[name] for name in pattern.names]
                owner, info = braced(params) or params[0], self.infos.get(pattern.names[0])
                self.fault(code, _misfit(code, many, owner, found, needed, info), pattern.text)

    def code(self, one: Misfit) -> str:
        """Of the finding that a misfit makes: the head and the vocabulary have their own."""
        head = self.described.spec.lm_head
        if one.code == "missing-tensor" and one.param == "lm_head.weight" and head and not head.tied:
            return "tie"
        rows = len(one.found) == 2 and one.found[1:] == one.needed[1:]
        return "vocabulary" if one.code == "shape" and one.param in TABLES and rows else one.code

    # Head and vocabulary

    def tie(self, embed: str, stored: str, logical: Mapping[str, TensorInfo]) -> None:
        """A head beside a tie: the same bytes are redundant, others contradict the config."""
        head = self.described.spec.lm_head
        if head is None:
            return
        if not head.tied or not stored or not embed:
            self.out.tie = Tie(head.tied, "" if head.tied else stored)
            return
        from gptcli.checkpoint.scan import alike

        same, compared = alike(logical[stored], logical[embed])
        self.out.tie = Tie(True, stored, same, compared)
        if same is False:
            said = f"the config ties the head, but {stored} differs from {embed}; the file's is used"
            self.fault("tie", said, stored)

    def vocabulary(self, said: int | None, rows: int | None) -> None:
        from gptcli.tokens.size import size_of

        size = None
        try:
            size = size_of(self.found.directory)
        except GptcliError as error:
            self.fault("tokenizer", error.message.removeprefix(f"{self.found.directory}/"))
        self.out.vocabulary = Vocabulary(rows, said, size.ids if size else None, size.file if size else "")
        if size and rows is not None and size.ids > rows:
            beyond = f"the table has {rows:,} rows: ids from {rows:,} on have none"
            self.fault("vocabulary", f"the tokenizer knows {size.ids:,} ids and {beyond}", size.file)

    # What needs the bytes

    def whole(self) -> dict[str, TensorInfo]:
        """The tensors that are all there, as they follow one another in the files."""
        found, kept = self.found, {}
        for name, info in sorted(self.infos.items(), key=lambda item: (str(item[1].file), item[1].start)):
            lay, size = found.lays.get(info.key), info.end - info.start
            if lay and prod(info.shape) * lay.bits // 8 > max(size, MOST_REPEATED):
                self.note(f"not read: {info.key}, a view that repeats {size:,} bytes")
            elif name not in found.lost and info.key not in found.lost:
                kept[name] = info
        return kept

    def lays(self, infos: Mapping[str, TensorInfo]) -> dict[str, Lay]:
        found = self.found.lays
        return {name: found[info.key] for name, info in infos.items() if info.key in found}

    def statistics(self) -> None:
        from gptcli.model.statistics import statistics_of

        infos, packed, parts = self.whole(), {}, set()
        for _, weight, stored in self.packed():
            if weight.runs and all(name in infos for name in stored.values()):
                packed[stored.pop("numbers")] = weight
                parts.update(stored.values())
            else:
                parts.update(name for name in stored.values() if name in infos and infos[name].dtype not in FLOATS)
                self.note(f"no statistics of packed numbers: {weight.said} is not dequantised")
        infos = {name: info for name, info in infos.items() if name not in parts and self.fits(name, info)}
        self.out.statistics = []
        with self.wanted.progress("statistics", _bytes(infos.values())) as step:
            for name, one in statistics_of(infos, self.lays(infos), packed, self.wanted.spectral, step):
                stored = packed[name].name if name in packed else infos[name].key
                row = StatisticsRow(stored=stored, name=named(self.owned.get(name, NO_OWNER).names), **vars(one))
                self.out.statistics.append(row)
                bad = (("nan", "NaN", one.nan, one.first_nan), ("inf", "infinite", one.inf, one.first_inf))
                for code, word, times, first in bad:
                    if times:
                        self.fault(code, f"tensor {stored} holds {times:,} {word}, the first at {first}", stored)

    def digests(self) -> None:
        from gptcli.checkpoint.scan import digest

        infos, found = self.whole(), self.found
        with self.wanted.progress("digests", _bytes(infos.values())) as step:
            digests = digest(infos, self.lays(infos), step)
        incomplete = found.lost or found.absent or any(f.code in CODES["corrupt"] for f in found.faults)
        tensors = {info.key: digests.tensors[name] for name, info in infos.items() if self.fits(name, info)}
        self.out.digests = Digests("sha256", None if incomplete else digests.model, tensors)

    def fits(self, name: str, info: TensorInfo) -> bool:
        """Whether a tensor is one of those that were asked for."""
        return fits(self.wanted.fits, info, self.owned.get(name, NO_OWNER))

    # Counts, and the verdict

    def counts(self) -> None:
        alike: dict[str, list[TensorInfo]] = {}
        for info in self.infos.values():
            alike.setdefault(info.dtype, []).append(info)
        rows = [DtypeRow(dtype, len(infos), _numbers(infos), _bytes(infos)) for dtype, infos in alike.items()]
        self.out.dtypes = sorted(rows, key=lambda row: -row.bytes)
        if self.infos:
            buffers = {name for name, own in self.owned.items() if own.kind == "buffer"}
            apart = _numbers(self.infos[name] for name in buffers)
            stored = _numbers(self.infos.values())
            self.out.parameters = Counts(self.distinct(buffers), self.described_count, stored, apart)

    def distinct(self, buffers: set[str]) -> int:
        """Distinct parameters in the files: tensors that lie in the same bytes count once, packed ones as they were."""
        infos = self.packing.logical(self.infos) if self.packing else self.infos
        head = self.out.tie.head if self.out.tie and self.out.tie.config and self.out.tie.same is not False else ""
        infos = {name: info for name, info in infos.items() if name not in buffers and name != head}
        if self.found.pickled is None:  # other formats have no two names for the same bytes
            return _numbers(infos.values())
        apart = {(i.file, i.start, i.end) if i.end > i.start else name: i for name, i in infos.items()}
        return _numbers(apart.values())

    def verdict(self) -> None:
        out = self.out
        out.findings.sort(key=lambda finding: list(VERDICTS).index(finding.code))
        if out.findings:
            first = out.findings[0]
            out.verdict = VERDICTS[first.code]
            place = f"{first.path}: " if first.path and (self.found.directory / first.path).is_file() else ""
            more = f" (and {len(out.findings) - 1} more)" if len(out.findings) > 1 else ""
            out.said = f"{place}{first.message}{more}"
            return
        what = out.adapter.said if out.adapter else " or ".join(out.families[:3]) or out.format
        if out.quantised is not None:
            what += f", {next(iter(out.quantised.schemes))}"
        if out.parameters is None:
            out.said = f"{what} · no tensors"
            return
        tensors = amount(sum(file.tensors for file in out.files), "tensor")
        size = amount(sum(file.bytes for file in out.files), "byte")
        alone = "no config that gptcli understands" if out.config else "no config"
        said = f"{what} · {out.parameters.total:,} parameters in {tensors} · {size} in {amount(len(out.files), 'file')}"
        out.said = said if self.described.spec or out.adapter else f"{said} · {alone}"


def _numbers(infos: Iterable[TensorInfo]) -> int:
    return sum(prod(info.shape) for info in infos)


def _bytes(infos: Iterable[TensorInfo]) -> int:
    return sum(info.end - info.start for info in infos)


def _several(pattern: str, names: Sequence[str]) -> str:
    return f"tensor {pattern} is" if len(names) == 1 else f"{len(names)} tensors {pattern} are"


def _misfit(
    code: str, many: str, owner: str, found: tuple[int, ...], needed: tuple[int, ...], info: TensorInfo | None
) -> str:
    """A line for tensors that do not fit in the same way."""
    if code == "missing-tensor":
        return f"{many} missing ({owner} {list(needed)})"
    if code == "tie":
        return f"{many} missing, and the config does not tie the head"
    if code == "vocabulary":
        return f"{many} {list(found)}: {found[0]:,} rows, and vocab_size is {needed[0]:,}"
    if code == "shape":
        return f"{many} {list(found)}, and the config makes {owner} {list(needed)}"
    if code == "dtype":
        return f"{many} {info.dtype if info else 'of a type'}, which holds no weights that can be run"
    return f"{many} left over: no parameter reads {'it' if ' is' in many[-3:] else 'them'}"
