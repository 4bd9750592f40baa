"""vLLM behind a real LMCache server, with VUA as its L2 tier: restarts and damage.

`dev.py lmcache` installs LMCache and runs this. Engine and server are processes of their own, and
both are new each time: what a server has, it has from its L2 tier.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
import unittest
import uuid
from importlib import util
from pathlib import Path
from typing import Any

import pytest

from e2e.checkpoints import copied, scaled
from e2e.harness import PROMPT, SOURCE, Batch, EngineTest, Phase, Served, llama, run
from e2e.serving import free_port
from e2e.sglang_server import wait_until
from forks import Program
from helpers import flip
from vua.capacity.upkeep import saved_at

CHUNK = 64
WHOLE = (len(PROMPT) - 1) // CHUNK * CHUNK
os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
os.environ.setdefault("LMCACHE_MP_TRANSFER_MODE", "engine_driven")


def specification(root: Path) -> dict[str, Any]:
    """The specification of VUA's L2 adapter, as docs/lmcache.md has it."""
    return {
        "type": "plugin",
        "module_path": "vua.lmcache.l2_adapter",
        "class_name": "VUAL2Adapter",
        "adapter_params": {"path": str(root), "plain_engines": True},
    }


class Server(Program):
    """One LMCache server, from its start to its end."""

    def __init__(self, adapter: dict[str, Any]) -> None:
        """Start it and wait until it takes connections."""
        self.port, other = free_port(), free_port()
        paths = [str(SOURCE), *filter(None, [os.environ.get("PYTHONPATH")])]
        command = [
            *(sys.executable, "-m", "lmcache.cli.main", "server", "--host", "localhost"),
            *("--port", str(self.port), "--http-port", str(other), "--l1-size-gb", "0.25"),
            *("--chunk-size", str(CHUNK), "--eviction-policy", "LRU"),
            "--disable-observability",
            *("--supported-transfer-mode", "engine_driven"),
            *("--shm-name", f"vua-test-{uuid.uuid4().hex}"),
            *("--l2-adapter", json.dumps(adapter)),
        ]
        super().__init__(command, {**os.environ, "PYTHONPATH": os.pathsep.join(paths)})
        self.until(self._answers)

    def _answers(self) -> bool:
        with socket.socket() as asked:
            return asked.connect_ex(("127.0.0.1", self.port)) == 0


@unittest.skipUnless(util.find_spec("lmcache"), "LMCache is not here; `dev.py lmcache` has it")
@pytest.mark.thorough
class LMCacheServerTest(EngineTest):
    def ask(self, server: Server, **engine: Any) -> Served:
        """Give the prompt to a fresh engine that has only the server."""
        transfer = {
            "kv_connector": "LMCacheMPConnector",
            "kv_connector_module_path": "e2e.lmcache_connector",
            "kv_load_failure_policy": None,
            "kv_connector_extra_config": {
                "lmcache.mp.host": "tcp://localhost",
                "lmcache.mp.port": server.port,
                "lmcache.mp.heartbeat_interval": 30.0,  # also the patience with its answer
            },
        }
        (served,) = run(self.phase(Batch([PROMPT]), transfer=transfer, engine=engine))
        self.assertIsNone(served.problem, served.log[-6000:])
        return served

    def loaded(self) -> int:
        """The tokens that all servers have told of."""
        return sum(one.loaded_tokens for one in saved_at(self.root).values())

    def files(self) -> list[Path]:
        return sorted(self.root.glob("*/*/*/*.safetensors"))

    def test_restart_and_damage(self) -> None:
        """What one server stored another one finds; after damage there is less, never garbage."""
        (plain,) = run(Phase((Batch([PROMPT]),)))
        adapter = specification(self.root)
        with Server(adapter) as server:
            cold = self.ask(server)
            wait_until("all chunks", lambda: len(self.files()) == WHOLE // CHUNK)
        with Server(adapter) as server:
            warm = self.ask(server)
            wait_until("what was loaded is told", lambda: self.loaded() == WHOLE)
        for path in self.files():
            flip(path, path.stat().st_size // 2)
        with Server(adapter) as server:
            damaged = self.ask(server)

        self.assertEqual([0], cold.cached)
        self.assertEqual([WHOLE], warm.cached)
        self.assertEqual([0], damaged.cached)
        self.assertEqual([plain.tokens] * 3, [cold.tokens, warm.tokens, damaged.tokens])

    def test_another_checkpoint(self) -> None:
        """Behind a new server another checkpoint at the same path finds nothing of the old one."""
        model = copied(llama(), self.root.parent / f"{self.root.name}-model")
        self.addCleanup(shutil.rmtree, model)
        adapter, seen = specification(self.root), []
        for name in (None, None, "layers.0.mlp.up_proj.weight"):
            if name is not None:
                scaled(llama(), model, name)
            (plain,) = run(Phase((Batch([PROMPT]),), engine={"model": str(model)}))
            before = len(self.files())
            with Server(adapter) as server:
                served = self.ask(server, model=str(model))
                expected = before + (0 if served.cached == [WHOLE] else WHOLE // CHUNK)
                wait_until("all chunks", lambda: len(self.files()) == expected)  # noqa: B023
            self.assertEqual(plain.tokens, served.tokens)
            seen.append(served.cached)

        self.assertEqual([[0], [WHOLE], [0]], seen)
