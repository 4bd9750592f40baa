"""Lists the arguments of an SGLang's server and the environment variables that its source reads.

    python tests/make_sglang_fields.py sglang-0.5.23.whl ... > tests/sglang_fields.json

Takes wheels, or folders that hold `sglang`; runs nothing of them. The output has for each release
``{"arguments": {class: "field field"}, "environment": "NAME NAME"}``.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import zipfile
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
    if place.is_dir():
        for root in ROOTS:
            for path in sorted((place / root).rglob("*.py")):
                yield path.relative_to(place).as_posix(), path.read_text(errors="replace")
        return
    with zipfile.ZipFile(place) as packed:
        for name in sorted(packed.namelist()):
            if name.startswith(ROOTS) and name.endswith(".py"):
                yield name, packed.read(name).decode(errors="replace")


def arguments(tree: ast.Module) -> Iterator[tuple[str, list[str]]]:
    """The fields of each class of arguments in a module."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            yield (
                node.name,
                [
                    line.target.id
                    for line in node.body
                    if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name)
                ],
            )


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


def listed(place: Path) -> dict[str, object]:
    """What one release has."""
    classes: dict[str, str] = {}
    names: set[str] = set()
    for path, text in sources(place):
        if not path.startswith(FIELDS) and not any(word in text for word in SIGNS):
            continue  # most files: to parse all takes a minute
        tree = ast.parse(text)
        if path.startswith(FIELDS):
            classes |= {
                name: " ".join(sorted(fields)) for name, fields in arguments(tree) if fields
            }
        if path.endswith("srt/environ.py"):
            names |= set(declared(tree))
        names |= set(read(tree))
    read_by_name = " ".join(sorted(name for name in names if NAME.fullmatch(name)))
    return {"arguments": dict(sorted(classes.items())), "environment": read_by_name}


def release(place: Path) -> str:
    """The version, out of the file's name or of the record beside the package."""
    records = [each.name for each in place.glob("sglang-*.dist-info")] if place.is_dir() else []
    found = re.search(r"(\d+\.\d+\.\d+)", [*records, place.name][0])
    if found is None:
        sys.exit(f"{place}: no version in the name; call it like sglang-0.5.23.whl")
    return found[1]


def main() -> None:
    """Print the lists of all releases that are named."""
    print(
        json.dumps({release(place): listed(place) for place in map(Path, sys.argv[1:])}, indent=1)
    )


if __name__ == "__main__":
    main()
