"""What .gguf files call vocabularies, and ways to split a text before its merges."""

from typing import Literal, NamedTuple

# tokenizer.ggml.model: pieces of bytes in GPT-2's alphabet with merges, or sentencepiece's pieces with scores.
VOCABULARIES: dict[str, Literal["bytes", "pieces"]] = {"gpt2": "bytes", "llama": "pieces"}


class Split(NamedTuple):
    """A way to split a text into words, within which bytes are merged.

    pattern: what a word looks like; None: as GPT-2 has it. digits: each stands alone. whole: a word that is in the
    vocabulary is taken as it is, before any merge. composed: letters and their marks are joined first (NFC). bos: does
    a text begin with it, where the file says nothing?
    """

    pattern: str | None = None
    digits: bool = False
    whole: bool = False
    composed: bool = False
    bos: bool = False


CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
CASED_REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"

BY_THREES = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + REST
BY_ONES = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|" + REST


def _cased(after: str, digits: str) -> str:
    """Words that begin with capitals and go on in small letters, and what may follow each."""
    word = r"[^\r\n\p{L}\p{N}]?"
    return f"{word}{UPPER}*{LOWER}+{after}|{word}{UPPER}+{LOWER}*{after}|{digits}|{CASED_REST}"


GPT2 = Split()
DIGITS = Split(digits=True)
LLAMA3 = Split(BY_THREES, whole=True, bos=True)
CL100K = Split(BY_THREES)
QWEN2 = Split(BY_ONES, composed=True)
O200K = Split(_cased(CONTRACTIONS + "?", r"\p{N}{1,3}"))
TEKKEN = Split(_cased("", r"\p{N}"), whole=True, bos=True)

# By tokenizer.ggml.pre.
SPLITS = {
    **dict.fromkeys(("gpt-2", "mpt", "olmo", "phi-2", "jais", "exaone4"), GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "midm-2.0"), LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe"), CL100K),
    "qwen2": QWEN2,
    **dict.fromkeys(("stablelm2", "deepseek-r1-qwen", "megrez", "hunyuan"), QWEN2._replace(composed=False)),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2"), O200K),
    "tekken": TEKKEN,
}

# Files of the first months don't name their split; these architectures have had but one.
UNNAMED = {"gpt2": "gpt-2", "gptneox": "gpt-2", "starcoder2": "starcoder", "qwen2": "qwen2", "qwen3": "qwen2"}
