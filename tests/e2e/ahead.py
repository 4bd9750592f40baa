"""Asynchronous scheduling on a CPU: vLLM's own, which its CPU platform turns off and could run."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from contextlib import ExitStack, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch


@contextmanager
def running_ahead(engine: dict[str, Any], counts: MutableMapping[str, int]) -> Iterator[None]:
    """If the engine's settings ask for it, let it schedule a step before the last one's tokens.

    vLLM's scheduler, its queue of batches and its model runner are as they are; only the CUDA
    stream on which sampled tokens come to the host is replaced by nothing: there they are already.

    Args:
        engine: vLLM's arguments.
        counts: gets the number of "steps_ahead", scheduled before the one before them had ended.
    """
    if not engine.get("async_scheduling"):
        yield
        return
    from vllm.platforms.cpu import CpuPlatform
    from vllm.v1.core.sched.scheduler import Scheduler

    check, schedule, update = (
        CpuPlatform.check_and_update_config,
        Scheduler.schedule,
        Scheduler.update_from_output,
    )
    running = 0

    def keep(vllm_config: Any) -> None:
        check(vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    def counting_schedule(*arguments: Any, **named: Any) -> Any:
        nonlocal running
        counts["steps_ahead"] = counts.get("steps_ahead", 0) + (running > 0)
        running += 1
        return schedule(*arguments, **named)

    def counting_update(*arguments: Any, **named: Any) -> Any:
        nonlocal running
        running -= 1
        return update(*arguments, **named)

    nothing = SimpleNamespace(
        record=lambda *_: None, synchronize=lambda: None, wait_stream=lambda _: None
    )
    with ExitStack() as patches:
        for owner, name, value in (
            (CpuPlatform, "check_and_update_config", staticmethod(keep)),
            (Scheduler, "schedule", counting_schedule),
            (Scheduler, "update_from_output", counting_update),
            (torch.cuda, "Event", lambda **_: nothing),
            (torch.cuda, "Stream", lambda **_: nothing),
            (torch.cuda, "current_stream", lambda *_: nothing),
            (torch.cuda, "stream", lambda _: nullcontext()),
        ):
            patches.enter_context(mock.patch.object(owner, name, value))
        yield
