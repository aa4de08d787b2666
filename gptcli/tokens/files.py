"""The tokenizer in a checkpoint's directory, run by tiktoken, by the tokenizers library or by sentencepiece."""

import json
import tempfile
from contextlib import suppress
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from gptcli.errors import GptcliError
from gptcli.tokens import OWN_RULE, Encoded, Rule, Tokenizer, plain

# GPT-2's split of a text before any merge: contractions, words, numbers, other signs, white space.
GPT2_SPLIT = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"""
SPACE = "\u2581"  # sentencepiece's sign for one


class BytePairs(Tokenizer):
    """A byte-level byte-pair encoding of GPT-2's kind, run by tiktoken.

    bos: the id that it begins with by its own rule; known_bos: the one that it begins with if asked.
    """

    def __init__(self, encoding: Any, name: str, bos: int | None = None, known_bos: int | None = None):
        self.encoding, self.name, self.size = encoding, name, encoding.n_vocab
        self.bos, self.known_bos = bos, known_bos

    def marked(self, text: str, rule: Rule = OWN_RULE) -> Encoded:
        ids = self.encoding.encode(text, allowed_special="all") if rule.special else self.encoding.encode_ordinary(text)
        return plain(ids, bos_by(rule, self.bos, self.known_bos, self.name))

    def piece(self, id_: int) -> bytes | None:
        try:
            return self.encoding.decode_single_token_bytes(id_)
        except (KeyError, OverflowError):  # tiktoken's ids are 32 bits
            return None


def bos_by(rule: Rule, own: int | None, known: int | None, name: str) -> int | None:
    """The BOS to begin with. Raises GptcliError where one is asked for and there is none."""
    if rule.bos is None:
        return own
    if rule.bos and known is None:
        raise GptcliError(f"--bos: {name} names no BOS", "leave it out", "tokenizer")
    return known if rule.bos else None


class Library(Tokenizer):
    """Any tokenizer.json, run by the tokenizers library. rule_adds: follow its own post-processing (a BOS, an EOS)."""

    def __init__(self, path: Path, table: dict[str, Any], settings: dict[str, Any]):
        from tokenizers import Tokenizer as Run

        model = table.get("model")
        if isinstance(model, dict) and model.get("dropout"):
            raise GptcliError(f"{path}: its dropout makes other ids at each run", "set it to null", "tokenizer")
        try:
            self.run = Run.from_file(str(path))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # the library raises bare Exceptions, and panics that are none
            raise GptcliError(f"{path}: {str(error).splitlines()[0]}", "mend the file", "tokenizer") from None
        self.name, self.size = path.name, self.run.get_vocab_size()
        self.table, self.settings = table, settings

    @cached_property
    def known_bos(self) -> int | None:
        word = word_of(self.settings.get("bos_token"))
        return None if word is None else self.run.token_to_id(word)

    def marked(self, text: str, rule: Rule = OWN_RULE) -> Encoded:
        self.run.encode_special_tokens = not rule.special
        wanted = rule.bos if rule.bos is not None else self.settings.get("add_bos_token")
        encoded = self.run.encode(text, add_special_tokens=wanted is not False)
        ids, added = list(encoded.ids), [bool(mark) for mark in encoded.special_tokens_mask]
        if rule.special:  # there the mask marks special words of the text as well
            own = self.run.encode(text, add_special_tokens=False).ids
            start = next((i for i in range(len(ids)) if ids[i : i + len(own)] == own), 0) if own else 0
            added = [not start <= i < start + len(own) for i in range(len(ids))]
        if wanted and self.known_bos is not None and ids[:1] != [self.known_bos]:
            ids, added = [self.known_bos, *ids], [True, *added]
        if rule.bos:
            bos_by(rule, None, self.known_bos, self.name)
        return Encoded(ids, added)

    @cached_property
    def letters(self) -> dict[str, int] | None:
        """The letters of bytes, for a vocabulary of GPT-2's alphabet; None for one of sentencepiece's."""
        return byte_letters() if "ByteLevel" in json.dumps(self.table.get("decoder")) else None

    @cached_property
    def content(self) -> dict[int, str]:
        """Added tokens, which stand for themselves."""
        return {entry["id"]: entry["content"] for entry in self.table.get("added_tokens") or ()}

    def piece(self, id_: int) -> bytes | None:
        if id_ in self.content:
            return self.content[id_].encode()
        try:
            word = self.run.id_to_token(id_)
        except OverflowError:
            return None
        if word is None:
            return None
        if self.letters is not None and all(letter in self.letters for letter in word):
            return bytes(self.letters[letter] for letter in word)
        return sentence_piece(word)


class Sentences(Tokenizer):
    """A tokenizer.model, run by sentencepiece."""

    def __init__(self, path: Path, settings: dict[str, Any]):
        try:
            from sentencepiece import SentencePieceProcessor
        except ImportError:
            raise GptcliError(
                f"{path}: sentencepiece is not installed", "pip install sentencepiece, or give --ids", "tokenizer"
            ) from None
        try:
            self.run = SentencePieceProcessor(model_file=str(path))
        except Exception as error:
            raise GptcliError(f"{path}: {str(error).splitlines()[0]}", "mend the file", "tokenizer") from None
        self.name, self.size = path.name, self.run.get_piece_size()
        self.known_bos = self.run.bos_id() if self.run.bos_id() >= 0 else None
        self.bos = self.known_bos if settings.get("add_bos_token", True) else None

    def marked(self, text: str, rule: Rule = OWN_RULE) -> Encoded:
        bos = bos_by(rule, self.bos, self.known_bos, self.name)
        if rule.special:
            raise GptcliError(f"--special: {self.name} has none that a text can name", "give --ids", "tokenizer")
        return plain(self.run.encode(text), bos)

    def piece(self, id_: int) -> bytes | None:
        return sentence_piece(self.run.id_to_piece(id_)) if 0 <= id_ < self.size else None


def sentence_piece(word: str) -> bytes:
    """The bytes of sentencepiece's pieces: `▁the` is " the", `<0x0A>` one byte."""
    if len(word) == 6 and word.startswith("<0x") and word.endswith(">"):
        return bytes([int(word[3:5], 16)])
    return word.replace(SPACE, " ").encode()


def word_of(token: Any) -> str | None:
    """A special token's text, which files write as text or as a table."""
    return token.get("content") if isinstance(token, dict) else token if isinstance(token, str) else None


def from_files(directory: Path) -> Tokenizer | None:
    """The tokenizer in a checkpoint's directory; None where it holds none. Raises GptcliError for broken files.

    tokenizer.json, or vocab.json and merges.txt, by tiktoken when they are GPT-2's kind exactly; any other
    tokenizer.json by the tokenizers library; tokenizer.model where there is nothing else. Of BOS tokenizer_config.json
    has the last word.
    """
    names = ("tokenizer.json", "vocab.json", "merges.txt", "tokenizer.model", "tokenizer_config.json")
    whole, vocab, merges, pieces, about = (directory / name for name in names)
    settings = read_json(about) if about.is_file() else {}
    if whole.is_file():
        table = read_json(whole)
        if is_gpt2_like(table):
            pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in table["model"]["merges"]]
            added = {entry["content"]: entry["id"] for entry in table.get("added_tokens") or ()}
            with suppress(GptcliError):  # what tiktoken can't run, the library can
                return _byte_pairs(table["model"]["vocab"], pairs, added, str(whole), settings)
        return Library(whole, table, settings)
    if vocab.is_file() and merges.is_file():
        lines = [line.split(" ") for line in read(merges).split("\n") if line and not line.startswith("#version")]
        return _byte_pairs(read_json(vocab), lines, {}, str(vocab), settings)
    return Sentences(pieces, settings) if pieces.is_file() else None


def is_gpt2_like(table: dict[str, Any]) -> bool:
    """Bytes, split as GPT-2 does, nothing normalised, nothing added: what tiktoken with GPT2_SPLIT does exactly."""
    split, model, after = (table.get(name) or {} for name in ("pre_tokenizer", "model", "post_processor"))
    added = table.get("added_tokens") or []
    if not all(isinstance(part, dict) for part in (split, model, after, *added)):
        return False
    simple = split.get("type") == "ByteLevel" and not split.get("add_prefix_space") and split.get("use_regex", True)
    other = ("ignore_merges", "dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback")
    return (
        simple
        and after.get("type") in (None, "ByteLevel")
        and table.get("normalizer") is None
        and model.get("type") == "BPE"
        and isinstance(model.get("vocab"), dict)
        and isinstance(model.get("merges"), list)
        and not any(model.get(key) for key in other)
        and all(entry.get("special") and isinstance(entry.get("content"), str) for entry in added)
    )


def read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not UTF-8"
        raise GptcliError(f"{path}: {reason}", "mend the file", "file") from None


def read_json(path: Path) -> dict[str, Any]:
    try:
        table = json.loads(read(path))
    except (ValueError, RecursionError) as error:
        raise GptcliError(f"{path}: not JSON ({str(error).splitlines()[0]})", "mend the file", "file") from None
    if not isinstance(table, dict):
        raise GptcliError(f"{path}: holds no table", "mend the file", "file")
    return table


def _byte_pairs(
    vocab: dict[str, int], merges: list[list[str]], added: dict[str, int], where: str, settings: dict[str, Any]
) -> BytePairs:
    """tiktoken merges the pair whose result has the lowest id first, so ids must follow the order of the merges.

    Raises GptcliError for a vocabulary of another kind.
    """
    import tiktoken

    def refuse(reason: str) -> GptcliError:
        return GptcliError(f"{where}: {reason}", "give --ids", "tokenizer")

    letters, ids = byte_letters(), [*vocab.values(), *added.values()]
    if not all(type(id_) is int and 0 <= id_ < 2**31 for id_ in ids) or len(set(vocab.values())) < len(vocab):
        raise refuse("its ids are not whole numbers from 0, each given once")
    try:
        made = {first + second: vocab[first + second] for first, second in merges}
        ranks = {bytes([byte]): vocab[letter] for letter, byte in letters.items()}
        ranks |= {bytes(letters[letter] for letter in word): id_ for word, id_ in made.items()}
    except (KeyError, TypeError, ValueError) as error:
        raise refuse(f"not a byte-level vocabulary ({error})") from None
    if not all(first < second for first, second in pairwise(made.values())):
        raise refuse("its ids don't follow its merges as GPT-2's do")
    # What no merge makes is known, but no text becomes it.
    special = added | {word: id_ for word, id_ in vocab.items() if word not in made and word not in letters}
    encoding = tiktoken.Encoding(where, pat_str=GPT2_SPLIT, mergeable_ranks=ranks, special_tokens=special)
    bos = word_of(settings.get("bos_token"))
    known = (special | vocab).get(bos) if bos else None
    return BytePairs(
        encoding, f"byte pairs of {Path(where).name}", known if settings.get("add_bos_token") else None, known
    )


def byte_letters() -> dict[str, int]:
    """The printable letter that stands for each byte in GPT-2's vocabulary files: itself, or one from U+0100 on."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(byte): byte for byte in shown} | {chr(0x100 + i): byte for i, byte in enumerate(hidden)}


def from_name(name: str, offline: bool) -> Tokenizer:
    """An encoding that tiktoken knows by name, from its cache or (unless offline) fetched once into it."""
    import tiktoken
    import tiktoken.load

    def no_network(path: str) -> bytes:
        raise OSError("--offline was given")

    if name not in tiktoken.list_encoding_names():
        known = ", ".join(tiktoken.list_encoding_names())
        raise GptcliError(f"tokenizer: tiktoken has no encoding {name!r}", f"it has {known}", "tokenizer")
    fetch = tiktoken.load.read_file
    if offline:
        tiktoken.load.read_file = no_network
    try:
        encoding = tiktoken.get_encoding(name)
        return BytePairs(encoding, f"tiktoken's {name}", known_bos=encoding._special_tokens.get("<|endoftext|>"))
    except Exception as error:
        reason = "--offline was given" if offline else f"it could not be fetched ({type(error).__name__})"
        cache = Path(tempfile.gettempdir()) / "data-gym-cache"
        raise GptcliError(
            f"tiktoken's encoding {name!r} is not in its cache, and {reason}",
            "give --ids, or -m DIR with vocab.json and merges.txt, or fill the cache on a machine with a network and "
            f"set TIKTOKEN_CACHE_DIR (by default {cache})",
            "tokenizer",
        ) from None
    finally:
        tiktoken.load.read_file = fetch
