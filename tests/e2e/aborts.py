"""Gives an engine requests of which some are aborted while their K/V are loaded."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from typing import Any

_WAIT_S = 30.0


def generate_and_abort(
    llm: Any, prompts: Sequence[Any], sampling: Any, aborted: Collection[int]
) -> list[Any]:
    """Abort the requests at ``aborted`` once all of them are waiting for their loads.

    Returns vLLM's output per prompt, None for those aborted. Raises RuntimeError when a load does
    not begin, when a request does not end, and when blocks are missing from the pool at the end.
    """
    engine = llm.llm_engine
    scheduler = engine.engine_core.engine_core.scheduler
    pool = scheduler.kv_cache_manager.block_pool
    free = pool.get_num_free_blocks()
    for at, prompt in enumerate(prompts):
        engine.add_request(str(at), prompt, sampling)
    done: dict[str, Any] = {}

    def step_until(reached: Any, what: str) -> None:
        until = time.monotonic() + _WAIT_S
        while not reached():
            if time.monotonic() > until:
                raise RuntimeError(f"not after {_WAIT_S:.0f} s: {what}")
            done.update((output.request_id, output) for output in engine.step() if output.finished)

    step_until(lambda: len(_loading(scheduler)) >= len(aborted), "loads have begun")
    if done.keys() & set(map(str, aborted)):
        raise RuntimeError("a request that was to be aborted has ended before")
    engine.abort_request([str(at) for at in aborted])
    step_until(lambda: not engine.has_unfinished_requests(), "all requests have ended")
    step_until(lambda: pool.get_num_free_blocks() == free, "all blocks are free again")
    return [done.get(str(at)) for at in range(len(prompts))]


def _loading(scheduler: Any) -> list[Any]:
    from vllm.v1.request import RequestStatus

    waiting = RequestStatus.WAITING_FOR_REMOTE_KVS
    return [request for request in scheduler.requests.values() if request.status == waiting]
