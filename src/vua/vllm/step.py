"""vLLM's ``SchedulerOutput`` as a `vua.connector.step.ScheduledStep`."""

from __future__ import annotations

from typing import Any

from vua.connector.step import ScheduledRequest, ScheduledStep, Tables

__all__ = ["step_of"]


def step_of(output: Any) -> ScheduledStep:  # noqa: ANN401
    """Return what a step computes, from vLLM's ``SchedulerOutput``."""
    tokens, cached = output.num_scheduled_tokens, output.scheduled_cached_reqs
    requests = [
        ScheduledRequest(
            new.req_id, new.num_computed_tokens, tokens[new.req_id], new.block_ids, begins=True
        )
        for new in output.scheduled_new_reqs
    ]
    requests += [
        ScheduledRequest(
            name,
            cached.num_computed_tokens[at],
            tokens[name],
            cached.new_block_ids[at] or (),
            begins=name in cached.resumed_req_ids,
        )
        for at, name in enumerate(cached.req_ids)
    ]

    def tables(name: str) -> Tables:
        state = output.kv_connector_block_state  # since vLLM 0.32; asked of no older one
        return state.get_block_ids(name)

    return ScheduledStep(requests, tables)
