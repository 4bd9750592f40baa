"""What may be copied between the places of a tiered cache: the user's rules."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Final

from vua.errors import ConfigError
from vua.format.entry import OFF, check_codec

__all__ = ["TierRules"]

_ALWAYS: Final = "always"
_SECOND_USE: Final = "second_use"


@dataclass(frozen=True, slots=True, kw_only=True)
class TierRules:
    """Settings of buckets, and of a directory with places behind it."""

    upload_mib_s: float | None = None
    """Bandwidth for what travels on, in MiB per second; None: what there is."""
    write_back: str = _ALWAYS
    """What is written back to the directory: ``"always"``: what was read from behind;
    ``"second_use"``: what the same process has read from behind before."""
    codec: str = OFF
    """Whether entries are compressed in buckets: "off", "auto" (where that makes reads faster), or
    the name of a codec; see :mod:`vua.storage.object`."""

    def __post_init__(self) -> None:
        """Refuse what is no rule. Raises ConfigError."""
        if self.write_back not in (_ALWAYS, _SECOND_USE):
            msg = f'write_back must be "{_ALWAYS}" or "{_SECOND_USE}", found {self.write_back!r}'
            raise ConfigError(msg)
        check_codec(self.codec)
        value = self.upload_mib_s
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is not None and not (number and 0 < value < math.inf):
            msg = f"upload_mib_s must be a positive number, found {value!r}"
            raise ConfigError(msg)

    @classmethod
    def of(cls, settings: object) -> TierRules:
        """Return the rules among other settings, by their names. Raises ConfigError."""
        return cls(**{one.name: getattr(settings, one.name) for one in fields(cls)})

    @property
    def at_second_use(self) -> bool:
        """Whether what is read from behind for the first time is not written back."""
        return self.write_back == _SECOND_USE
