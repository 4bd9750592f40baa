"""What vLLM calls: no error leaves a hook unless a test asks for it."""

from __future__ import annotations

import unittest
from collections.abc import Callable
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest

from scheduling import bare_connector
from vua.errors import ConfigError

pytestmark = pytest.mark.vllm

if find_spec("vllm"):
    from vllm.v1.outputs import KVConnectorOutput

    from vua.connector.metadata import ConnectorMetadata

CHUNK = 16


class Broken:
    """A half of the connector in which everything fails, as it never should."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def fail(*args: Any, **kwargs: Any) -> Any:
            raise RuntimeError(name)

        return fail

    @property
    def saves(self) -> Broken:
        return self

    epoch = "e"


@unittest.skipUnless(find_spec("vllm"), "vLLM is not installed")
class HooksTest(unittest.TestCase):
    def connector(self, *, strict: bool) -> Any:
        """A connector of which both halves are broken."""
        made = bare_connector("/nowhere", strict=strict)
        made.bind_connector_metadata(ConnectorMetadata(loads=[], saves=[]))
        made.scheduler = made.worker = made.events = Broken()
        return made

    def test_what_vllm_does_not_start(self) -> None:
        """Nobody is promised service of an encoder-decoder model, which vLLM then refuses."""
        with self.assertRaisesRegex(ConfigError, "start it without --kv-transfer-config"):
            bare_connector("/nowhere", encoder_decoder=True)

    def test_passes_that_failed(self) -> None:
        """An error in the pass counts. An error that the caller handles meanwhile does not."""
        computed, made = list[bool](), self.connector(strict=False)
        made.worker = SimpleNamespace(
            mark_loads=lambda _: None,
            start_loads=lambda _: None,
            copy_out=lambda _, **how: computed.append(how["computed"]),
            saves=SimpleNamespace(hand_over=lambda: None),
        )

        def step(*, fails: bool) -> None:
            made.bind_connector_metadata(ConnectorMetadata(loads=[], saves=[]))
            try:
                _ = 1 // (not fails)
            finally:
                made.start_load_kv(None)
                made.wait_for_save()

        step(fails=False)
        with self.assertRaises(ZeroDivisionError):
            step(fails=True)
        try:
            int("")
        except ValueError:
            step(fails=False)
            with self.assertRaises(ZeroDivisionError):
                step(fails=True)
        self.assertEqual([True, False, True, False], computed)

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
        made = self.connector(strict=False)
        for name, (hook, nothing) in self.hooks(made).items():
            with self.subTest(name), self.assertLogs("vllm.vua", "ERROR"):
                self.assertEqual(nothing, hook())
        self.assertTrue(made.build_connector_worker_meta().unable, "its caches are unknown")

    def test_strict(self) -> None:
        """With `strict` the same errors stop the engine: tests see them."""
        for name, (hook, _) in self.hooks(self.connector(strict=True)).items():
            with self.subTest(name), self.assertRaises(RuntimeError):
                hook()
