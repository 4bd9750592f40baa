"""What the scheduler's half of the connector is asked, and answers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from vua.connector.step import ScheduledRequest, ScheduledStep
from vua.format.layout import KVLayout

LAYOUT = KVLayout(1, 1, 8, 8, "U8", 16)


def request_of(name: str, **settings: Any) -> Any:
    """A request of 64 tokens, as far as the scheduler's half looks at one."""
    plain: dict[str, Any] = {"prompt_embeds": None, "lora_request": None, "cache_salt": None}
    plain |= {"mm_features": [], "kv_transfer_params": None}
    ids = list(range(64))
    given = {"request_id": name, "prompt_token_ids": ids, "num_tokens": 64} | plain | settings
    return SimpleNamespace(**given)


def step(computed: dict[str, int]) -> ScheduledStep:
    """A step that computes these new requests, all 64 tokens of each."""
    blocks = [[1, 2, 3, 4]]
    requests = [
        ScheduledRequest(name, tokens, 64, blocks, begins=True) for name, tokens in computed.items()
    ]
    return ScheduledStep(requests, lambda _: blocks)


def answer(side: Any, request: Any) -> tuple[int, bool]:
    """Ask about a request, step after step, until there is an answer."""
    while (given := side.matched_tokens(request, 0))[0] is None:
        side.take_loads()
    return given
