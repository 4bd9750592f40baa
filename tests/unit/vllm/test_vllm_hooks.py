"""What vLLM calls: no error leaves a hook unless a test asks for it; long prompts cost no more."""

from __future__ import annotations

import gc
import sys
import tempfile
import unittest
from collections.abc import Callable
from importlib.util import find_spec
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from helpers import save_chunk
from scheduling import bare_connector
from vua.connector.config import ConnectorConfig
from vua.device.slab import Slab
from vua.errors import ConfigError
from vua.format.identity import Identity
from vua.format.layout import KVLayout

pytestmark = pytest.mark.vllm

if find_spec("vllm"):
    from vllm.v1.outputs import KVConnectorOutput

    from vua.connector.cache_spec import Group, Model
    from vua.connector.metadata import ConnectorMetadata
    from vua.connector.scheduler import SchedulerSide
    from vua.connector.step import ScheduledRequest, ScheduledStep
    from vua.vllm.kv_connector_v1 import VUAStorageConnector_V1

CHUNK = 16


class Broken:
    """A half of the connector in which everything fails, as it never should."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def fail(*args: Any, **kwargs: Any) -> Any:
            raise RuntimeError(name)

        return fail

    epoch = "e"


@unittest.skipUnless(find_spec("vllm"), "vLLM is not installed")
class HooksTest(unittest.TestCase):
    def connector(self, *, strict: bool) -> Any:
        """A connector of which both halves are broken."""
        made = bare_connector("/nowhere", strict=strict)
        made.bind_connector_metadata(ConnectorMetadata(loads=[], saves=[]))
        made.scheduler = made.worker = made.events = Broken()
        return made

    def test_directory_before_the_model(self) -> None:
        """What vLLM asks on GPUs before it loads a model refuses a bad directory."""
        ask = VUAStorageConnector_V1.requires_piecewise_for_cudagraph
        with tempfile.TemporaryDirectory() as name, tempfile.NamedTemporaryFile() as file:
            self.assertFalse(ask({"shared_storage_path": f"{name}/kv"}))
            for path, words in ((file.name, "found a file"), (f"{name}/mnt/kv", "missing too")):
                with self.assertRaisesRegex(ConfigError, words):
                    ask({"shared_storage_path": path})

    def hooks(self, made: Any) -> dict[str, tuple[Callable[[], Any], Any]]:
        """What vLLM calls in steps, with the answer that means "nothing cached"."""
        request, seen = SimpleNamespace(request_id="r"), KVConnectorOutput(invalid_block_ids={1})
        idle = SimpleNamespace(attn_metadata=None)
        return {
            "matched": (lambda: made.get_num_new_matched_tokens(request, 0), (0, False)),
            "allocated": (lambda: made.update_state_after_alloc(request, None, 0), None),
            "meta": (lambda: made.build_connector_meta(None).loads, []),
            "output": (lambda: made.update_connector_output(seen), None),
            "finished": (lambda: made.request_finished(request, []), (False, None)),
            "stats": (made.get_kv_connector_stats, None),
            "events": (lambda: list(made.take_events()), []),
            "reset": (made.reset_cache, False),
            "register": (lambda: made.register_kv_caches({}), None),
            "load": (lambda: made.start_load_kv(idle), None),
            "save": (made.wait_for_save, None),
            "received": (lambda: made.get_finished(set()), (None, set())),
            "errors": (made.get_block_ids_with_load_errors, set()),
        }

    def test_no_error_leaves_a_hook(self) -> None:
        """Whatever breaks is logged, and answered as if nothing were stored."""
        for name, (hook, nothing) in self.hooks(self.connector(strict=False)).items():
            with self.subTest(name), self.assertLogs("vllm.vua", "ERROR"):
                self.assertEqual(nothing, hook())

    def test_strict(self) -> None:
        """With `strict` the same errors stop the engine: tests see them."""
        for name, (hook, _) in self.hooks(self.connector(strict=True)).items():
            with self.subTest(name), self.assertRaises(RuntimeError):
                hook()

    def test_long_prompts(self) -> None:
        """The scheduler's thread does no Python work per chunk: loads and saves cost the same."""
        few, many = (self.calls(tokens) for tokens in (40 * CHUNK, 800 * CHUNK))
        self.assertEqual(few, many)
        self.assertGreater(few["matched_tokens"], 0)
        self.assertGreater(few["allocated"] + few["add_saves"], 1)

    def calls(self, tokens: int) -> dict[str, int]:
        """Python functions called for a prompt of which half is stored: how often each."""
        layout = KVLayout(1, 1, 8, 8, "U8", CHUNK)
        group = Group(layout, (0,), ((layout.full,),), (0,))
        model = Model(Identity(model="m", chunk_tokens=CHUNK), (group,), (CHUNK,), latent=False)
        with tempfile.TemporaryDirectory() as root:
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
        memory = Slab(store.layout, store.layout.full, 1).memory
        side.matched_tokens(request, 0)
        state = side.states["r"]
        keys = state.lookup.answer.result(timeout=30).keys  # type: ignore[union-attr]
        for at in range(half // CHUNK):
            save_chunk(store, keys[at], memory)
        state.lookup = side.lookups.ask(request, state.options)
        state.lookup.answer.result(timeout=30)
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


if __name__ == "__main__":
    unittest.main()
