"""Settings of the library: :class:`vua.core.VUA` takes them."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vua.capacity.limits import Limits, nbytes_of
from vua.errors import ConfigError
from vua.security.settings import Security
from vua.storage.location import Location, nearest

if TYPE_CHECKING:
    import torch


class _OnClassOrInstance:
    """A method that receives the instance if there is one, else the class."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        self._function = function
        self.__doc__ = function.__doc__

    def __get__(self, instance: object, owner: type) -> Callable[..., torch.Tensor]:
        target = owner if instance is None else instance
        return lambda tokens: self._function(target, tokens)


_OFTEN = {
    "chunk_tokens": "split_factor",
    "chunk_size": "split_factor",
    "key_file": "security",
    "tenant_keys": "security",
    "trusted_uids": "security",
    "capacity_bytes": "max_bytes",
}


class VUAConfig:
    """Settings of a :class:`vua.core.VUA`; pass the class for the defaults, or an instance.

    A subclass may set the attributes instead. Caches stored with different ``split_factor``,
    ``model`` or ``epoch`` do not see each other.

    >>> import torch
    >>> VUAConfig(split_factor=16).trim_to_split_factor(torch.arange(40)).shape
    torch.Size([32])
    """

    split_factor: int = 64
    """Tokens per chunk, 1..65536: the granularity of reuse."""
    model: str = "default"
    """Name of the weights and settings that K and V depend on: give each its own."""
    epoch: str = ""
    """Change it to leave everything stored so far unused, e.g. after new weights."""
    durable: bool = False
    """fsync each file. Without it a power cut may cost recent chunks (never wrong bytes)."""
    threads: int = min(4, os.cpu_count() or 1)
    """Sequences of a batch that are worked on at the same time."""
    buffer_bytes: int = 1 << 30
    """Bytes of freed result buffers to keep for reuse. 0 disables reuse."""

    max_bytes: int | str | None = None
    """Size of the whole directory: bytes, ``"500G"`` or ``"80%"`` of the file system."""
    min_free_bytes: int | str | None = None
    """Bytes of the file system that are left free, in the same forms."""
    ttl_s: float | None = None
    """Seconds without use after which a chunk is deleted; by default none."""
    security: Security = Security()
    """Whose files are read, who may read what is stored, and the keys."""

    _FIELDS = (
        *("split_factor", "model", "epoch", "durable", "threads", "buffer_bytes"),
        *("max_bytes", "min_free_bytes", "ttl_s", "security"),
    )

    def __init__(self, **settings: Any) -> None:
        """Set fields by name. Raises ConfigError for an unknown one, naming the nearest."""
        for name, value in settings.items():
            if name not in self._FIELDS:
                near = difflib.get_close_matches(name, self._FIELDS, n=1, cutoff=0.6)
                meant = _OFTEN.get(name) or (near[0] if near else None)
                hint = f"the nearest is {meant!r}" if meant else f"it has {', '.join(self._FIELDS)}"
                raise ConfigError(f"VUAConfig has no setting {name!r}; {hint}")
            setattr(self, name, value)
        for name in ("split_factor", "threads"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ConfigError(f"VUAConfig.{name} must be a positive int, found {value!r}")

        _ = self.bounds  # raises for unusable ones

    @property
    def bounds(self) -> Limits:
        """The limits on the directory's size in these settings."""
        return Limits(
            max_bytes=self.max_bytes, min_free_bytes=self.min_free_bytes, ttl_s=self.ttl_s
        )

    def check_room(self, path: Location, chunk_nbytes: int) -> None:
        """Refuse a `max_bytes` that is smaller than a chunk's file of ``chunk_nbytes``.

        Raises ConfigError, and OSError if the file system of ``path`` cannot be asked.
        """
        near = nearest(path)
        if self.max_bytes is None or near is None:
            return
        try:
            system = os.statvfs(near)
        except FileNotFoundError:
            return  # it is made with the first chunk, or that says why not
        limit = nbytes_of(self.max_bytes, system.f_blocks * system.f_frsize)
        if chunk_nbytes > limit:
            raise ConfigError(
                f"VUAConfig.max_bytes is {self.max_bytes!r}, {limit:,} bytes; one chunk of "
                f"{self.split_factor} tokens of this model takes {chunk_nbytes:,}, so nothing "
                "would ever be stored. Set more, or a smaller split_factor"
            )

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}={getattr(self, name)!r}" for name in self._FIELDS)
        return f"{type(self).__name__}({shown})"

    @_OnClassOrInstance
    def trim_to_split_factor(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return ``tokens`` (T,) or (B, T) cut to whole chunks. Works on the class too."""
        length = tokens.shape[-1]
        return tokens[..., : length - length % self.split_factor]
