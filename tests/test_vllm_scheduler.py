"""The scheduler's half of the vLLM connector, without an engine around it."""

from __future__ import annotations

import tempfile
import unittest
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest

from vua.identity import Identity
from vua.layout import KVLayout
from vua.vllm.config import ConnectorConfig

pytestmark = pytest.mark.vllm

LAYOUT = KVLayout(1, 1, 8, 8, "U8", 16)


def request_of(name: str, **settings: Any) -> Any:
    """A request of 64 tokens, as far as the scheduler's half looks at one."""
    plain = {"prompt_embeds": None, "lora_request": None, "cache_salt": None, "mm_features": []}
    ids = list(range(64))
    given = {"request_id": name, "prompt_token_ids": ids, "num_tokens": 64} | plain | settings
    return SimpleNamespace(**given)


def step(computed: dict[str, int]) -> Any:
    """What vLLM schedules: these new requests, all 64 tokens of each."""
    new = [
        SimpleNamespace(req_id=name, block_ids=([1, 2, 3, 4],), num_computed_tokens=tokens)
        for name, tokens in computed.items()
    ]
    cached = SimpleNamespace(req_ids=[], resumed_req_ids=set())
    return SimpleNamespace(
        scheduled_new_reqs=new,
        scheduled_cached_reqs=cached,
        num_scheduled_tokens=dict.fromkeys(computed, 64),
    )


@unittest.skipUnless(find_spec("vllm"), "vLLM is not installed")
class SchedulerTest(unittest.TestCase):
    def test_a_request_that_cannot_be_named_costs_no_other_one(self) -> None:
        """Whatever breaks while one prompt is named, it is a miss and other prompts are stored."""
        from vua.vllm.messages import Orders
        from vua.vllm.model import Model
        from vua.vllm.scheduler import SchedulerSide

        model = Model(
            Identity(model="m", chunk_tokens=16), LAYOUT, 16, latent=False, shards=((LAYOUT.full,),)
        )
        with tempfile.TemporaryDirectory() as root:
            config = ConnectorConfig(shared_storage_path=root, chunk_tokens=16)
            side = SchedulerSide(model, config, loads=True, saves=True)
            self.addCleanup(side.shutdown)
            broken, good = request_of("broken", cache_salt="\ud800"), request_of("good")
            with self.assertLogs("vllm.vua.scheduler", "ERROR"):
                for one in (broken, good):
                    while (answer := side.matched_tokens(one, 0))[0] is None:
                        side.take_loads()
                    self.assertEqual((0, False), answer)

            orders = Orders(loads=side.take_loads())
            side.add_saves(orders, step({"broken": 0, "good": 0}))

        self.assertEqual([4], [len(save.keys) for save in orders.saves])

    def test_no_store(self) -> None:
        """A request that asks not to be stored is not; others are."""
        from vua.vllm.messages import Orders
        from vua.vllm.model import Model
        from vua.vllm.scheduler import SchedulerSide

        model = Model(
            Identity(model="m", chunk_tokens=16), LAYOUT, 16, latent=False, shards=((LAYOUT.full,),)
        )
        with tempfile.TemporaryDirectory() as root:
            config = ConnectorConfig(shared_storage_path=root, chunk_tokens=16)
            side = SchedulerSide(model, config, loads=True, saves=True)
            self.addCleanup(side.shutdown)
            for value, saved in ((True, []), (False, [4])):
                name = f"store {not value}"
                request = request_of(name, kv_transfer_params={"vua_no_store": value})
                while side.matched_tokens(request, 0)[0] is None:
                    side.take_loads()
                orders = Orders(loads=side.take_loads())
                side.add_saves(orders, step({name: 0}))
                with self.subTest(value=value):
                    self.assertEqual(saved, [len(save.keys) for save in orders.saves])
