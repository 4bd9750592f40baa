"""A client's options for one request's KV cache, in vLLM's ``kv_transfer_params``.

``{"kv_transfer_params": {"vua": {"store": false, "ttl_s": 3600}}}`` in the body of an OpenAI
request, or ``SamplingParams(extra_args={"kv_transfer_params": {...}})``. VUA's options are in their
own object, so that they cannot clash with those of other connectors. A client's options must not be
able to fail or delay a request, here or in the engine: whatever cannot be understood is ignored,
with one line in the log for each kind of mistake. The options are read on the engine's thread, so
the time for that does not depend on how much a client sent.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final

from vua.connector.log import logger

__all__ = ["MAX_WAIT_S", "OptionReader", "RequestOptions", "SaveHints"]

log = logger("requests")

SECTION: Final = "vua"
MAX_WAIT_S: Final = 60.0
"""The longest time that a client may make its own request wait."""
_SHOWN: Final = 60
"""Characters of a client's value that a log line shows."""
_MAX_TOKENS: Final = 1 << 62


@dataclass(frozen=True, slots=True)
class SaveHints:
    """How long the stored chunks of a request are worth keeping."""

    ttl_s: float | None = None
    """Seconds without use after which the chunks may be deleted, if the directory's own time to
    live does not end before; None: only that one. See :mod:`vua.capacity.marks`."""
    pin: bool = False
    """Whether they should stay even if unused; if the operator allows that."""


@dataclass(frozen=True, slots=True)
class RequestOptions:
    """A request's options; the defaults apply if a client sets none."""

    store: bool = True
    """Whether the prompt's chunks may be stored."""
    load: bool = True
    """Whether stored chunks may be used."""
    max_load_tokens: int | None = None
    """Load at most so many tokens from the prompt's start; None: all that are stored."""
    wait_s: float = 0.0
    """How long to wait for chunks that another engine is still writing, see
    examples/disaggregated."""
    hints: SaveHints = field(default_factory=SaveHints)


_DEFAULT: Final = RequestOptions()


class OptionReader:
    """Reads requests' options and remembers its complaints. For one thread."""

    def __init__(self, *, allow_pins: bool = False) -> None:
        """Start without complaints; without ``allow_pins`` pins are refused."""
        self._allow_pins = allow_pins
        self._complained: set[str] = set()

    def read(self, params: Any) -> RequestOptions:
        """Return the options in a request's ``kv_transfer_params``; never raises.

        ``params`` is what the client sent (anything that JSON can hold), or None.
        """
        if not isinstance(params, Mapping) or SECTION not in params:
            return _DEFAULT
        given = params[SECTION]
        if not isinstance(given, Mapping):
            self._complain(SECTION, f"must be an object, found {_shown(given)}")
            return _DEFAULT
        known = {name: given[name] for name in _KINDS if name in given}
        if len(known) < len(given) and "unknown" not in self._complained:
            name = next(name for name in given if name not in known)
            near = difflib.get_close_matches(str(name)[:40], _KINDS, n=1, cutoff=0.0)[0]
            self._complain("unknown", f"has no {_shown(name)}; the nearest is {near!r}")
        values = {name: self._value(name, value) for name, value in known.items()}
        good = {name: value for name, value in values.items() if value is not None}
        if good.get("pin") and not self._allow_pins:
            self._complain(
                "pin refused", 'asks for a pin, which needs "pins" in the setting "allow"'
            )
            del good["pin"]
        hints = {name: good.pop(name) for name in _HINTS if name in good}
        return RequestOptions(**good, hints=SaveHints(**hints))

    def _value(self, name: str, value: object) -> Any:
        """Return a valid value of an option; None otherwise."""
        kind = _KINDS[name]
        if value is None:  # as if it were absent
            return None
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if kind == "bool" and isinstance(value, bool):
            return value
        if kind == "int" and isinstance(value, int) and number and value >= 0:
            return min(value, _MAX_TOKENS)
        if kind == "float" and number and (seconds := _finite(value)) >= 0:
            return min(seconds, MAX_WAIT_S) if name == "wait_s" else seconds
        self._complain(name, f"{name!r} must be {_WORDS[kind]}, found {_shown(value)}")
        return None

    def _complain(self, about: str, what: str) -> None:
        if about not in self._complained:
            self._complained.add(about)
            log.warning(
                "VUA: a request's kv_transfer_params[%r] %s; ignored, as will be others like it",
                SECTION,
                what,
            )


def _shown(value: object) -> str:
    """Return a client's value for a log line, in time and length that do not depend on its size."""
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
    """The number as a float; -1 if it is not a number or too large."""
    try:
        number = float(value)
    except OverflowError:
        return -1.0
    return number if math.isfinite(number) else -1.0


_HINTS: Final = tuple(each.name for each in fields(SaveHints))
_KINDS: Final = {
    "store": "bool",
    "load": "bool",
    "max_load_tokens": "int",
    "wait_s": "float",
    "ttl_s": "float",
    "pin": "bool",
}
_WORDS: Final = {
    "bool": "true or false",
    "int": "a whole number of tokens, 0 or more",
    "float": "a number of seconds, 0 or more",
}
