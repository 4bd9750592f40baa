"""What the scheduler's half does on the engine's thread does not grow with the prompt."""

from __future__ import annotations

import gc
import sys
import tempfile
import unittest
from types import FrameType, SimpleNamespace

import pytest

from helpers import save_chunk
from scheduling import model_of
from vua.connector.config import ConnectorConfig
from vua.connector.extras import Media
from vua.connector.lookup import Lookup
from vua.connector.metadata import ConnectorMetadata, ScheduledRequest, ScheduledStep
from vua.connector.scheduler import SchedulerSide
from vua.device.buffers import StagingBuffer
from vua.format.layout import KVLayout

CHUNK = 16
MORE = 800 - 40
"""Chunks by which the long prompt is longer."""


class CallsTest(unittest.TestCase):
    @pytest.mark.thorough
    def test_long_prompts(self) -> None:
        """The scheduler's thread does no Python work per chunk: loads and saves cost the same.

        A few calls may differ: a pool starts another thread where its threads are still busy.
        """
        few, many = (self.calls(tokens) for tokens in (40 * CHUNK, 800 * CHUNK))
        self.assertLess(sum(many.values()) - sum(few.values()), MORE // 4, (few, many))
        self.assertGreater(few["matched_tokens"], 0)
        self.assertGreater(few["allocated"] + few["add_saves"], 1)

    def calls(self, tokens: int) -> dict[str, int]:
        """Count the calls of each Python function for a prompt that is stored to its half."""
        layout = KVLayout(1, 1, 8, 8, "U8", CHUNK)
        model = model_of(layout)
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as root:
            config = ConnectorConfig(shared_storage_path=root, chunk_tokens=CHUNK, witness_every=0)
            side = SchedulerSide(model, config, loads=True, saves=True)
            try:
                return self._serve(side, tokens)
            finally:
                side.shutdown()

    def _serve(self, side: SchedulerSide, tokens: int) -> dict[str, int]:
        ids = list(range(tokens))
        request = SimpleNamespace(
            request_id="r", prompt_token_ids=ids, all_token_ids=ids, num_tokens=tokens,
            prompt_embeds=None, lora_request=None, cache_salt=None, mm_features=[],
            kv_transfer_params=None,
        )  # fmt: skip
        store, half = side.namespace.stores[0], tokens // 2
        memory = StagingBuffer(store.layout, store.layout.full, 1).memory
        side.matched_tokens(request, 0)
        state = side.states["r"]
        keys = state.lookup.answer.result(timeout=300).keys  # type: ignore[union-attr]
        for at in range(half // CHUNK):
            save_chunk(store, keys[at], memory)
        state.lookup = Lookup(request, state.options, 0.0, None, Media("", "", 0))
        side.lookups.ask(state.lookup)
        state.lookup.answer.result(timeout=300)
        table = list(range(1, 1 + tokens // CHUNK))
        new = ScheduledRequest("r", half, tokens - half, [table], begins=True)
        called: dict[str, int] = {}

        def count(frame: FrameType, event: str, _: object) -> None:
            if event == "call":
                called[frame.f_code.co_name] = called.get(frame.f_code.co_name, 0) + 1

        orders = ConnectorMetadata()
        blocks = SimpleNamespace(get_block_ids=lambda: (table,))
        gc.collect()
        gc.disable()  # a collection in between would be counted: others have callbacks on it
        sys.setprofile(count)
        try:
            found = side.matched_tokens(request, 0)
            side.allocated(request, blocks, half)
            side.add_saves(orders, ScheduledStep([new], lambda _: [table]))
        finally:
            sys.setprofile(None)
            gc.enable()
        self.assertFalse(orders.idle)
        side.add_saves(idle := ConnectorMetadata(), ScheduledStep([], lambda _: []))
        self.assertTrue(idle.idle)
        self.assertEqual((half, True), found)
        self.assertEqual([half // CHUNK], [len(k) for save in orders.saves for _, k in save.parts])
        return called
