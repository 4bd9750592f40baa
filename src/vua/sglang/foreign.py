"""Code that runs in an SGLang engine and is not SGLang's own: where it stands, and its content.

That is: classes of the model and of its modules, functions that stand in the place of theirs, hooks
of modules, and plug-ins. Source counts by content, and so does what a function holds (closure,
defaults, attributes of its object). Promises that two engines with equal answers run the same code
with the same values, as far as these do not read files, clocks or random numbers while they run.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import site
import sys
import sysconfig
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import sglang
import torch
from sglang.srt.plugins.hook_registry import HookRegistry

import vua
from vua.connector.adapters import content_digest
from vua.connector.cache_spec import UncachedError
from vua.errors import ConfigError
from vua.weights.model_files import code_digest

__all__ = ["file_digest", "foreign_code", "package_digest"]

_PLUGINS: Final = ("sglang.srt.plugins", "sglang.srt.platforms")
_OF_SGLANG: Final = frozenset(("smg-grpc-servicer",))
"""Packages that SGLang itself requires, and whose plug-ins only take requests."""
_CODE: Final = b"vua.sglang.code.v1"
_INSTALLED: Final = tuple(
    f"{os.path.realpath(path)}{os.sep}"
    for path in {
        *site.getsitepackages(),
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    }
)
_OWN: Final = tuple(
    f"{os.path.realpath(Path(str(module.__file__)).parent)}{os.sep}"
    for module in (sglang, torch, vua)
)
"""SGLang's, whose version is checked, and torch's; what VUA adds to an engine changes nothing."""
_TRUSTED: Final = frozenset(("sglang", "torch", "builtins", "abc", "typing", ""))
"""Packages whose functions may have no file."""
_HANDLES: Final = frozenset(("_io", "_thread", "_random", "random", "socket"))
"""Modules whose objects have a state that cannot be told."""
_STARTERS: Final = frozenset(("__main__", "__mp_main__", "sitecustomize"))


def foreign_code(runner: Any) -> dict[str, Any]:  # noqa: ANN401
    """Return what runs in an engine beside SGLang's own code: its places, and its content.

    That is: classes of the model and of its modules, functions that stand in the place of theirs,
    hooks of modules, and plug-ins. ``{}``: nothing.

    Raises UncachedError: the content of one cannot be told.
    """
    found: dict[str, Any] = {}
    for place, code in _foreign(runner.model):
        found.setdefault(place, _state(code))
    found |= _plugins()
    if found:
        found["modules"] = _local_modules()
    return found


def _foreign(model: Any) -> Iterator[tuple[str, Any]]:  # noqa: ANN401
    """Yield place and object of everything that is not SGLang's or torch's own."""
    found = [*_of_instances(model)]
    classes = {kind for module in model.modules() for kind in type(module).__mro__}
    for kind in sorted(classes, key=_qualified):
        found.append((_qualified(kind), kind))
        found += [
            (f"{_qualified(kind)}.{name}", _unbound(value))
            for name, value in vars(kind).items()
            if isinstance(_unbound(value), types.FunctionType)
        ]
    yield from ((place, code) for place, code in found if not _is_own(code))
    for name in sorted({kind.__module__ for kind in classes}):
        module = sys.modules.get(name)
        if module is not None and _is_own_file(getattr(module, "__file__", None)):
            for key, value in vars(module).items():
                if isinstance(value, types.FunctionType | type) and _is_local(value):
                    yield f"{name}.{key}", value


def _of_instances(model: Any) -> Iterator[tuple[str, Any]]:  # noqa: ANN401
    """Yield hooks, and what objects have in the place of their class's methods."""
    everywhere = torch.nn.modules.module
    held: list[tuple[str, Mapping[int, Any]]] = [
        (name, getattr(everywhere, name))
        for name in ("_global_forward_hooks", "_global_forward_pre_hooks")
    ]
    for path, module in model.named_modules(prefix="model"):
        held += [(f"{path}.hook", module._forward_hooks)]  # noqa: SLF001 - there is no public list
        held += [(f"{path}.pre_hook", module._forward_pre_hooks)]  # noqa: SLF001
        yield from (
            (f"{path}.{name}", value)
            for name, value in vars(module).items()
            if callable(value) and not isinstance(value, torch.nn.Module)
        )
    for place, hooks in held:
        yield from ((f"{place}.{number}", hook) for number, hook in enumerate(hooks.values()))


def _qualified(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _unbound(value: Any) -> Any:  # noqa: ANN401
    """Return the function of a method, property or wrapper."""
    if isinstance(value, staticmethod | classmethod | types.MethodType):
        return value.__func__
    if isinstance(value, property):
        return value.fget
    return value


def _file_of(value: Any) -> str | None:  # noqa: ANN401
    """Return the file of a function's or class's code; None: it has none, as built-in ones."""
    value = _unbound(value)
    if isinstance(value, functools.partial):
        return _file_of(value.func)
    if (code := getattr(value, "__code__", None)) is not None:
        return str(code.co_filename)
    kind = value if isinstance(value, type) else type(value)
    module = sys.modules.get(kind.__module__)
    return getattr(module, "__file__", None)


def _is_own(value: Any) -> bool:  # noqa: ANN401
    file = _file_of(value)
    if file is None or file.startswith("<"):  # built-in, or made by torch and dataclasses
        return (getattr(value, "__module__", None) or "").partition(".")[0] in _TRUSTED
    return _is_own_file(file) or _is_standard(file)


def _is_own_file(file: str | None) -> bool:
    return file is not None and os.path.realpath(file).startswith(_OWN)


def _is_standard(file: str) -> bool:
    path = os.path.realpath(file)
    return path.startswith(_INSTALLED) and "-packages" not in path


def _is_local(value: Any) -> bool:  # noqa: ANN401
    """Whether code lies outside of everything that is installed."""
    file = _file_of(value)
    if file is None or file.startswith("<"):
        return False
    return not os.path.realpath(file).startswith((*_INSTALLED, *_OWN))


def _state(code: Any) -> str:  # noqa: ANN401
    """Return a digest of code and of all that it holds: closures, defaults, attributes."""
    seen: set[int] = set()

    def attributes(value: Any) -> Mapping[str, Any] | None:  # noqa: ANN401
        if id(value) in seen:
            return {"seen": True}
        seen.add(id(value))
        return _held(value)

    try:
        return content_digest(code, _CODE, attributes)
    except (UncachedError, TypeError, ValueError, OSError, RecursionError) as problem:
        msg = f"code that is not SGLang's runs in this engine and cannot be identified: {problem}"
        raise UncachedError(msg) from problem


def _held(value: Any) -> Mapping[str, Any] | None:  # noqa: ANN401, PLR0911 - each kind
    """Return what a function, class or object is made of; None: that cannot be told."""
    if isinstance(value, types.ModuleType):
        return {"module": value.__name__}
    if isinstance(value, type):
        return {"class": _qualified(value), "code": _source(value)}
    if isinstance(value, types.MethodType):
        return {"function": value.__func__, "owner": value.__self__}
    if isinstance(value, types.FunctionType):
        return {
            "function": f"{value.__module__}.{value.__qualname__}",
            "code": _source(value),
            "closure": [_cell(each) for each in value.__closure__ or ()],
            "defaults": [value.__defaults__, value.__kwdefaults__],
        }
    if isinstance(value, functools.partial):
        return {"function": value.func, "given": [value.args, value.keywords]}
    if isinstance(value, enum.Enum | os.PathLike | torch.device):
        return {"value": str(value)}
    if isinstance(value, set | frozenset):
        return {"set": sorted(map(repr, value))}
    return _held_by_object(value)


def _held_by_object(value: Any) -> Mapping[str, Any] | None:  # noqa: ANN401
    attributes = getattr(value, "__dict__", None)
    if attributes is None or type(value).__module__ in _HANDLES:
        return None
    kept = {name: each for name, each in attributes.items() if isinstance(name, str)}
    return {"class": _qualified(type(value)), "code": _source(type(value)), "held": kept}


def _cell(cell: Any) -> Any:  # noqa: ANN401
    try:
        return cell.cell_contents
    except ValueError:  # not filled yet
        return None


def _source(code: Any) -> str:  # noqa: ANN401
    """Return what stands for the source of a function or class."""
    file = _file_of(code)
    if file is None:
        return ""
    if _is_own_file(file):
        return "sglang"
    if not Path(file).is_file():
        compiled = getattr(_unbound(code), "__code__", None)
        if compiled is None:
            msg = f"there is no source of {code!r:.80}"
            raise UncachedError(msg)
        return _compiled(compiled)
    return file_digest(Path(file))


def _compiled(code: types.CodeType) -> str:
    """Return a digest of code that has no file."""
    constants = [
        _compiled(one) if isinstance(one, types.CodeType) else repr(one) for one in code.co_consts
    ]
    said = [code.co_code.hex(), constants, code.co_names, code.co_varnames, code.co_freevars]
    return hashlib.sha256(json.dumps([sys.version, said]).encode()).hexdigest()


def _plugins() -> dict[str, Any]:
    """Return the plug-ins that SGLang loads, with their code."""
    allowed = {one.strip() for one in os.environ.get("SGLANG_PLUGINS", "").split(",")} - {""}
    found: dict[str, Any] = {}
    for group in _PLUGINS:
        for one in importlib.metadata.entry_points(group=group):
            owned = one.dist is not None and one.dist.name in _OF_SGLANG
            if not owned and (not allowed or one.name in allowed):
                package = one.value.partition(":")[0].partition(".")[0]
                found[f"{group}.{one.name}"] = [one.value, package_digest(package)]
    for target, hooks in HookRegistry._hooks.items():  # noqa: SLF001 - there is no public list
        said = [
            [str(kind), _state(hook)]
            for kind, hook, source in hooks
            if source is None or source.dist_name not in _OF_SGLANG
        ]
        found |= {f"hooks.{target}": said} if said else {}
    return found


def package_digest(name: str) -> str:
    """Return a digest of a package's Python files, or of a module's one. Raises UncachedError."""
    try:
        spec = importlib.util.find_spec(name)
        places = [Path(each) for each in (spec.submodule_search_locations or ())] if spec else []
        if spec is not None and not places and spec.origin:
            return file_digest(Path(spec.origin))
        if not places:
            msg = f"the package {name} that SGLang imports is not found"
            raise UncachedError(msg)
        return " ".join(code_digest(each) for each in places)
    except (ConfigError, OSError, ImportError, ValueError) as problem:
        msg = f"the package {name} that SGLang imports cannot be identified: {problem}"
        raise UncachedError(msg) from problem


def _local_modules() -> dict[str, str]:
    """Return the content of each loaded module that is not installed: foreign code may call it."""
    found = {}
    for name, module in sorted(sys.modules.items()):
        file = getattr(module, "__file__", None)
        path = os.path.realpath(file) if isinstance(file, str) else ""
        mine = name in _STARTERS
        if path.endswith(".py") and not path.startswith((*_INSTALLED, *_OWN)) and not mine:
            with contextlib.suppress(FileNotFoundError):  # torch has modules without a file
                found[name] = file_digest(Path(path))
    return found


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file, 64 hex digits. Raises OSError."""
    digest = hashlib.sha256()  # Python 3.10 has no `hashlib.file_digest`
    with path.open("rb") as stream:
        while part := stream.read(1 << 20):
            digest.update(part)
    return digest.hexdigest()
