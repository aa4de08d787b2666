"""One path, looked at step by step: what `inspect` reports of it."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
from gptcli.report.inspect_config import Described, describe, shapes_tell
from gptcli.report.inspect_tensors import NO_OWNER, Owned, fits, named, tensor_rows
from gptcli.report.summary import summary
from gptcli.spec import to_dict

if TYPE_CHECKING:
    from gptcli.checkpoint.packed import Packing

RANKS = {code: (rank, i) for rank, codes in enumerate(CODES.values()) for i, code in enumerate(codes)}
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
        self.described_count: int | None = None

    def done(self) -> Inspected:
        """All that is known of it."""
        self.files()
        described = Described()
        if self.is_adapter():
            self.adapter()
        else:
            described = describe(self.found, self.config)
            self.described(described)
            self.tensors(described)
        self.counts()
        self.lost()
        self.out.tensors = tensor_rows(self.infos, self.owned, self.wanted.each or self.wanted.where, self.wanted.fits)
        if self.wanted.fits is not None and not self.out.tensors:
            self.out.notes.append(f"no tensor's name fits {self.wanted.fits}")
        if self.wanted.stats:
            self.statistics()
        if self.wanted.digests:
            self.digests()
        self.verdict(described)
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
        nothing_read = not found.held
        for code, said, place in found.faults:
            # Of several files some may be weights, and then the others are what is missing.
            self.fault(code if nothing_read or code not in CODES["not a checkpoint"] else "missing-shard", said, place)
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

    def described(self, described: Described) -> None:
        out = self.out
        for code, said, place in described.faults:
            self.fault(code, said, place)
        out.notes += described.notes
        out.config, out.families = described.source, [described.family] if described.family else []
        out.values, out.idle, out.checked = described.values, described.idle, described.checked
        out.unknown = described.unknown
        if described.spec is not None:
            out.spec, out.summary = to_dict(described.spec), summary(described.spec)
        if self.strict and described.unknown:
            self.fault("unknown-key", f"unknown keys: {', '.join(described.unknown)}", described.source)

    def tensors(self, described: Described) -> None:
        """Joins the tensors to the layout, or to the names of a family that fits."""
        if not self.infos:
            return
        logical = self.unpacked(described.raw)
        if logical is None:
            return
        if described.spec is None or described.record is None:
            self.guessed(logical, described)
            return
        params = tuple(layout(described.spec))
        self.described_count = count.total(params)
        binding, misfits = compare(params, logical, described.record)
        self.out.prefix = binding.prefix
        self.own(params, binding, misfits)
        self.misfits(misfits, binding, described)
        self.tie(binding, described, logical)
        self.vocabulary(described.spec.vocab_size, self.rows_of(binding, "embed.weight", logical))

    def unpacked(self, raw: Mapping[str, Any]) -> Mapping[str, TensorInfo] | None:
        """The tensors as they would be if nothing was packed; None where packed ones can't be made out."""
        from gptcli.checkpoint import packed

        try:
            self.packing = packed.recognise(self.infos, raw)
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
        if self.packing is None:
            return self.infos
        roles = Counter(role for one in self.packing.weights.values() for role in one.parts if role != "numbers")
        p = self.packing
        self.out.quantised = Quantised(
            p.method, p.schemes, p.count, p.stored, p.bytes, round(p.bits_a_weight, 4), dict(roles)
        )
        return p.logical(self.infos)

    def guessed(self, logical: Mapping[str, TensorInfo], described: Described) -> None:
        """No config that is understood: names tell the family, and shapes the sizes."""
        from gptcli.families.guess import guess

        if not described.source:
            self.out.notes.append("no config describes it: names tell the family, and shapes the sizes")
        found = guess(logical)
        if found is None:
            self.out.notes.append("the names are of no family that gptcli knows")
            self.own_packed({})
            return
        self.out.families, self.out.prefix = self.out.families or list(found.families), found.prefix
        if described.spec is None and not self.out.values:
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
            last = [" "]
            self.owned = dict(
                sorted(
                    self.owned.items(), key=lambda one: order.get((one[1].names or last)[0].split(" ")[0], len(order))
                )
            )
        self.owned |= {name: Owned((), "buffer") for name in binding.buffers if name in self.infos}
        self.owned |= {name: Owned((), "unused") for name in binding.unused if name in self.infos}
        left = [misfit.stored for misfit in misfits if misfit.code == "left-over-tensor"]
        self.owned |= {name: Owned((), "left over") for name in left if name in self.infos}

    def own_packed(self, names: Mapping[str, Sequence[str]]) -> None:
        """The parts of packed weights; names: ours by the name that a weight has unpacked."""
        if self.packing is None:
            return
        for name, one in self.packing.weights.items():
            ours = tuple(names.get(name, ()))
            for role, stored in zip(one.parts, self.stored_names(one.parts.values())):
                if role == "numbers":
                    self.owned[stored] = Owned(ours, "packed", one.shape)
                else:
                    self.owned[stored] = Owned(tuple(f"{our} ({role})" for our in ours), "scale")
        self.owned |= {name: Owned((), "scale") for name in self.packing.ignored}

    def misfits(self, misfits: list[Misfit], binding: Binding, described: Described) -> None:
        """What does not fit the layout, alike things together."""
        lost, spec = {bare(name) for name in self.found.lost}, described.spec
        groups: dict[tuple, list[Misfit]] = {}
        for one in misfits:
            if one.code == "missing-tensor" and one.stored in lost:
                continue
            table = one.param in ("embed.weight", "lm_head.weight")
            rows = len(one.found) == 2 and one.found[1:] == one.needed[1:]
            code = "vocabulary" if one.code == "shape" and table and rows else one.code
            if (
                one.code == "missing-tensor"
                and one.param == "lm_head.weight"
                and spec.lm_head
                and not spec.lm_head.tied
            ):
                code = "tie"
            groups.setdefault((code, one.found, one.needed), []).append(one)
        for (code, found, needed), alike in groups.items():
            ours = {one.stored: one.param for one in alike}
            for pattern in fold(ours):
                many, params = _several(pattern.text, pattern.names), [ours[name] for name in pattern.names]
                owner = braced(params) or params[0]
                self.fault(
                    code, _misfit(code, many, owner, found, needed, self.infos.get(pattern.names[0])), pattern.text
                )

    # Head and vocabulary

    def tie(self, binding: Binding, described: Described, logical: Mapping[str, TensorInfo]) -> None:
        """A head beside a tie: the same bytes are redundant, others contradict the config."""
        head = described.spec.lm_head
        if head is None:
            return
        if not head.tied:
            stored = binding.bounds.get("lm_head.weight")
            self.out.tie = Tie(False, stored.stored if stored else "")
            return
        table = binding.bounds.get("embed.weight")
        again = binding.bounds.get("lm_head.weight")
        if again is None or table is None:
            self.out.tie = Tie(True, "")
            return
        from gptcli.checkpoint.scan import alike

        a, b = logical[again.stored], logical[table.stored]
        same, compared = alike(a, b)
        self.out.tie = Tie(True, again.stored, same, compared)
        if same is False:
            said = f"the config ties the head, but {again.stored} differs from {table.stored}; the file's is used"
            self.fault("tie", said, again.stored)

    def rows_of(self, binding: Binding, name: str, logical: Mapping[str, TensorInfo]) -> int | None:
        bound = binding.bounds.get(name)
        return logical[bound.stored].shape[0] if bound and logical[bound.stored].shape else None

    def vocabulary(self, said: int | None, rows: int | None) -> None:
        from gptcli.tokens.size import size_of

        size = None
        try:
            size = size_of(self.found.directory)
        except GptcliError as error:
            self.fault("tokenizer", error.message.removeprefix(f"{self.found.directory}/"))
        self.out.vocabulary = Vocabulary(rows, said, size.ids if size else None, size.file if size else "")
        if size and rows is not None and size.ids > rows:
            said = (
                f"the tokenizer knows {size.ids:,} ids and the table has {rows:,} rows: ids from {rows:,} on have none"
            )
            self.fault("vocabulary", said, size.file)

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
        for weight in self.packing.weights.values() if self.packing else ():
            stored = dict(zip(weight.parts, self.stored_names(weight.parts.values())))
            if weight.runs and all(name in infos for name in stored.values()):
                packed[stored.pop("numbers")] = weight
                parts.update(stored.values())
            else:
                parts.update(name for name in stored.values() if name in infos and infos[name].dtype not in FLOATS)
                self.note(f"no statistics of packed numbers: {weight.said} is not dequantised")
        infos = {name: info for name, info in infos.items() if name not in parts and self.fits(name, info)}
        self.out.statistics = []
        with self.wanted.progress("statistics", sum(info.end - info.start for info in infos.values())) as step:
            for name, one in statistics_of(infos, self.lays(infos), packed, self.wanted.spectral, step):
                stored = packed[name].name if name in packed else infos[name].key
                row = StatisticsRow(stored=stored, name=named(self.owner(name).names), **vars(one))
                self.out.statistics.append(row)
                for code, word, count, first in (
                    ("nan", "NaN", one.nan, one.first_nan),
                    ("inf", "infinite", one.inf, one.first_inf),
                ):
                    if count:
                        self.fault(code, f"tensor {stored} holds {count:,} {word}, the first at {first}", stored)

    def stored_names(self, parts: Iterable[TensorInfo]) -> list[str]:
        """The names under which parts of packed weights stand among the tensors."""
        return [bare(part.key) if self.found.wrappers else part.key for part in parts]

    def digests(self) -> None:
        from gptcli.checkpoint.scan import digest

        infos, found = self.whole(), self.found
        with self.wanted.progress("digests", sum(info.end - info.start for info in infos.values())) as step:
            digests = digest(infos, self.lays(infos), step)
        incomplete = found.lost or found.absent or any(f.code in CODES["corrupt"] for f in found.faults)
        tensors = {info.key: digests.tensors[name] for name, info in infos.items() if self.fits(name, info)}
        self.out.digests = Digests("sha256", None if incomplete else digests.model, tensors)

    def owner(self, name: str) -> Owned:
        return self.owned.get(name, NO_OWNER)

    def fits(self, name: str, info: TensorInfo) -> bool:
        """Whether a tensor is one of those that were asked for."""
        return self.wanted.fits is None or fits(self.wanted.fits, info, self.owner(name))

    # Counts, and the verdict

    def counts(self) -> None:
        buffers = {name for name, own in self.owned.items() if own.kind == "buffer"}
        sizes = {name: prod(info.shape) for name, info in self.infos.items()}
        rows: dict[str, list[int]] = {}
        for name, info in self.infos.items():
            row = rows.setdefault(info.dtype, [0, 0, 0])
            row[0] += 1
            row[1] += sizes[name]
            row[2] += info.end - info.start
        by_bytes = sorted(rows.items(), key=lambda item: -item[1][2])
        self.out.dtypes = [DtypeRow(dtype, *row) for dtype, row in by_bytes]
        if not self.infos:
            return
        stored, apart = sum(sizes.values()), sum(sizes[name] for name in buffers)
        self.out.parameters = Counts(self.distinct(buffers), self.described_count, stored, apart)

    def distinct(self, buffers: set[str]) -> int:
        """Distinct parameters in the files: tensors that lie in the same bytes count once, packed ones as they were."""
        infos = self.packing.logical(self.infos) if self.packing else self.infos
        head = self.out.tie.head if self.out.tie and self.out.tie.config and self.out.tie.same is not False else ""
        if self.found.pickled is None:  # other formats have no two names for the same bytes
            return sum(prod(info.shape) for name, info in infos.items() if name not in buffers and name != head)
        spans = {}
        for name, info in infos.items():
            if name not in buffers and name != head:
                spans[(info.file, info.start, info.end) if info.end > info.start else name] = prod(info.shape)
        return sum(spans.values())

    def verdict(self, described: Described) -> None:
        out = self.out
        out.findings.sort(key=lambda finding: RANKS[finding.code])
        if out.findings:
            first = out.findings[0]
            out.verdict = list(CODES)[RANKS[first.code][0]]
            place = f"{first.path}: " if first.path and (self.found.directory / first.path).is_file() else ""
            more = f" (and {len(out.findings) - 1} more)" if len(out.findings) > 1 else ""
            out.said = f"{place}{first.message}{more}"
            return
        total, files = sum(file.bytes for file in out.files), len(out.files)
        alone = (
            ""
            if described.spec or out.adapter
            else " · no config that gptcli understands"
            if out.config
            else " · no config"
        )
        what = out.adapter.said if out.adapter else " or ".join(out.families[:3]) or out.format
        if out.quantised is not None:
            what += f", {next(iter(out.quantised.schemes))}"
        if out.parameters is None:
            out.said = f"{what} · no tensors"
            return
        tensors = f"{out.parameters.total:,} parameters in {amount(sum(file.tensors for file in out.files), 'tensor')}"
        out.said = f"{what} · {tensors} · {amount(total, 'byte')} in {amount(files, 'file')}{alone}"


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
