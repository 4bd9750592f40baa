"""Wishes about one request's KV cache: a client's options, and an orchestrator's hints.

``{"kv_transfer_params": {"vua": {"store": false, "wait_s": 2}}}`` in the body of an OpenAI
request, or ``SamplingParams(extra_args={"kv_transfer_params": {...}})``. VUA's options are in their
own object, so that they cannot clash with those of other connectors. A client's options must not be
able to fail or delay a request, here or in the engine: what cannot be understood is ignored,
with one line in the log for each kind of mistake. The options are read on the engine's thread, so
the time for that does not depend on how much a client sent.

vLLM carries an orchestrator's hints beside (``kv_hints``): a list of actions with a
type, a version and a payload, which vLLM leaves open. VUA knows those of :data:`ACTIONS`.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

from vua.connector.log import WarnOnce, logger

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
        known = {name: given[name] for name in _KINDS if name in given}
        if len(known) < len(given):
            name = next(name for name in given if name not in known)
            near = difflib.get_close_matches(str(name)[:40], _KINDS, n=1, cutoff=0.0)[0]
            self._complain("unknown", f"has no {_shown(name)}; the nearest is {near!r}")
        values = {name: self._value(name, value) for name, value in known.items()}
        return {name: value for name, value in values.items() if value is not None}

    def _value(self, name: str, value: object) -> Any:
        kind = _KINDS[name]
        if value is None:  # as if it were absent
            return None
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if kind == "bool" and isinstance(value, bool):
            return value
        if kind == "float" and number and (seconds := _finite(value)) >= 0:
            return min(seconds, MAX_WAIT_S) if name == "wait_s" else seconds
        self._complain(name, f"{name!r} must be {_WORDS[kind]}, found {_shown(value)}")
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


_KINDS: Final = {
    each.name: str(each.type).partition(" ")[0]
    for each in fields(RequestOptions)
    if each.name != "outcomes"
}
_WORDS: Final = {
    "bool": "true or false",
    "float": "a number of seconds, 0 or more",
}
