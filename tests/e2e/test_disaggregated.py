"""Prefill and decode on two servers that share a directory, behind the example's proxy."""

from __future__ import annotations

import os
import subprocess
import sys
import unittest
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import module_from_spec, spec_from_file_location
from typing import Any

import pytest

from e2e.controls import exchange_for_noise
from e2e.damage import stored
from e2e.harness import PROMPT, SOURCE, Batch
from e2e.serving import (
    ServerTest,
    complete,
    free_port,
    kill,
    metric,
    starting,
    transfer,
    wait_until_healthy,
)

pytestmark = [pytest.mark.vllm, pytest.mark.thorough]

PROXY = SOURCE.parent / "examples" / "disaggregated" / "proxy.py"
ROLES = transfer(kv_role="kv_producer"), transfer(kv_role="kv_consumer")


@contextmanager
def proxy(prefill: str, decode: str) -> Iterator[str]:
    port = free_port()
    process = subprocess.Popen(
        [
            *(sys.executable, str(PROXY), "--port", str(port)),
            *("--prefill", prefill, "--decode", decode, "--wait-s", "20"),
        ],
        env=dict(os.environ),
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        address = f"http://127.0.0.1:{port}"
        if not wait_until_healthy(process, address):
            raise AssertionError("no proxy")
        yield address
    finally:
        kill(process)


@unittest.skipUnless(PROXY.exists(), "not in a checkout")
class DisaggregatedTest(ServerTest):
    def test_two_requests(self) -> None:
        """What one computes and stores the other loads, of each prompt; with noise it shows."""
        prompts = [PROMPT, PROMPT[::-1]]
        with starting(self.root, *ROLES, forked=True) as ready:
            expected = self.baseline(Batch(prompts[:1]), Batch(prompts[1:]))
            prefill, decode = ready()
            with proxy(prefill, decode) as address:
                found = [complete(address, prompt) for prompt in prompts]
            for at, prompt in enumerate(prompts, 1):
                exchange_for_noise(self.root, prompt)
                self.assertNotEqual(expected[at - 1], complete(decode, prompt))
            loaded = [metric(one, "vua_loaded_tokens_total") for one in (prefill, decode)]
            saved = metric(decode, "vua_chunks_saved_total")

        self.assertEqual(expected, found)
        self.assertEqual([0, 4 * 640, 0], [*loaded, saved])
        self.assertEqual(20, len(stored(self.root)))


@unittest.skipUnless(PROXY.exists(), "not in a checkout")
class ProxyTest(unittest.TestCase):
    def setUp(self) -> None:
        spec = spec_from_file_location("proxy", PROXY)
        assert spec is not None
        assert spec.loader is not None
        self.proxy: Any = module_from_spec(spec)
        spec.loader.exec_module(self.proxy)

    def test_for_prefill(self) -> None:
        """The prefill is asked for one token, whatever the client wanted of the answer."""
        body = {"prompt": "p", "max_tokens": 9, "stream": True, "stream_options": {}, "n": 2}

        self.assertEqual(
            {"prompt": "p", "max_tokens": 1, "stream": False}, self.proxy.for_prefill(body)
        )

    def test_for_decode(self) -> None:
        """The decode server is told to wait; what the client says itself stays."""
        waits = {"prompt": "p", "kv_transfer_params": {"vua": {"wait_s": 5.0}}}
        self.assertEqual(waits, self.proxy.for_decode({"prompt": "p"}, 5.0))
        given = {"kv_transfer_params": {"x": 1, "vua": {"wait_s": 0, "pin": True}}}
        self.assertEqual(given, self.proxy.for_decode(given, 5.0))
