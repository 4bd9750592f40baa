"""What became of each request, for the metrics and the log: kept by the scheduler's half.

Only the scheduler sees a request as a whole (what was found, promised, and came to all ranks), so
tokens, lookups and loads are counted here, once, and bytes by the workers.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from vua.vllm.speed import PrefillSpeed
from vua.vllm.stats import Recorder

__all__ = ["Accounts"]

log = logging.getLogger("vllm.vua.requests")


@dataclass(slots=True)
class _Account:
    """One request so far."""

    prompt_tokens: int
    outcome: str = "not asked"
    lookup_s: float = 0.0
    ordered_s: float | None = None
    """When the running load was ordered."""
    promised: int = 0
    limit: int = 0
    """Tokens of the promised that have not failed."""
    loaded: int = 0
    load_s: float = 0.0
    saves: int = 0


class Accounts:
    """Keeps one account per request. For the scheduler's thread only; all methods are O(1)."""

    def __init__(
        self,
        stats: Recorder,
        *,
        least_prefill_tokens: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Record into ``stats``; ``least_prefill_tokens`` as for :class:`PrefillSpeed`."""
        self._stats, self._clock = stats, clock
        self._speed = PrefillSpeed(least_prefill_tokens, clock=clock)
        self._accounts: dict[str, _Account] = {}

    # -- per request --------------------------------------------------------------------------

    def answered(self, request_id: str, outcome: str, prompt_tokens: int, seconds: float) -> None:
        """Note the answer to a lookup; further calls for the same request change nothing."""
        if request_id in self._accounts:
            return
        self._accounts[request_id] = _Account(prompt_tokens, outcome, seconds)
        self._stats.add("vua_lookups_total", label=outcome)
        self._stats.add("vua_prompt_tokens_total", prompt_tokens)
        self._stats.observe("vua_lookup_seconds", seconds)

    def load_ordered(self, request_id: str, tokens: int) -> None:
        """Note that the load of ``tokens`` was ordered."""
        account = self._accounts.get(request_id)
        if account is not None:
            account.ordered_s, account.promised, account.limit = self._clock(), tokens, tokens

    def load_failed(self, request_id: str, good_tokens: int) -> None:
        """Note that no more than ``good_tokens`` of the running load came."""
        account = self._accounts.get(request_id)
        if account is not None:
            account.limit = min(account.limit, good_tokens)

    def load_ended(self, request_id: str) -> None:
        """Note that all ranks have ended the load."""
        account = self._accounts.get(request_id)
        if account is None or account.ordered_s is None:
            return
        seconds, account.ordered_s = self._clock() - account.ordered_s, None
        account.load_s += seconds
        account.loaded += account.limit
        complete = account.limit == account.promised
        outcome = "complete" if complete else "partial" if account.limit else "failed"
        self._stats.add("vua_loads_total", label=outcome)
        self._stats.observe("vua_load_seconds", seconds)
        if account.limit:
            self._stats.add("vua_loaded_tokens_total", account.limit)
            speed = self._speed.tokens_per_s
            if speed is not None:
                self._stats.add("vua_saved_prefill_seconds_total", account.limit / speed)

    def saves_ordered(self, request_id: str, chunks: int) -> None:
        """Note that the workers were told to store so many chunks."""
        account = self._accounts.get(request_id)
        if account is not None:
            account.saves += chunks

    def finished(self, request_id: str) -> None:
        """Close a request's account, with one line at DEBUG."""
        account = self._accounts.pop(request_id, None)
        if account is not None:
            log.debug(
                "request %s: %d prompt tokens; lookup %s after %.1f ms; %d tokens loaded in "
                "%.1f ms; %d chunks ordered to be stored",
                request_id,
                account.prompt_tokens,
                account.outcome,
                1000 * account.lookup_s,
                account.loaded,
                1000 * account.load_s,
                account.saves,
            )

    # -- per step -----------------------------------------------------------------------------

    def step_scheduled(self, tokens: int) -> None:
        """Note that a step was scheduled, with so many tokens to compute."""
        self._speed.scheduled(tokens)

    def step_ended(self) -> None:
        """Note that the oldest running step has ended."""
        self._speed.ended()
