"""Settings of the connector: what may stand in ``kv_connector_extra_config``."""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields

from vua.capacity.limits import Limits
from vua.connector.log import logger
from vua.errors import ConfigError
from vua.security.settings import Security

__all__ = ["ConnectorConfig"]

log = logger()

_MAY_BE_ZERO = frozenset({"witness_every"})
_MOST = 1e18
_LOAD_POLICIES = ("faster", "always")
_GDS_MODES = ("disabled", "auto", "required")
_REMOVED = frozenset({"direct_reads", "direct_writes", "load_in_step_mib"})
_ALIASES = {"path": "shared_storage_path", "split_factor": "chunk_tokens"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorConfig:
    """The connector's settings; every one has a safe default except the directory."""

    shared_storage_path: str
    """Directory of the cache. The environment's ``VUA_PATH`` is used when it is not set."""
    chunk_tokens: int = 64
    """Tokens per chunk, the granularity of reuse. Engines that share chunks use the same."""
    window_every_tokens: int = 8192
    """Models with sliding windows: besides at the end of each prompt, and where a later one turned
    out to leave it, the window is stored at every multiple of this many tokens. Models with states
    (Mamba, gated delta nets): likewise the state, at the next step that ends with a block."""
    epoch: str = ""
    """Change it to leave everything stored so far unused."""
    durable: bool = False
    """fsync each file; without it a power cut may cost recent chunks, never wrong bytes."""
    load_policy: str = "faster"
    """``faster``: what is stored is loaded where that is predicted to be faster than computing it;
    ``always``: whenever it is stored."""
    load_margin: float = 1.5
    """With ``faster``: loads are left out from this ratio of the predicted seconds, load to
    compute, on. Above 1, since computing delays all requests and a load only its own."""
    witness_every: int = 1000
    """Of what others have stored, a chunk is computed and compared before any is loaded, and then
    at one of so many loads; see `vua.connector.witness`. 0: never."""
    load_threads: int = 2
    """Requests of one worker that are loaded at the same time."""
    save_threads: int = 1
    """Chunks of one worker that are written at the same time."""
    max_pending_save_mib: int = 512
    """Memory for chunks waiting to be written; what does not fit is not stored."""
    lookup_timeout_s: float = 1.0
    """After this long without an answer from the storage a request counts as a miss."""
    io_timeout_s: float = 10.0
    """A load or save that makes no progress for so long is given up; its tokens are recomputed."""
    save_generated: bool = False
    """Store the chunks of generated tokens too, not only those of prompts."""
    allow_inexact_continuation: bool = False
    """Cache also with an attention backend that itself, without any cache, computes other values
    behind a prefix than for a prompt as a whole (MLA on CPUs: other tokens may come out)."""
    allow_untested_vllm: bool = False
    """Go on with a vLLM that is newer than those this version of VUA was checked against."""
    gds_mode: str = "disabled"
    """Whether files are read straight into GPU memory (GPUDirect Storage): ``auto`` where a trial
    at start works, ``required``, or ``disabled``. See docs/decisions/0009-gds.md."""
    max_bytes: int | str | None = None
    """Size of the whole directory: bytes, ``"500G"`` or a share of its file system, ``"80%"``."""
    min_free_bytes: int | str | None = None
    """Bytes of the file system that are left free, in the same forms."""
    ttl_s: float | None = None
    """Seconds without use after which a chunk is deleted; by default none."""
    allow_pins: bool = False
    """Let clients pin what is stored for their requests (`pin` in ``kv_transfer_params``). All pins
    together hold half of ``max_bytes`` at most."""
    trusted_uids: list[int] | str | None = None
    """Users whose files are read beside this process's own and root's: a list of user ids, or
    ``"any"``."""
    group_read: bool = False
    """Let the directory's group read what is stored: files 0640, directories 2750."""
    key_file: str | None = None
    """A file with a secret (`vua key` makes one): only files written with it are read, and names of
    chunks tell nothing to others."""
    tenant_keys: str | None = None
    """A directory of keys, one per cache salt: requests with a salt are encrypted with its key, or
    not cached where there is none. Deleting a key makes everything stored with it unreadable."""
    encrypt: bool = False
    """Encrypt with the key of ``key_file``, too."""
    strict: bool = False
    """Let errors of the connector stop the engine instead of costing hits: for tests."""

    def __post_init__(self) -> None:
        """Refuse values of the wrong type or out of range."""
        kinds: dict[str, tuple[type, ...]] = {
            "str": (str,),
            "int": (int,),
            "bool": (bool,),
            "float": (int, float),
            "int | str | None": (int, str, type(None)),
            "float | None": (int, float, type(None)),
            "str | None": (str, type(None)),
            "list[int] | str | None": (list, str, type(None)),
        }
        for field in fields(self):
            value, kind = getattr(self, field.name), field.type
            if not isinstance(value, kinds[str(kind)]) or (
                isinstance(value, bool) and not str(kind).startswith("bool")
            ):
                msg = f"kv_connector_extra_config: {field.name} must be {kind}, found {value!r}"
                raise ConfigError(msg)
            if isinstance(value, int | float) and not isinstance(value, bool):
                least = 0 if field.name in _MAY_BE_ZERO else 1e-9
                if not least <= value <= _MOST:
                    text = "at least 0" if least == 0 else "positive"
                    text += "" if value < least else f", at most {_MOST:g} and a number"
                    msg = f"kv_connector_extra_config: {field.name} must be {text}, found {value!r}"
                    raise ConfigError(msg)

        if self.load_policy not in _LOAD_POLICIES:
            msg = (
                f"kv_connector_extra_config: load_policy must be one of {', '.join(_LOAD_POLICIES)}"
                f", found {self.load_policy!r}"
            )
            raise ConfigError(msg)
        if self.gds_mode not in _GDS_MODES:
            msg = f"kv_connector_extra_config: gds_mode is {self.gds_mode!r}; expected {_GDS_MODES}"
            raise ConfigError(msg)
        _ = self.bounds, self.security  # raise for unusable ones

    @property
    def bounds(self) -> Limits:
        """What the settings say about the directory's size."""
        return Limits(
            max_bytes=self.max_bytes, min_free_bytes=self.min_free_bytes, ttl_s=self.ttl_s
        )

    @property
    def security(self) -> Security:
        """Whose files are read, who may read what is stored, and the keys."""
        return Security(
            trusted_uids=self.trusted_uids or (),  # type: ignore[arg-type]
            group_read=self.group_read,
            key_file=self.key_file,
            tenant_keys=self.tenant_keys,
            encrypt=self.encrypt,
        )

    @classmethod
    def from_extra_config(cls, extra: Mapping[str, object]) -> ConnectorConfig:
        """Read vLLM's free-form mapping. Raises ConfigError, naming the nearest valid key."""
        known = [field.name for field in fields(cls)]
        values: dict[str, object] = {}
        for key, value in extra.items():
            name = _ALIASES.get(key, key)
            if name in _REMOVED:
                log.warning("kv_connector_extra_config: %r has no effect any more", key)
                continue
            if name not in known:
                near = difflib.get_close_matches(key, known, n=1, cutoff=0.0)[0]
                msg = f"kv_connector_extra_config has no key {key!r}; the nearest is {near!r}"
                raise ConfigError(msg)
            if name in values:
                msg = f"kv_connector_extra_config sets {name!r} twice (as {key!r})"
                raise ConfigError(msg)
            values[name] = value
        if "shared_storage_path" not in values:
            if not os.environ.get("VUA_PATH"):
                msg = (
                    "no directory for the KV cache: set kv_connector_extra_config="
                    '{"shared_storage_path": "/path"} or the environment variable VUA_PATH'
                )
                raise ConfigError(msg)
            values["shared_storage_path"] = os.environ["VUA_PATH"]
        return cls(**values)  # type: ignore[arg-type]
