"""An engine's setup: a digest of all that computes, by content.

Chunks of engines of one setup are loaded without a comparison (`vua.connector.witness`). So the
setup covers much more than the identity: the whole configuration, the versions of what computes,
the kind of device, the environment, and the code of the model as loaded. It has nothing of the
place: no path, home, address, port, number of a device or time of a file. So the pods of one image
have one setup wherever they run, and an engine whose code was replaced has another one.

The code is that of every function that the model's modules can reach: their classes' and their own
methods and hooks, and from there all that a function names, holds or defaults to. It is read in
each worker once the model is loaded (:func:`code_of`), so plug-ins have done their work. A function
that computes is then known by its bytecode and constants, wherever it came from.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import hashlib
import json
import os
import platform
import re
import site
import sys
import sysconfig
import types
from collections.abc import Iterable, Iterator, Mapping
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import PurePath
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import torch

from vua.connector.cache_spec import refused
from vua.errors import ConfigError
from vua.format.identity import canonical

_ENVIRONMENT: Final = ("CUDA_", "NCCL_", "NVIDIA_", "OMP_", "MKL_", "TORCH", "PYTORCH_")
_OF_A_PLACE: Final = re.compile(
    "ADDR|CACHE|DEBUG|DEVICES|DIR|HOME|HOST|IDENT|IFNAME|LOG|NAME|PATH|PORT|SERVICE|SOCKET|TRACE"
)
_ADDRESS: Final = re.compile(r" at 0x[0-9a-f]+")
_OF_A_COMPILATION: Final = re.compile(r"(?<=__compiled_fn_)(\d+)_[0-9a-f_]{36}")
"""In names of functions that `torch.compile` makes, anew each time."""


class Engine(NamedTuple):
    """What an engine's setup consists of, beside its configuration and the model's code."""

    packages: tuple[str, ...]
    plugins: tuple[str, ...]
    environment: tuple[str, ...]
    """How the names of its variables begin."""
    aside: tuple[str, ...]
    """How the names of its modules begin that compute nothing."""
    apart: frozenset[str] = frozenset()
    """Variables that compute nothing; some differ at each start."""


def settings_digest(engine: Engine, config: object) -> str:
    """Return a digest of an engine's setup but for its code; ``config`` is in JSON's types."""
    points = entry_points()
    seen: dict[str, object] = {
        "packages": {name: package_version(name) for name in ("vua", *engine.packages)},
        "plugins": sorted(
            f"{one.name} {one.value} {one.dist and one.dist.version}"
            for group in engine.plugins
            for one in points.select(group=group)
        ),
        "machine": [platform.machine(), platform.python_version(), *devices()],
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith((*_ENVIRONMENT, *engine.environment))
            and not (name in engine.apart or _OF_A_PLACE.search(name) or "/" in value)
        },
        "config": config,
    }
    return hashlib.sha256(json.dumps(seen, sort_keys=True).encode()).hexdigest()


def in_text(value: object) -> str:
    """Return a value's text, without addresses in memory; "" for a path."""
    text = _ADDRESS.sub("", str(value))
    return "" if "/" in text else text


def setting_form(value: Any, what: str) -> Any:
    """Return an engine's setting in JSON's types, in the form that equal values share.

    Raises UncachedError, naming ``what``: it has none.
    """
    try:
        return canonical(value, what, _adapted)
    except (ConfigError, RecursionError) as problem:
        raise refused("setting", problem) from problem


def _adapted(value: Any, what: str) -> Any:
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, torch.dtype | torch.device | PurePath):
        return str(value)
    if isinstance(value, type):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, set | frozenset):
        return sorted(value, key=lambda each: json.dumps(setting_form(each, what), sort_keys=True))
    names = getattr(value, "__struct_fields__", None)  # msgspec's
    if dataclasses.is_dataclass(value):
        names = [each.name for each in dataclasses.fields(value)]
    if names is None:
        return value
    return {type(value).__name__: {name: getattr(value, name) for name in names}}


def joined(setup: str, codes: Iterable[str]) -> str:
    """Return an engine's setup, given a digest of its settings and :func:`code_of` each worker."""
    return hashlib.sha256(json.dumps([setup, sorted(codes)]).encode()).hexdigest()


def package_version(package: str) -> str:
    """Return a package's version, "" if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def devices() -> list[str]:
    if not torch.cuda.is_available():
        return [torch.backends.cpu.get_cpu_capability()]
    return sorted({torch.cuda.get_device_name(at) for at in range(torch.cuda.device_count())})


_SIMPLE: Final = (bool, int, float, complex, str, bytes, type(None), torch.dtype)
_LARGEST: Final = 1 << 31
"""Larger numbers may be addresses."""
_OF_A_RANK: Final = re.compile("rank|shard_ind")
"""Which worker of several equal ones this is."""
_CACHED: Final = type(functools.lru_cache(len))
_LIBRARIES: Final = sys.stdlib_module_names | frozenset(
    (
        "einops",
        "numpy",
        "packaging",
        "pydantic",
        "regex",
        "sympy",
        "torch",
        "transformers",
        "triton",
    )
)
"""Packages that are known by their versions. What an engine's code finds in them counts, and no
more."""


class _Code:
    def __init__(self, aside: tuple[str, ...], own: frozenset[str] | None) -> None:
        self._aside, self._own = aside, own
        self.found: set[tuple[str, str]] = set()
        self.sources: set[tuple[str, str]] = set()
        self._seen: dict[int, object] = {}
        """By id; kept, so that no id is used twice."""
        self._todo: list[object] = []

    def add(self, place: str, value: Any, *, deep: bool = False) -> None:
        """Note what is at a place, and look at what it reaches later.

        ``deep``: at what an object holds, too, and at a class even if it is a library's.
        """
        while isinstance(value, functools.partial):
            self.add(f"{place}()", [*value.args, value.keywords])
            value = value.func
        value = _unwrapped(value)
        if isinstance(value, _SIMPLE):
            self._add_constant(place, value)
        elif isinstance(value, list | tuple | set | frozenset | dict):
            self._add_all(place, value)
        elif isinstance(value, types.FunctionType):
            self.found.add((place, _digest(value.__code__)))
            self.sources.add((_module_name(value), value.__code__.co_filename))
            self._later(value)
        elif isinstance(value, type):
            self.found.add((place, _qualified(value)))
            self._later(value, even_known=deep)
        elif isinstance(value, types.BuiltinFunctionType):
            self.found.add((place, f"{value.__module__}.{value.__qualname__}"))
        elif not isinstance(value, types.ModuleType | torch.Tensor):
            self.found.add((place, _qualified(type(value))))
            if deep and not type(value).__module__.startswith((*self._aside, "transformers.")):
                self.add(place, type(value))
                for name, each in getattr(value, "__dict__", {}).items():
                    self.add(f"{place}.{name}", each)

    def _add_constant(self, place: str, value: Any) -> None:
        odd = isinstance(value, int) and (abs(value) >= _LARGEST or _OF_A_RANK.search(place))
        if not odd and not (isinstance(value, str) and "/" in value):
            self.found.add((place, repr(value)))

    def _add_all(self, place: str, values: Any) -> None:
        if isinstance(values, dict):
            for name, each in values.items():
                if isinstance(name, str | int):
                    self.add(f"{place}[{name!r:.80}]", each)
        else:
            for each in values:
                self.add(f"{place}[]", each)

    def _later(self, value: Any, *, even_known: bool = False) -> None:
        module = _module_name(value)
        package = module.partition(".")[0]
        known = package in _LIBRARIES or (
            self._own is not None and package not in self._own and is_installed(package)
        )
        known = known and not even_known
        if not known and not module.startswith(self._aside) and id(value) not in self._seen:
            self._seen[id(value)] = value
            self._todo.append(value)

    def run(self) -> None:
        while self._todo:
            value = self._todo.pop()
            if isinstance(value, type):
                for base in value.__mro__:
                    if base.__module__.partition(".")[0] not in sys.stdlib_module_names:
                        for name, member in vars(base).items():
                            if not name.startswith("__") or name == "__call__":
                                self.add(f"{_qualified(base)}.{name}", member)
            elif isinstance(value, types.FunctionType):
                self._function(value)

    def _function(self, function: types.FunctionType) -> None:
        name = f"{function.__module__}.{function.__qualname__}"
        self.add(f"{name} defaults", [function.__defaults__, function.__kwdefaults__])
        for at, cell in enumerate(function.__closure__ or ()):
            try:
                self.add(f"{name} cell {at}", cell.cell_contents)
            except ValueError:  # not filled yet
                continue
        names = {*_names(function.__code__)}
        for each in sorted(names & function.__globals__.keys()):
            value = function.__globals__[each]
            if isinstance(value, types.ModuleType):
                self._module(value, names)
            elif not _module_name(function).startswith(self._aside):
                self.add(f"{_module_name(function)}.{each}", value)

    def _module(self, module: types.ModuleType, names: set[str]) -> None:
        if module.__name__.partition(".")[0] in sys.stdlib_module_names:
            return
        for each in sorted(names & vars(module).keys()):
            value = vars(module)[each]
            if isinstance(value, types.ModuleType):
                if value.__name__.startswith(f"{module.__name__}."):
                    self._module(value, names)
            else:
                self.add(f"{module.__name__}.{each}", value)


class Code(NamedTuple):
    """All code that a model's modules can reach, as it is in this process."""

    digest: str
    sources: set[tuple[str, str]]
    """For each function: the name of its module, and its file."""


def code_of(
    model: torch.nn.Module,
    aside: tuple[str, ...],
    beside: Mapping[str, object] = MappingProxyType({}),
    own: frozenset[str] | None = None,
) -> Code:
    """Return the code of a model.

    Args:
        model: its modules are walked.
        aside: how the names of modules begin that compute nothing.
        beside: objects and classes that compute, too, by name.
        own: packages whose functions are walked, beside those that are not installed; None: of all
            but the usual libraries.
    """
    found = _Code(aside, own)
    for place, value in beside.items():
        if isinstance(value, type):
            found.add(place, value, deep=True)
            continue
        found.add(place, type(value), deep=True)
        for name, each in vars(value).items():  # in the place of a method
            if isinstance(each, types.FunctionType | types.MethodType | functools.partial):
                found.add(f"{place}.{name}", each)
    for path, module in model.named_modules(prefix="model"):
        found.add(path, type(module), deep=True)
        for name, value in vars(module).items():
            found.add(f"{path}.{name}", value, deep=not isinstance(value, torch.nn.Module))
    hooks = ("_global_forward_hooks", "_global_forward_pre_hooks")
    for name in hooks:
        found.add(name, dict(getattr(torch.nn.modules.module, name)))
    found.run()
    lines = sorted((_OF_A_COMPILATION.sub(r"\1", place), what) for place, what in found.found)
    return Code(hashlib.sha256(json.dumps(lines).encode()).hexdigest(), found.sources)


@functools.cache
def _installed() -> tuple[str, ...]:
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    paths = {*map(sysconfig.get_path, names), *site.getsitepackages(), site.getusersitepackages()}
    return tuple(f"{os.path.realpath(path)}{os.sep}" for path in paths)


def is_installed(module: str, file: str = "") -> bool:
    """Whether a module, or a function of it in ``file``, is of Python or an installed package.

    What was made out of a text, without a file, counts as that.
    """
    place = getattr(sys.modules.get(module), "__file__", None) or file
    return place.startswith("<") or os.path.realpath(place).startswith(_installed())


def _module_name(value: Any) -> str:
    """Return where a function or class was made; a wrapper calls itself as what it wraps."""
    if isinstance(value, types.FunctionType):
        return str(value.__globals__.get("__name__"))
    return str(value.__module__)


def _unwrapped(value: Any) -> Any:
    if isinstance(value, staticmethod | classmethod | types.MethodType):
        return value.__func__
    if isinstance(value, property):
        return value.fget
    return value.__wrapped__ if isinstance(value, _CACHED) else value


def _qualified(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from _names(each)


@functools.cache
def _digest(code: types.CodeType) -> str:
    """Return a digest of bytecode, constants and names; not of the file and its lines."""
    constants = [
        _digest(each)
        if isinstance(each, types.CodeType)
        else str(sorted(map(repr, each)) if isinstance(each, frozenset) else repr(each))
        for each in code.co_consts
    ]
    names = [code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars]
    parts = [code.co_code.hex(), constants, names, code.co_argcount, code.co_flags]
    text = _OF_A_COMPILATION.sub(r"\1", json.dumps(parts))
    return hashlib.sha256(text.encode()).hexdigest()
