"""Whether the Python code that a model runs is that of the installed packages.

Promises to name a class, method or function that stands where the source file of transformers, of
torch or of the checkpoint has another one. A function that changes its own globals is not seen.
"""

from __future__ import annotations

import ast
import functools
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from transformers.cache_utils import Cache, CacheLayerMixin

__all__ = ["code_mark", "foreign_class", "foreign_code", "foreign_function"]

_PACKAGES: Final = ("transformers", "torch", "transformers_modules")
_SHARED: Final = (
    "transformers.activations",
    "transformers.cache_utils",
    "transformers.integrations.sdpa_attention",
    "transformers.masking_utils",
    "transformers.modeling_rope_utils",
    "transformers.pytorch_utils",
)
"""Modules whose functions every model runs, beside those of its own classes."""

_FOLDERS: Final = tuple(
    f"{Path(str(package.__file__)).parent}/" for package in (transformers, torch)
)
_WRAPPERS: Final = frozenset(
    str(sys.modules[name].__file__) for name in ("contextlib", "functools", "typing")
)
_approved: dict[str, tuple[object, ...]] = {}
"""Of each module that was compared with its file: its mark then."""


def foreign_class(kind: type) -> str:
    """Return what a class is where it is none of transformers, torch or the checkpoint; else ""."""
    module = sys.modules.get(kind.__module__)
    if kind.__module__.partition(".")[0] not in _PACKAGES or module is None:
        return f"the class {kind.__module__}.{kind.__qualname__}, expected one of transformers"
    found: Any = module
    for part in kind.__qualname__.split("."):
        found = getattr(found, part, None)
    if found is not kind and "<locals>" not in kind.__qualname__:
        return f"a replaced class {kind.__module__}.{kind.__qualname__}"
    return ""


def foreign_function(function: object) -> str:
    """Return where a function was written, if that is outside of transformers and torch."""
    for code in _codes(function):
        if not _is_of_packages(code.co_filename):
            name = getattr(function, "__qualname__", type(function).__name__)
            return f"{name} of {code.co_filename}:{code.co_firstlineno}"
    return ""


def foreign_code(kinds: Iterable[type]) -> str:  # noqa: C901 - one look at each kind of place
    """Return the first piece of code that is not what the packages' files say; "" if all is.

    Args:
        kinds: the classes of a model's modules.
    """
    classes = set(_lineage(kinds))
    for kind in classes:
        if problem := foreign_class(kind):
            return problem
    for name in _modules_of(kinds):
        module = sys.modules[name]
        mark = _mark_of(vars(module))
        mark = (*mark, *(_mark_of(vars(kind)) for kind in _classes_of(module)))
        if _approved.get(name) == mark:
            continue
        if problem := _differs_from_file(module):
            return problem
        _approved[name] = mark
    for kind in classes:
        for name, member in vars(kind).items():
            if problem := foreign_function(member):
                return f"{kind.__qualname__}.{name}: {problem}"
        forward = vars(kind).get("forward")
        if (
            forward is not None
            and kind is not torch.nn.Module
            and _named(forward) != f"{kind.__module__}.{kind.__qualname__}.forward"
        ):
            return f"{kind.__qualname__}.forward is {_named(forward)}"
    for name, value in vars(torch.nn.functional).items():
        if problem := foreign_function(value):
            return f"torch.nn.functional.{name}: {problem}"
    return ""


def code_mark(kinds: Iterable[type]) -> tuple[object, ...]:
    """Return what changes when a method or a module's function is replaced in this process."""
    kinds = set(kinds)
    spaces: list[Mapping[str, Any]] = [vars(kind) for kind in sorted(_lineage(kinds), key=id)]
    spaces += [vars(sys.modules[name]) for name in _modules_of(kinds)]
    spaces.append(vars(torch.nn.functional))
    return tuple(_mark_of(space) for space in spaces)


def _modules_of(kinds: Iterable[type]) -> list[str]:
    """Return the modules whose functions are compared with their files: none of torch's."""
    names = {*(kind.__module__ for kind in kinds), *_SHARED}
    return sorted(name for name in names if name in sys.modules and not name.startswith("torch."))


def _named(function: object) -> str:
    return f"{getattr(function, '__module__', '')}.{getattr(function, '__qualname__', '')}"


def _mark_of(space: Mapping[str, Any]) -> tuple[object, ...]:
    values = list(space.values())
    codes = [id(value.__code__) for value in values if type(value) is types.FunctionType]
    return (*map(id, values), *codes)


def _lineage(kinds: Iterable[type]) -> Iterator[type]:
    for kind in set(kinds):
        yield from (each for each in kind.__mro__ if each.__module__ not in {"builtins", "abc"})


def _classes_of(module: types.ModuleType) -> list[type]:
    found = [value for value in vars(module).values() if isinstance(value, type)]
    own = [kind for kind in found if kind.__module__ == module.__name__]
    return [kind for kind in own if issubclass(kind, torch.nn.Module | Cache | CacheLayerMixin)]


def _is_of_packages(file: str) -> bool:
    if file.startswith(_FOLDERS) or file in _WRAPPERS:
        return True
    return "/transformers_modules/" in file


def _codes(value: object, depth: int = 0) -> Iterator[types.CodeType]:
    """Yield the code of a function or method, and of the functions that it wraps."""
    if depth > 8:
        return
    if isinstance(value, property):
        for part in (value.fget, value.fset):
            yield from _codes(part, depth + 1)
    elif isinstance(value, staticmethod | classmethod | types.MethodType):
        yield from _codes(value.__func__, depth + 1)
    elif isinstance(value, functools.partial):
        yield from _codes(value.func, depth + 1)
    elif isinstance(value, types.FunctionType):
        yield value.__code__
        cells = [] if value.__closure__ is None else value.__closure__
        for inner in (getattr(value, "__wrapped__", None), *(_content(cell) for cell in cells)):
            yield from _codes(inner, depth + 1)


def _content(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return None


def _differs_from_file(module: types.ModuleType) -> str:  # noqa: C901 - likewise
    """Return the first function of a module, or method of its classes, that its file lacks."""
    file = getattr(module, "__file__", None) or ""
    try:
        source = Path(file).read_bytes()
        tree = ast.parse(source)
        whole = compile(source, file, "exec", dont_inherit=True)
    except (OSError, SyntaxError, ValueError) as error:
        return f"{module.__name__}, whose source cannot be read ({error})"
    written = set(_inside(whole))
    imported = _imported(tree, module.__package__ or "")
    defined = {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    for name, value in vars(module).items():
        if not isinstance(value, types.FunctionType):
            continue
        said, (source_module, original) = f"{module.__name__}.{name}", imported.get(name, ("", ""))
        if original:
            expected = getattr(sys.modules.get(source_module), original, value)
            if value is not expected:
                return f"{said} is {_named(value)}, expected {source_module}.{original}"
            if source_module.partition(".")[0] not in _PACKAGES:
                continue
        if problem := foreign_function(value):
            return f"{said}: {problem}"
        if name in defined and not written.intersection(_codes(value)):
            return f"{said} is not the function of {file}"
    bodies = {node.name: node.body for node in tree.body if isinstance(node, ast.ClassDef)}
    for kind in _classes_of(module):
        body = bodies.get(kind.__qualname__, [])
        for name in (node.name for node in body if isinstance(node, ast.FunctionDef)):
            if not written.intersection(_codes(vars(kind).get(name))):
                return f"{module.__name__}.{kind.__qualname__}.{name} is not that of {file}"
    return ""


def _imported(tree: ast.Module, package: str) -> dict[str, tuple[str, str]]:
    """Return where a module's source takes each name from: module and name there."""
    found: dict[str, tuple[str, str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            base = package.split(".")
            base = base[: len(base) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            found |= {alias.asname or alias.name: (source, alias.name) for alias in node.names}
    return found


def _inside(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _inside(constant)
