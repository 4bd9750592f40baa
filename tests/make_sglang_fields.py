"""Lists the arguments of an SGLang's server and the environment variables that its source reads."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

FIELDS = "sglang/srt/arg_groups/fields/"
ROOTS = ("sglang/srt/", "sglang/kernels/")
"""Where what a server runs is; the rest are clients, benchmarks, tests and other servers."""
READERS = frozenset(
    "get getenv setdefault pop get_bool_env_var get_int_env_var get_float_env_var "  # noqa: SIM905
    "get_str_env_var env_flag is_env_set _env_bool _env_int _env_float _env_flag".split()
)
SIGNS = ("environ", "getenv", "env_var", "env_flag", "env_set", "_env_", "EnvField")
NAME = re.compile(r"[A-Z][A-Z0-9_]{2,}")


def sources(place: Path) -> Iterator[tuple[str, str]]:
    """Path and text of each Python file below `ROOTS`."""
    for root in ROOTS:
        for path in sorted((place / root).rglob("*.py")):
            yield path.relative_to(place).as_posix(), path.read_text(errors="replace")


def arguments(tree: ast.Module) -> Iterator[str]:
    """The fields of the classes of arguments in a module."""
    for node in tree.body:
        for line in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
                yield line.target.id


def declared(tree: ast.Module) -> Iterator[str]:
    """The variables that SGLang declares in a class of its own (`environ.Envs`), and old ones."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for line in node.body:
                value = line.value if isinstance(line, ast.Assign) else None
                called = value.func if isinstance(value, ast.Call) else None
                if isinstance(called, ast.Name) and called.id.lstrip("_").startswith("Env"):
                    yield from (each.id for each in line.targets if isinstance(each, ast.Name))
                    texts = [
                        each.value for each in ast.walk(value) if isinstance(each, ast.Constant)
                    ]
                    yield from (
                        each for each in map(str, texts) if each.startswith(("SGL", "USE_"))
                    )
        if isinstance(node, ast.Dict):
            yield from (
                str(key.value)
                for key, value in zip(node.keys, node.values, strict=True)
                if isinstance(key, ast.Constant)
                and isinstance(value, ast.Call)
                and getattr(value.func, "id", "") == "_DeprecatedEnv"
            )


def read(tree: ast.Module) -> Iterator[str]:
    """The variables that a module reads by name, or by a name that it gives a constant."""
    constants = {
        target.id: node.value.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        given: ast.expr | None = None
        if isinstance(node, ast.Subscript) and is_environment(node.value):
            given = node.slice
        elif isinstance(node, ast.Compare) and any(map(is_environment, node.comparators)):
            given = node.left
        elif isinstance(node, ast.Call) and node.args:
            called = node.func
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            owned = not isinstance(called, ast.Attribute) or name not in (
                "get",
                "setdefault",
                "pop",
            )
            if name in READERS and (owned or is_environment(called.value)):  # type: ignore[union-attr]
                given = node.args[0]
        if isinstance(given, ast.Name):
            yield str(constants.get(given.id, ""))
        elif isinstance(given, ast.Constant):
            yield str(given.value)


def is_environment(node: ast.expr) -> bool:
    """Whether an expression is `os.environ`."""
    return getattr(node, "attr", getattr(node, "id", "")) in ("environ", "_environ")


def listed(place: Path) -> tuple[list[str], set[str]]:
    """All arguments, and the variables, of an SGLang in a folder; runs nothing of it."""
    fields, names = list[str](), set[str]()
    for path, text in sources(place):
        if not path.startswith(FIELDS) and not any(word in text for word in SIGNS):
            continue  # most files: to parse all takes a minute
        tree = ast.parse(text)
        if path.startswith(FIELDS):
            fields += arguments(tree)
        if path.endswith("srt/environ.py"):
            names |= set(declared(tree))
        names |= set(read(tree))
    return fields, {name for name in names if NAME.fullmatch(name)}
