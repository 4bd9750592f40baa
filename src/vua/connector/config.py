"""Settings of the connector: the keys of ``kv_connector_extra_config``; what engines receive.

Every setting is described here and in the two groups from elsewhere (`vua.capacity.limits.Limits`,
`vua.security.settings.Security`); the table in docs/settings.md is generated from these
descriptions.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from vua.capacity.limits import Limits
from vua.errors import ConfigError
from vua.security.settings import Security
from vua.storage.location import directory_of

_WHERE: Final = "kv_connector_extra_config"
_MAY_BE_ZERO: Final = frozenset({"witness_every", "max_pending_save_mib"})
_MOST: Final = 1e18
_ALLOWED: Final = ("inexact_continuation", "pins")


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """How long VUA waits for the storage. Raise them for slow storage, lower them for latency."""

    lookup_s: float = 1.0
    """After this long without an answer from the storage a request counts as a miss."""
    io_s: float = 10.0
    """A load or save that makes no progress for so long is given up; its tokens are recomputed."""
    drain_s: float = 20.0
    """Seconds that an engine's end waits for chunks that are still to be stored. The log says how
    many are left then. Keep it below the time after which the engine is killed (Kubernetes: 30)."""

    def __post_init__(self) -> None:
        _check(self, "timeouts.")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerResources:
    """What each worker process may take from its host."""

    load_threads: int = 2
    """Requests of one worker that are loaded at the same time. Raise it for storage with many disks
    or servers."""
    max_pending_save_mib: int = 0
    """MiB of memory for chunks that wait to be written. Chunks that do not fit are tried again
    while their request runs. 0 chooses by itself: two full steps of the engine
    (`max_num_batched_tokens`), at least 512 MiB or 256 chunks, at most an eighth of the machine's
    memory for all workers. Raise it if the share "no" of `vua_prompt_chunk_tokens_total` grows."""

    def __post_init__(self) -> None:
        _check(self, "worker.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorConfig:
    """The connector's settings; every one has a safe default except the directory."""

    shared_storage_path: str | tuple[str, ...]
    """Directory of the cache, a bucket (`"s3://bucket/prefix"`), or a list: a local directory and
    then slower tiers. The environment's `VUA_PATH` is used when it is not set."""
    chunk_tokens: int = 64
    """Tokens per chunk, the granularity of reuse. Engines that share chunks use the same."""
    epoch: str = ""
    """Change it to leave everything stored so far unused."""
    durable: bool = False
    """fsync each file. Without it a power cut may cost recent chunks, never wrong bytes."""
    save_generated: bool = False
    """Store the chunks of generated tokens too, not only those of prompts. Set it for
    conversations, whose next prompt contains the last answer. It stops by itself while no prompt
    begins with what was generated, as where a chat template leaves out what a model thought."""
    window_every_tokens: int = 8192
    """Models with sliding windows: the window is stored at the end of each prompt, where a later
    prompt diverged, and where one may: at eight points in each doubling of the length, and at every
    multiple of this many tokens."""
    load_policy: str | float = "faster"
    """`"faster"`: load a stored prefix if that is predicted to be faster than computing it.
    `"always"`: load each stored prefix. A number: skip a load that is predicted to take more than
    this many times the compute time (`"faster"` is 1.5: computing delays all requests, a load only
    its own). Lower it for the time to the first token, raise it for throughput."""
    witness_every: int = 1000
    """Before the first load of another process's chunks, compute one prompt and compare it with
    them. Repeat for one random load in this many. 0 disables the comparison, except with a vLLM
    that was not tested."""
    gds_mode: str = "disabled"
    """Whether files are read straight into GPU memory (GPUDirect Storage): `"auto"` where a trial
    at start works, `"required"`, or `"disabled"`."""
    limits: Limits = field(default_factory=Limits)
    """How large the directory may grow, and how long unused chunks stay."""
    security: Security = field(default_factory=Security)
    """Whose files are read, who may read what is stored, and the keys."""
    timeouts: Timeouts = field(default_factory=Timeouts)
    """How long VUA waits for the storage."""
    worker: WorkerResources = field(default_factory=WorkerResources)
    """What each worker process may take from its host."""
    allow: tuple[str, ...] = ()
    """Things that are refused by default. `"pins"`: clients may pin the chunks of their requests;
    all pins together hold half of `limits.max_bytes` at most. `"inexact_continuation"`: cache also
    with an attention backend that itself, without any cache, computes other values after a cached
    prefix than for a whole prompt (MLA on CPUs)."""
    strict: bool = False
    """Let errors of the connector stop the engine instead of costing hits: for tests."""

    def __post_init__(self) -> None:
        _check(self)
        if isinstance(self.load_policy, str) and self.load_policy not in ("faster", "always"):
            raise _refused("load_policy", '"faster", "always" or a number', self.load_policy)
        if self.gds_mode not in ("disabled", "auto", "required"):
            raise _refused("gds_mode", "disabled, auto or required", self.gds_mode)
        if unknown := [one for one in self.allow if one not in _ALLOWED]:
            raise _refused("allow", f"a list out of {', '.join(_ALLOWED)}", unknown[0])

    @property
    def directory(self) -> Path | None:
        """The directory of the cache, if there is only a directory: no bucket, no tiers."""
        return directory_of(self.shared_storage_path)

    @classmethod
    def from_extra_config(
        cls,
        extra: Mapping[str, object],
        *,
        how: str = "give `vua-vllm serve` --vua-path DIRECTORY",
    ) -> ConnectorConfig:
        """Read vLLM's free-form mapping.

        Raises ConfigError, naming the nearest valid name for an unknown one, and for a missing
        directory ``how`` the engine's users give it.
        """
        for name in extra:
            _check_name(name, [one.name for one in fields(cls)])
        values: dict[str, Any] = dict(extra)
        for name, group in _GROUPS.items():
            if name in values:
                values[name] = _group(name, group, values[name])
        for name in ("allow", "shared_storage_path"):
            if isinstance(values.get(name), list):
                values[name] = tuple(values[name])
        if "shared_storage_path" not in values:
            if not os.environ.get("VUA_PATH"):
                raise ConfigError(
                    f"no directory for the KV cache: {how}, or "
                    f'set {_WHERE}={{"shared_storage_path": "/path"}}, or the environment variable '
                    "VUA_PATH"
                )
            values["shared_storage_path"] = os.environ["VUA_PATH"]
        return cls(**values)


_GROUPS: Final[Mapping[str, type]] = {
    "limits": Limits,
    "security": Security,
    "timeouts": Timeouts,
    "worker": WorkerResources,
}
_NOT_HERE: Final = frozenset({"max_bytes_per_salt", "min_free_inodes"})
"""Limits that only `vua gc` applies."""


def defaults() -> dict[str, object]:
    """Return every setting that has a default, by its name: ``group.name`` within a group."""
    found: dict[str, object] = {}
    for one in fields(ConnectorConfig):
        if one.name in _GROUPS:
            for inner in fields(_GROUPS[one.name]):
                if inner.name not in _NOT_HERE:
                    found[f"{one.name}.{inner.name}"] = inner.default
        elif one.default is not MISSING:
            found[one.name] = one.default
    return found


def _group(name: str, kind: type, given: object) -> object:
    if not isinstance(given, Mapping):
        raise _refused(name, "a group of settings", given)
    names = [one.name for one in fields(kind) if one.name not in _NOT_HERE]
    for inner in given:
        _check_name(str(inner), names, f"{name}.")
    try:
        return kind(**given)
    except ConfigError as problem:
        msg = f"{_WHERE}: {problem}" if not str(problem).startswith(_WHERE) else str(problem)
        raise ConfigError(msg) from problem


def _check_name(name: str, names: list[str], group: str = "") -> None:
    if name in names:
        return
    known = [*defaults(), *_GROUPS, "shared_storage_path"]
    by_leaf = {one.rpartition(".")[2]: one for one in reversed(known)}
    near = difflib.get_close_matches(name.lower(), by_leaf, n=1, cutoff=0.6)
    hint = f"the nearest is {by_leaf[near[0]]!r}" if near else f"expected one of {', '.join(known)}"
    raise ConfigError(f"{_WHERE} has no key {group + name!r}; {hint}")


def _refused(name: str, expected: str, found: object) -> ConfigError:
    return ConfigError(f"{_WHERE}: {name} must be {expected}, found {found!r}")


def _check(settings: Any, group: str = "") -> None:
    for one in fields(settings):
        value, kind = getattr(settings, one.name), str(one.type)
        if one.name in _GROUPS:
            continue
        if not isinstance(value, _KINDS[kind]) or (isinstance(value, bool) and kind != "bool"):
            raise _refused(group + one.name, _KIND_NAMES.get(kind, kind), value)
        if isinstance(value, int | float) and not isinstance(value, bool):
            least = 0 if one.name in _MAY_BE_ZERO else 1e-9
            if not least <= value <= _MOST:
                text = "at least 0" if least == 0 else "positive"
                text += "" if value < least else f", at most {_MOST:g} and a number"
                raise _refused(group + one.name, text, value)


_KINDS: Final[Mapping[str, tuple[type, ...]]] = {
    "str": (str,),
    "int": (int,),
    "bool": (bool,),
    "float": (int, float),
    "float | None": (int, float, type(None)),
    "str | float": (str, int, float),
    "tuple[str, ...]": (tuple,),
    "str | tuple[str, ...]": (str, tuple),
}
_KIND_NAMES: Final = {
    "str | tuple[str, ...]": "text or a list",
    "tuple[str, ...]": "a list",
    "str | float": "text or a number",
    "float | None": "a number",
}


VLLM_TRANSFER: Final = {
    "kv_connector": "VUA",
    "kv_connector_module_path": "vua.vllm.kv_connector_v1",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}
"""vLLM's ``--kv-transfer-config``, without VUA's own settings."""


def sglang_arguments(path: str, **settings: Any) -> dict[str, Any]:
    """Return the arguments of an ``sglang.Engine`` that stores its pages in a directory or bucket.

    Args:
        path: the directory, or a bucket's URL.
        settings: further ones of VUA's, or of SGLang's extra configuration.
    """
    extra = {
        "backend_name": "vua",
        "module_path": "vua.sglang.storage",
        "class_name": "VUAHiCacheStorage",
        "interface_v1": 1,
        "hicache_storage_pass_prefix_keys": True,
        "shared_storage_path": path,
        **settings,
    }
    return {
        "enable_hierarchical_cache": True,
        "page_size": 64,
        "hicache_write_policy": "write_through",
        "hicache_storage_prefetch_policy": "wait_complete",
        "hicache_storage_backend": "dynamic",
        "hicache_storage_backend_extra_config": json.dumps(extra),
    }
