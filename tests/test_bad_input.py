"""What a person can get wrong: one clear line on standard error, nothing on standard output, exit status 2.

With --json, the same as one strict object on standard output. A case is the words typed, what the line must say, and
what lies in the working directory; every fault is made here.
"""

import json
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from gptcli.render.signs import harmless
from tests.command import Ran, gptcli, process

# A model of four ids, two numbers wide, whose checkpoint is six matrices.
MINI = """\
vocab_size: 4
context_length: 8
hidden_size: 2
n_layers: 1
position: {kind: none}
norm: {kind: none}
attention: {n_heads: 1, n_kv_heads: 1, head_dim: 2}
mlp: {kind: none}
lm_head: {tied: false}
"""
SHAPES = {"embed": [4, 2], **{f"layers.0.attn.{letter}": [2, 2] for letter in "qkvo"}, "lm_head": [4, 2]}
EIGHT = """\
vocab_size: 9
context_length: 8
hidden_size: 16
n_layers: 1
position: {kind: learned}
norm: {kind: layernorm, eps: 1e-5}
attention: {n_heads: 8, n_kv_heads: 2}
mlp: {kind: dense, size: 8, activation: relu}
lm_head: {tied: true}
"""
ZEROS = "weights:\n  '*.weight': zeros\n"
GPT2 = {"model_type": "gpt2", "vocab_size": 4, "n_positions": 8, "n_embd": 2, "n_layer": 1, "n_head": 1}
ESCAPES = "\x1b[31m\x07\x9b2J\u202e"  # colour, bell, a C1 control, a turn of the writing's direction


def safetensors(changes: dict[str, tuple[str, list[int]] | None] | None = None, cut: int = 0) -> bytes:
    """MINI's checkpoint, all zeros, with tensors of other types and shapes or without them, `cut` bytes short."""
    wanted = {f"{stem}.weight": ("F32", shape) for stem, shape in SHAPES.items()} | (changes or {})
    header, reached = {}, 0
    for name, (dtype, shape) in ((n, t) for n, t in wanted.items() if t):
        size = {"F32": 4, "I64": 8, "I32": 4, "U8": 1}[dtype]
        for length in shape:
            size *= length
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [reached, reached + size]}
        reached += size
    text = json.dumps(header).encode()
    whole = struct.pack("<Q", len(text)) + text + bytes(reached)
    return whole[: len(whole) - cut]


def files(contents: dict[str, str | bytes | dict]) -> Callable[[Path], None]:
    """Puts files into the working directory: bytes, text, or a table as JSON."""

    def make(folder: Path) -> None:
        for name, content in contents.items():
            path = folder / name
            path.parent.mkdir(exist_ok=True)
            text = json.dumps(content) if isinstance(content, dict) else content
            path.write_bytes(text.encode() if isinstance(text, str) else text)

    return make


def mine(text: str | bytes) -> Callable[[Path], None]:
    return files({"mine.yaml": text})


def checkpoint(weights: bytes, config: str | dict = MINI) -> Callable[[Path], None]:
    """A directory `m`: a config.yaml (or config.json, given a table or text that begins as JSON does) and weights."""
    is_json = isinstance(config, dict) or config[0] in "{["
    return files({f"m/config.{'json' if is_json else 'yaml'}": config, "m/model.safetensors": weights})


def config(old: str, new: str, base: str = EIGHT) -> Callable[[Path], None]:
    """mine.yaml: a config with one thing in it changed."""
    assert old in base
    return mine(base.replace(old, new))


def made(*names: str) -> Callable[[Path], None]:
    """Empty folders."""
    return lambda folder: [(folder / name).mkdir() for name in names]


@dataclass(frozen=True)
class Case:
    name: str
    words: list[str]
    says: list[str]
    make: Callable[[Path], None] = lambda folder: None
    stdin: bytes = b""


CUDA = torch.cuda.is_available()
MINE = ["forward", "-c", "mine.yaml", "--ids", "1"]
ON_M = ["forward", "-m", "m", "--ids", "1"]
LONG = "Cats" * 100
CASES = [
    # Which command, which option
    Case("mistyped command", ["forwrad", "Cats"], ["forwrad", "'forward'"]),
    Case("unknown command", ["dogs"], ["dogs", "gptcli --help"]),
    Case("mistyped option", ["forward", "--ofline"], ["--ofline", "--offline"]),
    Case("unknown option", ["topk", "--banana"], ["--banana", "gptcli topk --help"]),
    Case("option before the command", ["--top-k", "3", "topk"], ["--top-k"]),
    Case("option without its value", ["forward", "-k"], ["-k", "argument"]),
    Case("flag with a value", ["forward", "--full=yes"], ["--full"]),
    Case("too many names", ["config", "cats", "gpt2-small"], ["gpt2-small", "unexpected"]),
    Case("text for list", ["list", "cats"], ["cats", "unexpected"]),
    Case("generate", ["generate"], ["does not generate", "gptcli topk"]),
    Case("generate with anything", ["generate", "Cats", "--max-tokens", "9"], ["does not generate", "gptcli topk"]),
    # Which model
    Case("folder as text", ["forward", "./folder"], ["'./folder' is a model", "-m ./folder"], made("folder")),
    Case("folder without a dot", ["topk", "folder"], ["-m folder"], made("folder")),
    Case("config's name as text", ["forward", "gpt2-small"], ["'gpt2-small' is a model", "-m gpt2-small"]),
    Case("sample's name as text", ["forward", "tiny-gpt2", "hi"], ["'tiny-gpt2' is a model", "-m tiny-gpt2"]),
    Case("config file as text", ["forward", "mine.yaml"], ["mine.yaml' is a model", "-c mine.yaml"], mine(MINI)),
    Case("config not here as text", ["forward", "gpt2-small.yaml"], ["-c gpt2-small.yaml"]),
    Case("weights as text", ["forward", "./m.gguf"], ["'./m.gguf' is a model", "-m ./m.gguf"], files({"m.gguf": b""})),
    Case("text file as text", ["forward", "./a.txt"], ["is a file", "- < ./a.txt"], files({"a.txt": "Cats"})),
    Case("no such name", ["params", "gpt2-smal"], ["gpt2-smal", 'did you mean "gpt2-small"?']),
    Case("no such path", ["forward", "-m", "./nowhere", "--ids", "1"], ["./nowhere", "no such file or directory"]),
    Case("no such config", ["forward", "-c", "gpt2-smal"], ["gpt2-smal", 'did you mean "gpt2-small"?']),
    Case("config is a directory", ["forward", "-c", "folder"], ["folder", "-m folder"], made("folder")),
    Case("empty -m", ["forward", "-m", ""], ["-m ''", "names no model"]),
    Case("empty -c", ["forward", "-c", ""], ["-c ''", "names no model"]),
    Case("empty positional", ["params", ""], ["MODEL ''", "names no model"]),
    Case("name longer than any file's", ["forward", "-m", LONG], ["CatsCats", "too long"]),
    Case("config's name too long", ["forward", "-c", LONG], ["CatsCats", "too long"]),
    Case("two models", ["params", "cats", "-m", "gpt2-small"], ["two models", "cats", "gpt2-small"]),
    Case("another kind of file", ["params", "a.txt"], ["a.txt", "not a model"], files({"a.txt": "Cats"})),
    Case("a device for a model", ["params", "/dev/null"], ["/dev/null", "not a model"]),
    Case("directory without weights", ON_M, ["m:", "no weights"], files({"m/config.yaml": MINI})),
    Case(
        "directory of pickles", ON_M, ["model.bin", "not a PyTorch file that can be read"],
        files({"m/model.bin": b"\x80\x02."}),
    ),
    Case("directory without a config", ON_M, ["no config.json", "-c"], files({"m/model.safetensors": safetensors()})),
    Case("several weight files", ON_M, ["several", "a.safetensors"],
         files({"m/a.safetensors": safetensors(), "m/b.safetensors": safetensors(), "m/config.yaml": MINI})),
    Case("weights that can't fit", ["forward", "-c", "llama3.1-405b", "--ids", "1"],
         ["random weights in float32: 1,511.9 GiB", "free"]),
    # Which text
    Case("unknown word, no model named", ["forward", "Cats", "bark"],
         ["'bark'", "Cats, sit, on, mats, chairs, volcano", "worked example cats ran", "-m MODEL"]),
    Case("a word in another case", ["topk", "cats"], ['did you mean "Cats"?']),
    Case("unknown word of a named model", ["topk", "-c", "cats", "mat"], ["'mat'", 'did you mean "mats"?']),
    Case("an id of no token to decode", ["tokens", "--ids", "12,13", "--decode"], ["id 13", "no token"]),
    Case("no text", ["forward", "-m", "tiny-gpt2"], ["no text", "--ids"]),
    Case("empty text", ["forward", ""], ["empty"]),
    Case("blank text", ["score", " \t\n "], ["empty"]),
    Case("empty standard input", ["forward", "-"], ["empty"]),
    Case("one newline on standard input", ["forward", "-"], ["empty"], stdin=b"\n"),
    Case("empty standard input, by lines", ["forward", "--batch", "-"], ["empty"]),
    Case("an empty line in a batch", ["forward", "--batch", "-"], ["text 1 is empty"], stdin=b"Cats\n\nsit\n"),
    Case("an empty text in a batch", ["forward", "--batch", "Cats", ""], ["text 1 is empty"]),
    Case("not UTF-8", ["forward", "-"], ["standard input", "UTF-8", "byte 5"], stdin=b"Cats \xff"),
    Case("UTF-16", ["tokens", "-"], ["standard input", "UTF-8"], stdin="Cats".encode("utf-16")),
    Case("text longer than any file's name", ["forward", LONG], ["unknown word", "the vocabulary has"]),
    Case("a text and ids", ["forward", "Cats", "--ids", "12"], ["a text and --ids"]),
    Case("one token to score", ["score", "Cats"], ["one token has no score"]),
    Case("several texts to trace", ["trace", "--batch", "Cats", "sit"], ["2 texts", "one"]),
    Case("unknown word asked for", ["topk", "--token", "dog"], ["'dog'", "the vocabulary has"]),
    Case("empty word asked for", ["topk", "--token", ""], ["''"]),
    Case("several tokens asked for", ["topk", "-m", "tiny-gpt2", "hi", "--token", "volcano"],
         ["'volcano' is not one token but v + o"]),
    Case("a word of no tokenizer", ["topk", "-m", "m", "--ids", "1", "--token", "a"], ["no tokenizer"],
         checkpoint(safetensors())),
    # Which ids
    Case("id beyond", ["forward", "--ids", "12,256"], ["id 256", "0 to 255"]),
    Case("id below", ["forward", "--ids", "-1"], ["id -1", "0 to 255"]),
    Case("id far beyond", ["score", "--ids", "12,9223372036854775807"], ["9223372036854775807", "0 to 255"]),
    Case("id that no integer holds", ["forward", "--ids", "9" * 40], ["--ids 999", "not"]),
    Case("id of thousands of digits", ["forward", "--ids", "9" * 5000], ["--ids 999", "…", "not ids"]),
    Case("empty ids", ["forward", "--ids", ""], ["empty"]),
    Case("no ids in a list", ["forward", "--ids", "[]"], ["empty"]),
    Case("no ids in a list of lists", ["forward", "--ids", "[[]]"], ["empty"]),
    Case("one text without ids", ["forward", "--ids", "[[12], []]"], ["empty"]),
    Case("floats", ["forward", "--ids", "1.5"], ["--ids 1.5", "12,45,78"]),
    Case("floats in a list", ["forward", "--ids", "[12.0]"], ["whole numbers"]),
    Case("truths in a list", ["forward", "--ids", "[true]"], ["whole numbers"]),
    Case("lists too deep", ["forward", "--ids", "[[[12]]]"], ["whole numbers"]),
    Case("ids beside lists", ["forward", "--ids", "[12, [45]]"], ["whole numbers"]),
    Case("lists without end", ["forward", "--ids", "[" * 100_000], ["not ids", "…"]),
    Case("a broken list", ["forward", "--ids", "[12, 45"], ["not ids"]),
    Case("a table of ids", ["forward", "--ids", '{"ids": [12]}'], ["not ids"]),
    Case("other digits", ["forward", "--ids", "٣"], ["not ids"]),
    Case("underscored digits", ["forward", "--ids", "1_2"], ["not ids"]),
    Case("words as ids", ["forward", "--ids", "Cats"], ["not ids"]),
    Case("no such file of ids", ["forward", "--ids", "@ids.txt"], ["@ids.txt", "No such file"]),
    Case("a folder of ids", ["forward", "--ids", "@folder"], ["@folder", "directory"], made("folder")),
    Case("ids that are no text", ["forward", "--ids", "@ids"], ["@ids", "UTF-8"], files({"ids": b"\xff\xfe\x00"})),
    Case("an empty file of ids", ["forward", "--ids", "@ids"], ["empty"], files({"ids": "\n"})),
    Case("beyond the context", ["forward", "--ids", ",".join(["12"] * 17)], ["17 tokens", "context of 16"]),
    Case("beyond the context, padded", ["topk", "--ids", str([[12], [12] * 17])], ["17 tokens", "context of 16"]),
    # Where to look
    Case("layer 0", ["trace", "--layer", "0"], ["--layer 0", "count from 1", "L0"]),
    Case("layer beyond", ["trace", "--layer", "3"], ["--layer 3", "2 layers"]),
    Case("layer beyond, from 0", ["trace", "--layer", "L2"], ["--layer L2", "2 layers"]),
    Case("layer before the first", ["trace", "--layer", "-3"], ["--layer -3", "2 layers"]),
    Case("layer by a word", ["trace", "--layer", "first"], ["--layer first", "1 to 2"]),
    Case("layer by a fraction", ["trace", "--layer", "1.0"], ["--layer 1.0", "not a number"]),
    Case("head beyond", ["trace", "--head", "2"], ["--head 2", "2 heads", "0 to 1"]),
    Case("head before the first", ["trace", "--head", "-3"], ["--head -3", "2 heads"]),
    Case("position beyond", ["trace", "--position", "3"], ["--position 3", "0 to 2"]),
    Case("position before the first", ["topk", "--position", "-4"], ["--position -4", "0 to 2"]),
    Case("layer by other digits", ["trace", "--layer", "١"], ["not a number"]),
    Case("position by other digits", ["topk", "--position", "٢"], ["not a number"]),
    Case("position underscored", ["topk", "--position", "0_1"], ["not a number"]),
    Case("position by a word", ["topk", "--position", "last"], ["--position last", "-1"]),
    Case("position beyond one text", ["topk", "--batch", "Cats sit", "on", "--position", "1"],
         ["--position 1", "0 to 0"]),
    Case("path mistyped", ["trace", "--at", "layers.0.attn.patern"], ['you mean "layers.0.attn.pattern"?', "--list"]),
    Case("path beyond", ["trace", "--at", "layers.2.attn.z"], ["layers.2.attn.z", "no such activation"]),
    Case("path of a weight", ["trace", "--at", "layers.0.attn.q.weight"], ['did you mean "layers.0.attn.q"?']),
    Case("pattern for a path", ["trace", "--at", "layers.*.attn.z"], ["layers.*.attn.z", "2 activations"]),
    Case("empty path", ["trace", "--at", ""], ["--at", "no such activation"]),
    Case("head beyond, by its short name", ["trace", "--at", "L0H2"], ["2 heads"]),
    Case("layer beyond, by its short name", ["trace", "--at", "L9H0"], ["2 layers"]),
    Case("a head twice", ["trace", "--at", "L0H0", "--layer", "2"], ["--at and --layer"]),
    Case("a head of a path", ["trace", "--at", "embed", "--head", "1"], ["--at and --head"]),
    Case("a position of a path", ["trace", "--at", "embed", "--position", "1"], ["--at and --position"]),
    Case("a list and a path", ["trace", "--list", "--at", "embed"], ["--list and --at"]),
    # How to run
    Case("no such device here", ["forward", "--device", "cuda:97"], ["--device cuda:97", "there is: cpu"]),
    Case("no such device", ["forward", "--device", "banana"], ["--device banana", "cpu"]),
    *([] if CUDA else [Case("no cuda", ["forward", "--device", "cuda"], ["--device cuda:", "not on this machine"])]),
    Case("a device of torch's own", ["forward", "--device", "meta"], ["--device meta", "cpu"]),
    Case("integers to run in", ["forward", "--dtype", "int8"], ["--dtype int8", "float32"]),
    Case("integers to count in", ["params", "--dtype", "int4"], ["--dtype int4", "bf16"]),
    Case("no thread", ["forward", "--threads", "0"], ["--threads", "1<=x"]),
    Case("threads without number", ["forward", "--threads", "99999999999"], ["--threads", "1<=x"]),
    Case("seed below", ["forward", "--seed", "-1"], ["--seed", "x>=0"]),
    Case("none to list", ["forward", "-k", "0"], ["-k", "x>=1"]),
    Case("a word to list", ["topk", "-k", "many"], ["-k", "'many'"]),
    Case("temperature 0", ["topk", "--temperature", "0"], ["--temperature 0", "above 0"]),
    Case("temperature below", ["topk", "--temperature", "-1"], ["--temperature -1"]),
    Case("temperature nan", ["topk", "--temperature", "nan"], ["--temperature nan"]),
    Case("temperature inf", ["topk", "--temperature", "inf"], ["--temperature inf"]),
    Case("rows of what", ["params", "--by", "head"], ["--by", "component"]),
    Case("digits beyond", ["forward", "--digits", "18"], ["--digits", "17"]),
    Case("colour of what", ["forward", "--color", "pink"], ["--color", "always"]),
    # Where to write
    Case("file there", ["forward", "-o", "x.json"], ["x.json", "--force"], files({"x.json": "{}"})),
    Case("unknown suffix", ["forward", "-o", "x.txt"], ["x.txt", ".safetensors, .npy, .json"]),
    Case("no suffix", ["forward", "-o", "x"], ["-o x", ".json"]),
    Case("suffix of another command", ["topk", "-o", "x.npy"], ["x.npy", "writes .json"]),
    Case("no such folder", ["params", "-o", "nowhere/x.json"], ["nowhere/x.json", "no such directory"]),
    Case("a file for a folder", ["params", "-o", "a/x.json"], ["a/x.json", "no such directory"], files({"a": ""})),
    Case("a folder to write over", ["params", "-o", "a.json", "--force"], ["a.json"], made("a.json")),
    Case("output's name too long", ["params", "-o", f"{LONG}.json"], ["CatsCats", "too long"]),
    # Configs
    Case("broken YAML", MINE, ["mine.yaml, line 8, column 4"], config("n_kv_heads: 2}", "n_kv_heads: 2")),
    Case("tab in YAML", MINE, ["mine.yaml, line 2, column 1"], config("context", "\tcontext")),
    Case("duplicate key", MINE, ["mine.yaml, line 2", '"vocab_size" stands twice'], mine(f"vocab_size: 9\n{EIGHT}")),
    Case("duplicate key inside", MINE, ["line 7", '"n_heads" stands twice'], config("n_kv_heads", "n_heads")),
    Case("not a mapping", MINE, ["mine.yaml", "no mapping"], mine("- 1\n")),
    Case("empty config", MINE, ["mine.yaml", "no mapping"], mine("")),
    Case("binary config", MINE, ["mine.yaml", "UTF-8"], mine(b"\xff\xfe\x00\x01")),
    Case("two documents", MINE, ["mine.yaml", "line"], config("mlp", "---\nmlp")),
    Case("a tag that runs code", MINE, ["mine.yaml"], config("vocab_size: 9", "vocab_size: !!python/name:os.system")),
    Case("unknown field", MINE, ["attention.n_kv_head: unknown", "n_kv_heads"], config("n_kv_heads", "n_kv_head")),
    Case("unknown field on top", MINE, ["n_layer: unknown field", '"n_layers"'], config("n_layers", "n_layer")),
    Case("missing field", MINE, ["hidden_size: missing"], config("hidden_size: 16\n", "")),
    Case("wrong type", MINE, ["vocab_size: 'nine' is not a whole number"], config("size: 9", "size: nine")),
    Case("a float for a size", MINE, ["n_layers: 1.0 is not a whole number"], config("n_layers: 1", "n_layers: 1.0")),
    Case("a word for a truth", MINE, ["lm_head.tied: 'yes' is not true or false"], config("tied: true", "tied: yes")),
    Case("heads that don't divide", MINE, ["attention.n_kv_heads: 3 does not divide n_heads: 8"],
         config("n_kv_heads: 2", "n_kv_heads: 3")),
    Case("more key heads than heads", MINE, ["attention.n_kv_heads: 16 does not divide n_heads: 8"],
         config("n_kv_heads: 2", "n_kv_heads: 16")),
    Case("size that heads don't divide", MINE, ["attention.n_heads: 8 does not divide hidden_size: 15"],
         config("hidden_size: 16", "hidden_size: 15")),
    Case("size 0", MINE, ["n_layers: 0 is below 1"], config("n_layers: 1", "n_layers: 0")),
    Case("no heads", MINE, ["attention.n_heads: 0 is below 1"], config("n_heads: 8", "n_heads: 0")),
    Case("negative size", MINE, ["mlp.size: -8 is below 1"], config("size: 8,", "size: -8,")),
    Case("huge size", MINE, ["GiB are needed"], config("vocab_size: 9", "vocab_size: 99999999999999")),
    Case("eps NaN", MINE, ["norm.eps: nan is not a finite number"], config("1e-5", ".nan")),
    Case("eps infinite", MINE, ["norm.eps: inf is not a finite number"], config("1e-5", ".inf")),
    Case("unknown kind", MINE, ["position.kind: 'rotary' is not one of"], config("learned", "rotary")),
    Case("no kind", MINE, ["norm.kind: missing"], config("kind: layernorm, ", "")),
    Case("unknown activation", MINE, ["mlp.activation: 'gelu_fast' is not one of"], config("relu", "gelu_fast")),
    Case("odd heads that turn", MINE, ["attention.head_dim: 3 is odd"],
         config("position: {kind: learned}", "position: {kind: rope}", EIGHT.replace("n_kv_heads: 2", "head_dim: 3"))),
    Case("two words under one name", MINE, ["vocabulary", "two ids"], config("mlp", "vocabulary: {1: a, 2: a}\nmlp")),
    Case("a word beyond the ids", MINE, ["vocabulary.9", "vocab_size: 9"], config("mlp", "vocabulary: {9: a}\nmlp")),
    Case("a word with a blank", MINE, ["vocabulary.1"], config("mlp", "vocabulary: {1: a b}\nmlp")),
    Case("a config and a config", ["forward", "-m", "mine.yaml", "-c", "cats"], ["two configs"], mine(EIGHT)),
    # Weights written by hand
    Case("ragged rows", MINE, ["mine.yaml: weights.embed.weight", "[4, 2] numbers"],
         mine(f"{MINI}weights: {{embed.weight: [[1, 2], [3], [5, 6], [7, 8]]}}\n")),
    Case("wrong shape", MINE, ["weights.embed.weight", "[4, 2] numbers"],
         mine(f"{MINI}weights: {{embed.weight: [[1, 2], [3, 4]]}}\n")),
    Case("text among numbers", MINE, ["weights.embed.weight"],
         mine(f"{MINI}weights: {{embed.weight: [[1, 2], [3, 4], [5, x], [7, 8]]}}\n")),
    Case("unknown word for weights", MINE, ["'random' is not one of identity, zeros, ones"],
         mine(f"{MINI}weights: {{'*': random}}\n")),
    Case("identity that is not square", MINE, ["identity", "embed.weight is [4, 2]"],
         mine(f"{MINI}weights: {{embed.weight: identity}}\n")),
    Case("parameter left out", MINE, ["weights.layers.0.attn.q.weight: missing"],
         mine(f"{MINI}weights: {{embed.weight: zeros}}\n")),
    Case("pattern that names nothing", MINE, ["weights.layers.1.*", "names no parameter"],
         mine(f"{MINI}weights: {{'*': zeros, layers.1.*: ones}}\n")),
    Case("parameter given twice", MINE, ["names embed.weight", "another pattern"],
         mine(f"{MINI}weights: {{'*': zeros, embed.weight: ones}}\n")),
    Case("row beyond the table", MINE, ["row 4", "0 to 3"],
         mine(f"{MINI}weights: {{embed.weight: {{rows: {{4: [1, 2]}}}}}}\n")),
    Case("row of another length", MINE, ["embed.weight.rows.1", "[2] numbers"],
         mine(f"{MINI}weights: {{embed.weight: {{rows: {{1: [1, 2, 3]}}}}}}\n")),
    # Checkpoints
    Case("tensor missing", ON_M, ["'layers.0.attn.q.weight' is missing"],
         checkpoint(safetensors({"layers.0.attn.q.weight": None}))),
    Case("tensor left over", ON_M, ["'more.weight' is left over"],
         checkpoint(safetensors({"more.weight": ("F32", [1])}))),
    Case("layer left over", ON_M, ["'layers.1.attn.q.weight' is left over"],
         checkpoint(safetensors({"layers.1.attn.q.weight": ("F32", [2, 2])}))),
    Case("tensor of the wrong shape", ON_M, ["'lm_head.weight' is [2, 4]", "needs [4, 2]"],
         checkpoint(safetensors({"lm_head.weight": ("F32", [2, 4])}))),
    Case("tensor of an integer type", ON_M, ["'lm_head.weight' is I64", "no weights"],
         checkpoint(safetensors({"lm_head.weight": ("I64", [4, 2])}))),
    Case("weights of another model", ["params", "-m", "m/model.safetensors", "-c", "cats"],
         ["embed.weight", "needs [256, 4]", "faults more"], checkpoint(safetensors())),
    Case("truth for a size", ON_M, ["config.json", "True is not a whole number"],
         checkpoint(safetensors(), GPT2 | {"n_head": True})),
    Case("truncated data", ON_M, ["model.safetensors", "bytes"], checkpoint(safetensors(cut=5))),
    Case("truncated header", ON_M, ["model.safetensors", "header"], checkpoint(safetensors()[:100])),
    Case("bytes left over", ON_M, ["model.safetensors", "bytes"], checkpoint(safetensors() + b"1234")),
    Case("LFS pointer", ON_M, ["Git LFS pointer"],
         checkpoint(b"version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 548105171\n")),
    Case("HTML page", ON_M, ["HTML page"], checkpoint(b"<!DOCTYPE html>\n<html><body>not found</body></html>")),
    Case("empty file", ON_M, ["empty"], checkpoint(b"")),
    Case("four bytes", ON_M, ["4 bytes"], checkpoint(b"1234")),
    Case("huge header", ON_M, ["header of 1,099,511,627,776 bytes"], checkpoint(struct.pack("<Q", 2**40) + b"{}" * 9)),
    Case("header that is no JSON", ON_M, ["header"], checkpoint(struct.pack("<Q", 9) + b"not json!")),
    Case("header that is no table", ON_M, ["header"], checkpoint(struct.pack("<Q", 2) + b"[]")),
    Case("pickle under another name", ON_M, ["PyTorch"], checkpoint(b"PK\x03\x04" + bytes(99))),
    Case("GGUF under another name", ON_M, ["GGUF"], checkpoint(b"GGUF" + b"\xff" * 99)),
    Case("no tensor", ON_M, ["missing"], checkpoint(struct.pack("<Q", 2) + b"{}")),
    Case("broken config.json", ON_M, ["config.json, line 2, column 1"], checkpoint(safetensors(), '{"n_embd": 2\n')),
    Case("eps NaN in config.json", ON_M, ["norm.eps: nan is not a finite number"],
         checkpoint(safetensors(), GPT2 | {"layer_norm_epsilon": float("nan")})),
    Case("key twice in config.json", ON_M, ["config.json", "the key 'n_embd' stands twice"],
         checkpoint(safetensors(), '{"model_type": "gpt2", "n_embd": 2, "n_embd": 4}')),
    Case("a table for a size", ON_M, ["config.json", "{} is not a whole number"],
         checkpoint(safetensors(), GPT2 | {"n_embd": {}})),
    Case("config.json of a list", ON_M, ["config.json"], checkpoint(safetensors(), "[]")),
    Case("unknown model_type", ON_M, ["model_type 'gtp2' is not implemented", '"gpt2"'],
         checkpoint(safetensors(), GPT2 | {"model_type": "gtp2"})),
    Case("no model_type", ON_M, ["no model_type"], checkpoint(safetensors(), {"n_embd": 2})),
    Case("a switch that is not implemented", ON_M, ["add_cross_attention: True", "not implemented"],
         checkpoint(safetensors(), GPT2 | {"add_cross_attention": True})),
    Case("bad activation_function", ON_M, ["activation_function: 'gelu_next' is not implemented"],
         checkpoint(safetensors(), GPT2 | {"activation_function": "gelu_next"})),
    Case("a size by a word", ON_M, ["config.json", "'two'"], checkpoint(safetensors(), GPT2 | {"n_embd": "two"})),
    Case("a size of nothing", ON_M, ["config.json", "below 1"], checkpoint(safetensors(), GPT2 | {"n_layer": 0})),
    Case("no tokenizer", ["forward", "-m", "m", "Cats"], ["m (m) has no tokenizer"], checkpoint(safetensors())),
    # Names that a terminal would obey
    Case("escapes in a config's name", ["forward", "-c", f"{ESCAPES}.yaml"], [r"\x1b[31m\x07\x9b2J\u202e.yaml"],
         lambda folder: (folder / f"{ESCAPES}.yaml").write_text("a: [")),
    Case("escapes in a file taken for a text", ["forward", f"{ESCAPES}.yaml"], [r"\x1b[31m"],
         lambda folder: (folder / f"{ESCAPES}.yaml").write_text(MINI)),
    Case("escapes in a word", ["forward", ESCAPES], [r"unknown word '\x1b[31m"]),
    Case("escapes in an option", ["forward", f"--{ESCAPES}"], [r"\x1b[31m"]),
    Case("escapes in a command", [ESCAPES], [r"\x1b[31m"]),
    Case("escapes in a tensor's name", ON_M, [r"\x1b[31m"], checkpoint(safetensors({ESCAPES: ("F32", [1])}))),
    Case("escapes in a model_type", ON_M, [r"\x1b[31m"], checkpoint(safetensors(), GPT2 | {"model_type": ESCAPES})),
    Case("escapes in the vocabulary", [*MINE[:3], "nothing"], [r"\x1b[31m"],
         mine(f'{MINI}vocabulary: {{1: "\\e[31m\\a"}}\n')),
    Case("a newline in a name", ["forward", "-m", "two\nlines.txt"], [r"two\nlines.txt"]),
    Case("bytes that are no text", ["forward", "-m", os.fsdecode(b"\xff\xfe")], [r"\udcff"]),
]  # fmt: skip


def is_one_line(ran: Ran, says: list[str]) -> None:
    assert ran.status == 2, ran
    assert ran.err.count("\n") == 1 and ran.err.endswith("\n") and ran.err.startswith("gptcli: "), ran.err
    assert ran.err[:-1].isprintable() and "Traceback" not in ran.err
    assert len(ran.err) < 700, len(ran.err)
    for words in says:
        assert words in ran.err, (words, ran.err)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_one_line(case, folder):
    case.make(folder)
    there = sorted(folder.rglob("*"))
    ran = gptcli(*case.words, stdin=case.stdin)
    is_one_line(ran, case.says)
    assert ran.out == ""
    command, *rest = case.words
    as_json = gptcli(command, "--json", *rest, stdin=case.stdin)
    assert as_json.status == 2 and as_json.out[:-1].isprintable()
    assert list(as_json.json) == ["schema", "status", "error"] and as_json.json["status"] == "error"
    said = as_json.json["error"]
    assert said["code"] and harmless("; ".join(filter(None, (said["message"], said["hint"])))) in ran.err
    assert sorted(folder.rglob("*")) == there


@pytest.mark.parametrize("kind", ["pipe", "file"])
def test_a_text_that_nothing_said_to_read(kind, folder):
    """Ignoring what a person pipes in, and running the example instead, would be a wrong answer."""
    (folder / "text").write_bytes(b"Cats sit\n")
    if kind == "pipe":
        end, begin = os.pipe()
        os.write(begin, b"Cats sit\n")
        os.close(begin)
    else:
        end = os.open("text", os.O_RDONLY)
    with open(end) as stdin:  # noqa: PTH123 - a descriptor
        is_one_line(gptcli("forward", stdin=stdin), ["standard input holds a text", "write - in the text's place"])


@pytest.mark.parametrize("name", ["nowhere", "gpt2-smal"])
def test_the_environment_is_named_where_it_is_to_blame(name):
    is_one_line(gptcli("forward", "--ids", "1", GPTCLI_MODEL=name), [name, "GPTCLI_MODEL"])


def test_a_command_refused_before_it_runs_touches_no_file(folder):
    (folder / "kept.json").write_text("kept")
    is_one_line(gptcli("forward", "-o", "new.npy", "-o", "kept.json"), ["kept.json", "--force"])
    assert [path.name for path in folder.iterdir()] == ["kept.json"] and Path("kept.json").read_text() == "kept"


SAMPLE = ["mistyped command", "folder as text", "not UTF-8", "layer 0", "LFS pointer", "escapes in a config's name"]


@pytest.mark.parametrize("case", [case for case in CASES if case.name in SAMPLE], ids=lambda case: case.name)
def test_one_line_of_a_real_process(case, folder):
    case.make(folder)
    ran = process(*case.words, stdin=case.stdin)
    is_one_line(ran, case.says)
    assert ran.out == ""
