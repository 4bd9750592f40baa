"""The user's settings for copies between tiers."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Final

from vua.errors import ConfigError

_ALWAYS: Final = "always"
SECOND_USE: Final = "second_use"


@dataclass(frozen=True, slots=True, kw_only=True)
class TierRules:
    """Settings of buckets and tiers."""

    upload_mib_s: float | None = None
    """Upload limit in MiB/s, from the local directory to the slower tiers; None: unlimited."""
    write_back: str = _ALWAYS
    """When a chunk read from a slower tier is also copied into the local directory. ``"always"``;
    or ``"second_use"``: only from the second read by the same process on."""

    def __post_init__(self) -> None:
        if self.write_back not in (_ALWAYS, SECOND_USE):
            msg = f'write_back must be "{_ALWAYS}" or "{SECOND_USE}", found {self.write_back!r}'
            raise ConfigError(msg)
        value = self.upload_mib_s
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (number and 0 < value < math.inf):
            raise ConfigError(f"upload_mib_s must be a positive number, found {value!r}")

    @classmethod
    def of(cls, settings: object) -> TierRules:
        """Return the rules among other settings, by their names. Raises ConfigError."""
        return cls(**{one.name: getattr(settings, one.name) for one in fields(cls)})
