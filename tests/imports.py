"""Who imports whom in the package."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import vua

SOURCE = Path(vua.__file__).parent
FLOORS = (
    ("errors",),
    ("serdes",),
    ("io",),
    ("native",),
    ("format",),
    ("security", "weights"),
    ("storage",),
    ("capacity", "device"),
    ("store",),
    ("connector",),
    ("core",),
    ("catalog",),
    ("llama_cpp", "lmcache", "sglang", "transformers", "vllm"),
    ("cli",),
    ("testing",),
    ("__main__",),
)
"""From the bottom up: a room, which is a package or one of the public modules, may import those of
lines before its own."""


def sources() -> dict[str, str]:
    """The source of every module of VUA, by the module's name."""
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(SOURCE.parent).with_suffix("").parts
        name = ".".join(parts).removesuffix(".__init__")
        found[name] = path.read_text(encoding="utf-8")
    return found


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """All statements of a module, and what holds some: a tenth of what `ast.walk` visits."""
    blocks = ("body", "orelse", "finalbody", "handlers", "cases")
    for node in (one for block in blocks for one in getattr(tree, block, ())):
        yield node
        if not isinstance(node, ast.expr):
            yield from statements(node)


def imported_names(tree: ast.AST) -> list[str]:
    """Every module that is named in an import, with `from a import b` counted as `a.b` too."""
    names = []
    for node in statements(tree):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            package = "." * node.level + (node.module or "")
            names += [f"{package}.{alias.name}" for alias in node.names]
    return names


def existing(name: str, modules: set[str]) -> str:
    """`from vua.errors import X` names no module vua.errors.X: the part that is one."""
    while name not in modules:
        name = name.rpartition(".")[0]
    return name


def circle(imports: dict[str, set[str]]) -> list[str]:
    """Modules that import each other in a circle, the first one also at the end; empty: none."""
    done: set[str] = set()
    path: list[str] = []

    def walk(module: str) -> list[str]:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in done:
            return []
        path.append(module)
        for imported in sorted(imports.get(module, ())):
            found = walk(imported)
            if found:
                return found
        done.add(path.pop())
        return []

    return next(filter(None, map(walk, sorted(imports))), [])
