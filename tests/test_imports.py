"""The shape of the house, read off its source: what is loaded when, what each Spec field is read by, who is named.

Nothing here runs a model. See the rules of the design: torch lives in gptcli/model/, rich in gptcli/render/, and no
choice is made by a model's name.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest

import gptcli
from gptcli import spec

PACKAGE = Path(gptcli.__file__).parent
SOURCES = {
    str(path.relative_to(PACKAGE)): ast.parse(path.read_text(encoding="utf-8")) for path in PACKAGE.rglob("*.py")
}
HEAVY = set("torch numpy transformers matplotlib safetensors tiktoken tokenizers huggingface_hub gguf".split())


@pytest.mark.parametrize(
    "words",
    [
        *(["--help"], ["params", "--config", "llama3.1-405b"], ["inspect", "tiny-gpt2"], ["list"], ["config", "cats"]),
        *(["-V"], ["draw", "llama3.1-405b"], ["draw", "gpt2-small", "llama3-8b"]),
    ],
    ids=" ".join,
)
def test_what_needs_no_tensor_loads_no_torch(words):
    code = (
        "import sys\n"
        "from gptcli.cli.main import main\n"
        f"sys.argv = ['gptcli', *{words!r}]\n"
        "status = main()\n"
        f"print(sorted({HEAVY!r} & set(sys.modules)), status, file=sys.stderr)\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    cache = ["huggingface_hub"] if words == ["list"] else []  # whose constants say where its cache lies
    assert ran.stdout and ran.stderr == f"{cache} 0\n"


@pytest.mark.parametrize(
    "words", [["tokens", "--json"], ["topk", "dog"], ["inspect", "tiny-gpt2", "--json"]], ids=" ".join
)
def test_what_draws_no_table_loads_no_rich(words):
    code = (
        "import sys\n"
        "from gptcli.cli.main import main\n"
        f"sys.argv = ['gptcli', *{words!r}]\n"
        "main()\n"
        "print('rich' in sys.modules)\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ran.stdout.endswith("False\n")


def imported(body: list[ast.stmt]) -> Iterator[str]:
    """The packages that importing a module loads: statements in functions and under TYPE_CHECKING don't run then."""
    for node in body:
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").partition(".")[0]
        elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            yield from imported(node.orelse)
        elif isinstance(node, ast.ClassDef | ast.If | ast.For | ast.While | ast.With | ast.Try | ast.ExceptHandler):
            for part in ("body", "orelse", "handlers", "finalbody"):
                yield from imported(getattr(node, part, []))


@pytest.mark.parametrize(
    "words",
    [["topk", "Cats"], ["trace", "-o", "x.safetensors"], ["trace", "Cats", "--map"], ["diff", "cats", "cats-port"]],
    ids=" ".join,
)
def test_what_runs_a_model_loads_none_of_torch_s_own_compilers(words, tmp_path):
    """sympy comes with them: 0.3 s and 32 MiB."""
    code = (
        "import sys\n"
        "from gptcli.cli.main import main\n"
        f"sys.argv = ['gptcli', *{words!r}]\n"
        "status = main()\n"
        "print(sorted({'torch', 'sympy', 'torch._dynamo'} & set(sys.modules)), status, file=sys.stderr)\n"
    )
    ran = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert ran.stderr.splitlines()[-1] == f"['torch'] {int(words[0] == 'diff')}"


def test_packages_are_imported_where_they_belong():
    loads = {name: set(imported(tree.body)) for name, tree in SOURCES.items()}
    for name, packages in loads.items():
        assert name.startswith("model/") or not packages & HEAVY, name
        assert name.startswith("render/") or "rich" not in packages, name
        assert name.startswith("cli/") or "typer" not in packages, name
    assert "torch" in loads["model/ops.py"] and "rich" in loads["render/screen.py"]  # the walk sees what is there

    def mentions(tree: ast.AST, package: str) -> bool:
        nodes = (node for node in ast.walk(tree) if isinstance(node, ast.Import | ast.ImportFrom))
        return any(package in imported([node]) for node in nodes)

    assert all(name.startswith("render/") for name, tree in SOURCES.items() if mentions(tree, "rich"))
    # What runs beside us where it is installed, if a person asks for it.
    assert [name for name, tree in SOURCES.items() if mentions(tree, "transformers")] == ["diff/reference.py"]


def functions(tree: ast.AST, inside: str = "") -> Iterator[tuple[str, ast.AST]]:
    """(qualified name, function) of every function and method; a function within a function is part of it."""
    for node in ast.iter_child_nodes(tree):
        name = f"{inside}.{node.name}".lstrip(".") if hasattr(node, "name") else inside
        if isinstance(node, ast.FunctionDef):
            yield name, node
        else:
            yield from functions(node, name)


def read(tree: ast.AST) -> set[str]:
    """The attributes that are read of anything but `self`."""
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.ctx, ast.Load)
        and not (isinstance(node.value, ast.Name) and node.value.id == "self")
    }


PARTS = [kind for kind in vars(spec).values() if isinstance(kind, type) and is_dataclass(kind)]
HOLDS_A_PART = {
    *("position", "norm", "attention", "mlp", "lm_head", "variants", "layers", "encoder", "cross", "transform"),
}
FIELDS = sorted({f"{part.__name__}.{field.name}" for part in PARTS for field in fields(part)})
LEAVES = [name for name in FIELDS if name.partition(".")[2] not in {"name", "tokenizer"} | HOLDS_A_PART]


@pytest.mark.parametrize("field", LEAVES)
def test_every_field_of_the_spec_is_read_by_layout_or_by_one_function_of_the_model(field):
    """A field that nothing reads is a lie; one that two functions read makes two places to keep in step.

    A read is `x.field` in the source, whatever x is but `self` (Sight keeps what it was given): the name alone counts,
    so parts that use one name (`bias`) answer for each other, with a reader each. A field that only holds a part is
    structure, and so are the layers that a variant names. Left out: init.py, which fills what layout declares, load.py,
    which cuts what bind found, device.py, which knows no Spec, and what refuses inputs (`_check_…`).
    """
    name = field.partition(".")[2]
    readers = [
        f"{path}:{function}"
        for path, tree in SOURCES.items()
        if path.startswith("model/") and path not in ("model/init.py", "model/load.py", "model/device.py")
        for function, body in functions(tree)
        if name in read(body) and not function.startswith("_check_")
    ]
    namesakes = sum(one.endswith(f".{name}") for one in FIELDS)
    assert len(readers) <= namesakes, readers
    assert readers or name in read(SOURCES["layout.py"])


# What a family of models is called, and the names that stand for a published formula: a rotary scaling (the word that
# checkpoints know it by) and a split of a text before its merges.
FAMILY = re.compile(r"gpt[-_]?2|neox?\b|llama|mi[sx]tral|gemma|qwen|phi-?[1-9]|bloom|falcon|deepseek|olmo", re.I)
FORMULAS = {
    "spec.py": {"Llama3Scaling", "llama3"},
    "model/ops.py": {"Llama3Scaling"},
    "tokens/files.py": {"GPT2_SPLIT", "is_gpt2_like"},
}


def words(tree: ast.AST) -> Iterator[str]:
    """Every name and every word that code could compare with: prose (docstrings, messages) has blanks in it."""
    for node in ast.walk(tree):
        said = [getattr(node, attribute, None) for attribute in ("value", "id", "attr", "arg", "name", "asname")]
        yield from (word for word in said if isinstance(word, str) and not re.search(r"\s", word))


def test_no_choice_is_made_by_a_model_s_name():
    found = {path: {word for word in words(tree) if FAMILY.search(word)} for path, tree in SOURCES.items()}
    assert found["families/gpt.py"] >= {"gpt2"}
    found = {path: said for path, said in found.items() if not path.startswith("families/")}
    assert {path: said - FORMULAS.get(path, set()) for path, said in found.items()} == {path: set() for path in found}
