"""A lone vocab.txt, a word a line, as the tokenizer.json that says the same: words cut into known pieces."""

from pathlib import Path
from typing import Any

from gptcli.errors import GptcliError

# The special words, by the setting that may name another.
SPECIAL = {
    "unk_token": "[UNK]", "sep_token": "[SEP]", "pad_token": "[PAD]", "cls_token": "[CLS]", "mask_token": "[MASK]",
}  # fmt: skip
LONGEST = 100  # letters of a word that is cut into pieces; a longer one is unknown as a whole
INNER = "##"  # begins a piece inside a word


def word_pieces(path: Path, text: str, settings: dict[str, Any]) -> dict[str, Any]:
    """The table of a tokenizer.json for the words in `text`, a line each, and what tokenizer_config.json says of them.

    Raises GptcliError where a word that every text needs is not among them.
    """
    ids: dict[str, int] = {}
    for id_, line in enumerate(text.rstrip("\n").split("\n")):
        ids[line.removesuffix("\r")] = id_
    names = {key: _word(settings.get(key), word) for key, word in SPECIAL.items()}
    unknown, sep, cls = names["unk_token"], names["sep_token"], names["cls_token"]
    for word in (unknown, sep, cls):
        if word not in ids:
            raise GptcliError(f"{path}: no word {word}, which every text needs", "give --ids", "tokenizer")
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "added_tokens": [
            {"id": ids[word], "content": word} | flags
            for word in sorted(set(names.values()) & ids.keys(), key=ids.__getitem__)
        ],
        "normalizer": {
            "type": "BertNormalizer",
            "clean_text": True,
            "handle_chinese_chars": settings.get("tokenize_chinese_chars", True),
            "strip_accents": settings.get("strip_accents"),
            "lowercase": settings.get("do_lower_case", True),
        },
        "pre_tokenizer": {"type": "BertPreTokenizer"},
        "post_processor": {"type": "BertProcessing", "sep": [sep, ids[sep]], "cls": [cls, ids[cls]]},
        "decoder": {"type": "WordPiece", "prefix": INNER, "cleanup": True},
        "model": {
            "type": "WordPiece",
            "unk_token": unknown,
            "continuing_subword_prefix": INNER,
            "max_input_chars_per_word": LONGEST,
            "vocab": ids,
        },
    }


def _word(named: Any, default: str) -> str:
    """A special word, which settings write as text or as a table."""
    word = named.get("content") if isinstance(named, dict) else named
    return word if isinstance(word, str) else default
