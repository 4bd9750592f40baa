"""What an operator sets, ``kv_connector_extra_config``, and what one request asks for.

Every setting is described here and in the two groups from elsewhere (`vua.capacity.limits.Limits`,
`vua.security.settings.Security`); the table in docs/settings.md is generated from these
descriptions.

``{"kv_transfer_params": {"vua": {"store": false, "wait_s": 2}}}`` in the body of an OpenAI
request, or ``SamplingParams(extra_args={"kv_transfer_params": {...}})``. VUA's options are in their
own object, so that they cannot clash with those of other connectors. A client's options must not be
able to fail or delay a request, here or in the engine: what cannot be understood is ignored,
with one line in the log for each kind of mistake. The options are read on the engine's thread, so
the time for that does not depend on how much a client sent. vLLM carries an orchestrator's hints
beside (``kv_hints``): a list of actions with a type, a version and a payload, which vLLM leaves
open. VUA knows those of :data:`ACTIONS`.
"""

from __future__ import annotations

import difflib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from vua.capacity.limits import Limits
from vua.connector.log import WarnOnce, logger
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


log = logger("requests")

SECTION: Final = "vua"
MAX_WAIT_S: Final = 60.0
"""The longest time that a client may make its own request wait."""
MAX_RETAIN_S: Final = 3600.0
"""The longest time for which a hint keeps chunks; longer ones are cut."""
_SHOWN: Final = 60
ACTIONS: Final = {
    "kv.retain": "retain_s",
    "kv.pin": "pin",
    "kv.prefetch": "prefetch",
    "kv.evict": "drop",
    "kv.drop": "drop",
}
"""Types of actions in vLLM's ``kv_hints``, and the options that mean the same."""
_VERSIONS: Final = ("0", "1")
_MOST_ACTIONS: Final = 16
_MOST_DIRECTIVES: Final = 64
DEFAULT_RETAIN_S: Final = 600.0
"""For how long chunks are retained where an action does not say."""


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """A request's options; the defaults apply if a client sets none."""

    store: bool = True
    """Whether the prompt's chunks may be stored."""
    load: bool = True
    """Whether stored chunks may be used."""
    wait_s: float = 0.0
    """How long to wait for chunks that another engine is still writing, see
    examples/disaggregated."""
    pin: bool = False
    """Whether the prompt's chunks should stay even if unused; if the operator allows that."""
    retain_s: float | None = None
    """The prompt's chunks stay for so many seconds from this request's end, as far as the
    operator's budget goes."""
    drop: bool = False
    """The prompt is not used again: its chunks go first."""
    prefetch: bool = False
    """Copy what is stored of it from slower tiers into the directory."""
    outcomes: tuple[str, ...] = ()
    """The outcome of hints as far as it is known by now, in words of the metrics."""


_DEFAULT: Final = RequestOptions()


class OptionReader:
    """Reads requests' options and remembers its complaints. For one thread."""

    def __init__(self, *, allow_pins: bool = False) -> None:
        """Start without complaints; without ``allow_pins`` pins are refused."""
        self._allow_pins, self._warn_once = allow_pins, WarnOnce(log)

    def read(self, params: Any, kv_hints: Any = None) -> RequestOptions:
        """Return a request's options; never raises.

        Args:
            params: its ``kv_transfer_params``: what the client sent (anything that JSON can hold),
                or None.
            kv_hints: vLLM's ``KvHintsEnvelope``, whose payloads hold anything that JSON can; or
                None.
        """
        good, outcomes = self._of_client(params), list[str]()
        if kv_hints is not None:
            good |= self._of_actions(getattr(kv_hints, "actions", None), outcomes)
        if good.pop("pin", False):
            good |= {"pin": True} if self._allow_pins else {}
            outcomes.append("pinned" if self._allow_pins else "not_allowed")
            if not self._allow_pins:
                self._complain(
                    "pin refused", 'asks for a pin, which needs "pins" in the setting "allow"'
                )
        if retain_s := good.pop("retain_s", 0):
            good["retain_s"] = min(retain_s, MAX_RETAIN_S)
        if not (good or outcomes):
            return _DEFAULT
        return RequestOptions(**good, outcomes=tuple(outcomes))

    def _of_actions(self, actions: Any, outcomes: list[str]) -> dict[str, Any]:
        """Return what an orchestrator's actions ask for, the longest of several times.

        Adds to ``outcomes`` why the rest is refused.
        """
        values: dict[str, Any] = {}
        if not isinstance(actions, Sequence):
            actions = ()
        for action in actions[:_MOST_ACTIONS]:
            name = ACTIONS.get(str(getattr(action, "action_type", "")))
            major = str(getattr(action, "action_version", "")).partition(".")[0]
            payload = getattr(action, "payload", None)
            if name is None or major not in _VERSIONS:
                outcomes.append(self._refused("unknown", "an unknown type or version", action))
            elif not isinstance(payload, Mapping):
                outcomes.append(self._refused("malformed", "no object as payload", action))
            elif payload.get("include_current_request", True) is not True:
                outcomes.append(self._refused("unknown", "blocks of other requests alone", action))
            elif name in ("retain_s", "pin"):
                seconds = _retain_s(payload)
                if seconds is None:
                    outcomes.append(self._refused("malformed", "no number of seconds", action))
                elif name == "pin" and "ttl_seconds" not in payload:
                    values["pin"] = True
                else:
                    values["retain_s"] = max(seconds, values.get("retain_s", 0.0))
            else:
                values[name] = True
        return values

    def _refused(self, outcome: str, found: str, action: object) -> str:
        names = ("action_type", "action_version")
        kind, version = (_shown(getattr(action, name, None)) for name in names)
        self._warn_once(
            found,
            f"an action in a request's kv_hints has {found}: {kind}, version {version}; ignored, "
            f"as will be others like it. Known types, in versions 0 and 1: {', '.join(ACTIONS)}",
        )
        return outcome

    def _of_client(self, params: Any) -> dict[str, Any]:
        if not isinstance(params, Mapping) or SECTION not in params:
            return {}
        given = params[SECTION]
        if not isinstance(given, Mapping):
            self._complain(SECTION, f"must be an object, found {_shown(given)}")
            return {}
        known = {name: given[name] for name in _OPTION_KINDS if name in given}
        if len(known) < len(given):
            name = next(name for name in given if name not in known)
            near = difflib.get_close_matches(str(name)[:40], _OPTION_KINDS, n=1, cutoff=0.0)[0]
            self._complain("unknown", f"has no {_shown(name)}; the nearest is {near!r}")
        values = {name: self._value(name, value) for name, value in known.items()}
        return {name: value for name, value in values.items() if value is not None}

    def _value(self, name: str, value: object) -> Any:
        kind = _OPTION_KINDS[name]
        if value is None:  # as if it were absent
            return None
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if kind == "bool" and isinstance(value, bool):
            return value
        if kind == "float" and number and (seconds := _finite(value)) >= 0:
            return min(seconds, MAX_WAIT_S) if name == "wait_s" else seconds
        self._complain(name, f"{name!r} must be {_OPTION_WORDS[kind]}, found {_shown(value)}")
        return None

    def _complain(self, about: str, what: str) -> None:
        text = f"a request's kv_transfer_params[{SECTION!r}] {what}; ignored, as will be others"
        self._warn_once(about, f"{text} like it")


def _retain_s(payload: Mapping[str, Any]) -> float | None:
    """Return for how long an action retains: the longest of its times; None: not a number."""
    directives = payload.get("directives", ())
    if not isinstance(directives, list | tuple):
        return None
    durations = [payload.get("ttl_seconds"), payload.get("duration")]
    for one in directives[:_MOST_DIRECTIVES]:
        if not isinstance(one, Mapping):
            return None
        durations.append(one.get("duration"))
    times = [one for one in durations if one is not None]
    if any(isinstance(one, bool) or not isinstance(one, int | float) for one in times):
        return None
    found = [_finite(one) for one in times] or [DEFAULT_RETAIN_S]
    return max(found) if min(found) >= 0 else None


def _shown(value: object) -> str:
    if isinstance(value, str):
        return repr(value[:_SHOWN])
    if isinstance(value, int) and value.bit_length() > 2 * _SHOWN:
        return f"a whole number of {value.bit_length()} bits"
    if value is None or isinstance(value, int | float):
        return repr(value)
    if isinstance(value, Mapping):
        return f"an object with {len(value)} members"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)} values"
    return f"a {type(value).__name__}"


def _finite(value: Any) -> float:
    try:
        number = float(value)
    except OverflowError:
        return -1.0
    return number if math.isfinite(number) else -1.0


_OPTION_KINDS: Final = {
    each.name: str(each.type).partition(" ")[0]
    for each in fields(RequestOptions)
    if each.name != "outcomes"
}
_OPTION_WORDS: Final = {
    "bool": "true or false",
    "float": "a number of seconds, 0 or more",
}
