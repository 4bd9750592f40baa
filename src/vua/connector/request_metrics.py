"""The history of each request, for the metrics and the log: kept by the scheduler's half.

Only the scheduler sees a request as a whole (what was found, promised, and loaded by all ranks), so
tokens, lookups and loads are counted here, once, and bytes by the workers.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from vua.connector.load_policy import NOTHING_STORED, LoadDecision, LoadPolicy
from vua.connector.log import logger
from vua.connector.metrics import Recorder

__all__ = ["RequestMetrics"]

log = logger("requests")


@dataclass(slots=True)
class _Account:
    """The history of one request."""

    prompt_tokens: int
    outcome: str = "not asked"
    lookup_s: float = 0.0
    decision: LoadDecision = NOTHING_STORED
    """The decision about the tokens found."""
    ordered_s: float | None = None
    """When the running load was ordered."""
    start: int = 0
    """Tokens before those that are loaded."""
    promised: int = 0
    limit: int = 0
    """Tokens of the promised that have not failed."""
    loaded: int = 0
    load_s: float = 0.0
    saves: int = 0


class RequestMetrics:
    """Keeps one account per request. For the scheduler's thread only; all methods are O(1)."""

    def __init__(
        self,
        stats: Recorder,
        policy: LoadPolicy,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Record into ``stats``; events of loads are forwarded to ``policy``."""
        self._stats, self._policy, self._clock = stats, policy, clock
        self._saved = {"predicted": 0.0, "measured": 0.0}
        self._accounts: dict[str, _Account] = {}

    # -- per request --------------------------------------------------------------------------

    def answered(
        self,
        request_id: str,
        outcome: str,
        prompt_tokens: int,
        seconds: float,
        *,
        local_tokens: int = 0,
    ) -> None:
        """Note the answer to a lookup; later calls for the same request change nothing.

        ``local_tokens`` of the prompt are in the engine's own prefix cache already.
        """
        if request_id in self._accounts:
            return
        self._accounts[request_id] = _Account(prompt_tokens, outcome, seconds)
        self._stats.add("vua_lookups_total", label=outcome)
        self._stats.add("vua_prompt_tokens_total", prompt_tokens)
        self._stats.add("vua_queried_tokens_total", prompt_tokens - local_tokens)
        self._stats.observe("vua_lookup_seconds", seconds)

    def computing(self, request: Any, start: int, decision: LoadDecision) -> None:
        """Note that ``request`` is computed after ``start`` tokens or the loaded ones."""
        self._policy.admitted(max(start, request.num_computed_tokens), request.num_tokens)
        if decision.left_out:
            self._chosen(request.request_id, decision)

    def _chosen(self, request_id: str, decision: LoadDecision) -> None:
        self._stats.add("vua_load_decisions_total", label=decision.reason)
        account = self._accounts.get(request_id)
        if account is not None:
            account.decision = decision

    def load_ordered(self, request_id: str, start: int, stop: int, decision: LoadDecision) -> None:
        """Note that the load of tokens [start, stop) was ordered, and why."""
        self._policy.ordered(request_id, start, stop)
        self._chosen(request_id, decision)
        account = self._accounts.get(request_id)
        if account is not None:
            account.ordered_s, account.start = self._clock(), start
            account.promised = account.limit = stop - start

    def load_failed(self, request_id: str, good_tokens: int) -> None:
        """Note that only ``good_tokens`` of the running load were loaded."""
        account = self._accounts.get(request_id)
        if account is not None:
            account.limit = min(account.limit, good_tokens)

    def load_ended(self, request_id: str) -> None:
        """Note that all ranks have ended the load."""
        self._policy.ended(request_id)
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
        avoided_s = self._policy.prefill.seconds(account.limit, account.start)
        if account.limit:
            self._stats.add("vua_loaded_tokens_total", account.limit)
            if avoided_s is not None:
                self._stats.add("vua_saved_prefill_seconds_total", avoided_s)
        if avoided_s is not None:
            self._save("measured", avoided_s - seconds)
        decision = account.decision
        if decision.load_s is not None and decision.compute_s is not None:
            self._save("predicted", decision.compute_s - decision.load_s)

    def _save(self, basis: str, seconds: float) -> None:
        self._saved[basis] += seconds
        self._stats.set("vua_seconds_saved", self._saved[basis], basis)

    def saves_ordered(self, request_id: str, chunks: int) -> None:
        """Note that the workers were told to store so many chunks."""
        account = self._accounts.get(request_id)
        if account is not None:
            account.saves += chunks

    def prompt_ended(self, chunks: int, stored: int, chunk_tokens: int) -> None:
        """Note that ``stored`` leading ones of a prompt's whole chunks are stored."""
        name = "vua_prompt_chunk_tokens_total"
        self._stats.add(name, stored * chunk_tokens, "yes")
        self._stats.add(name, (chunks - stored) * chunk_tokens, "no")

    def finished(self, request_id: str) -> None:
        """Close a request's account, with one line at DEBUG."""
        self._policy.ended(request_id)
        account = self._accounts.pop(request_id, None)
        if account is not None:
            log.debug(
                "request %s: %d prompt tokens; lookup %s after %.1f ms; %s; %d tokens loaded in "
                "%.1f ms; %d chunks ordered to be stored",
                request_id,
                account.prompt_tokens,
                account.outcome,
                1000 * account.lookup_s,
                account.decision,
                account.loaded,
                1000 * account.load_s,
                account.saves,
            )

    # -- per step -----------------------------------------------------------------------------

    def step_scheduled(self, tokens: int, attended: float) -> None:
        """Note that a step was scheduled, and its work on prompts: see `prompt_work`."""
        self._policy.prefill.scheduled(tokens, attended)

    def step_ended(self) -> None:
        """Note that the oldest running step has ended."""
        self._policy.prefill.ended()
