"""How many functions and files lie on the ways through VUA, traced while they are gone.

`docs/architecture.md` has the same from inside a vLLM engine (`benchmarks/house.py`).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from helpers import DirectoryTest, keys_of, native_code, noise, save_step
from replay import Cache
from vua.format.identity import Identity
from vua.format.layout import KVLayout
from ways import Tracer, Way

if find_spec("vllm"):
    from vua.connector.cache_spec import Group, Model
    from vua.connector.config import ConnectorConfig
    from vua.connector.group_transfer import Rank
    from vua.connector.metadata import ConnectorMetadata, GroupLoad, LoadOrder, SaveOrder
    from vua.connector.worker import WorkerSide
    from vua.vllm import page_layout

LAYOUT = KVLayout(layers=2, kv_heads=1, k_dim=64, v_dim=64, dtype="F32", chunk_tokens=16)
MOST = {
    ("save", "auto"): (7, 5),  # one more than for a chunk by itself: chunks are written by runs
    ("save", "off"): (9, 6),
    ("load", "auto"): (8, 7),
    # the way through a buffer is a function apart, and where a GPU's differs is another
    ("load", "off"): (15, 9),
    ("eviction", "auto"): (10, 4),  # a sweep, under a lease
}
"""Functions after the one that a hook of the engine calls, and files, with and without native code.

The last of them, in Python, calls the native code or does its work."""

pytestmark = pytest.mark.skipif(sys.version_info < (3, 11), reason="code has no qualified names")


def bytes_read(nbytes: int) -> Callable[[], bool]:
    """Return what tells whether this process has read so many bytes from now on."""
    asked = 0

    def now() -> int:
        nonlocal asked
        asked += 1
        counters = Path("/proc/self/io").read_text(encoding="ascii")
        return int(counters.split()[1]) - 128 * asked  # about what asking itself reads

    begun = now()
    return lambda: now() - begun > nbytes // 2


class WaysTest(DirectoryTest):
    """Each way is as short as it was; a longer one has to say why."""

    def files(self) -> list[Path]:
        return list(self.root.rglob("*.safetensors"))

    def check(self, name: str, native: str, way: Way) -> None:
        """The way is no longer than the table says."""
        functions, files = MOST[name, native]
        text = "\n    ".join([f"{name}, native code {native}:", *way.functions])
        self.assertLessEqual((way.after_hook, len(way.files)), (functions, files), text)
        self.assertLessEqual(len(way.files), files, text)

    @pytest.mark.vllm
    @pytest.mark.skipif(not find_spec("vllm"), reason="vLLM is not installed")
    def test_save(self) -> None:
        """From K and V copied out, when the engine goes on, to a file under its name."""
        for native in ("auto", "off"):
            group = Group(LAYOUT, (0, 1), ((LAYOUT.full,),), (0,))
            model = Model(Identity(model=native, chunk_tokens=16), (group,), (16,))
            config = ConnectorConfig(shared_storage_path=str(self.root), chunk_tokens=16)
            caches = {f"layers.{layer}": noise(4, 1, 16, 128, seed=layer) for layer in range(2)}
            before = len(self.files())
            with native_code(native), Tracer() as tracer:
                side = WorkerSide(model, config, Rank(0, 0))
                self.addCleanup(side.shutdown)
                numbers = {layer: at for at, layer in enumerate(caches)}
                side.register(caches, numbers, dict.fromkeys(caches, 0), page_layout)
                orders = ConnectorMetadata(saves=[SaveOrder([[1]], [(0, keys_of(range(16), 16))])])
                way = tracer.follow(
                    "WriteQueue.hand_over",
                    lambda: len(self.files()) > before,  # noqa: B023
                    lambda: save_step(side, orders),  # noqa: B023
                )
            self.check("save", native, way)

    @pytest.mark.vllm
    @pytest.mark.skipif(not find_spec("vllm"), reason="vLLM is not installed")
    def test_load(self) -> None:
        """From the worker's hook to the bytes of a file in memory, which are still to be judged."""
        layout = KVLayout(layers=2, kv_heads=4, k_dim=64, v_dim=64, dtype="F32", chunk_tokens=64)
        for native in ("auto", "off"):
            group = Group(layout, (0, 1), ((layout.full,),), (0,))
            model = Model(Identity(model=native, chunk_tokens=64), (group,), (64,))
            config = ConnectorConfig(shared_storage_path=str(self.root), chunk_tokens=64)
            caches = {f"layers.{layer}": noise(4, 4, 64, 128, seed=layer) for layer in range(2)}
            keys = keys_of(range(64), 64)
            with native_code(native), Tracer() as tracer:
                side = WorkerSide(model, config, Rank(0, 0))
                self.addCleanup(side.shutdown)
                numbers = {layer: at for at, layer in enumerate(caches)}
                side.register(caches, numbers, dict.fromkeys(caches, 0), page_layout)
                before = len(self.files())
                save_step(side, ConnectorMetadata(saves=[SaveOrder([[1]], [(0, keys)])]))
                while len(self.files()) == before:
                    time.sleep(0.01)
                orders = ConnectorMetadata(
                    loads=[LoadOrder("one", [[2]], [GroupLoad(0, 0, 64, keys)])]
                )
                nbytes = layout.full.payload_nbytes(layout)
                way = tracer.follow(
                    "WorkerSide.start_loads",
                    bytes_read(nbytes),
                    lambda: side.start_loads(orders),  # noqa: B023
                )
                while not side.take_received(idle=True):
                    pass
                self.assertEqual(set(), side.take_failed_blocks())
            for cache in caches.values():
                bits = cache.view(torch.int32)  # noise is not always a number
                self.assertTrue(torch.equal(bits[1], bits[2]))
            self.check("load", native, way)

    def test_eviction(self) -> None:
        """From the thread that evicts to a chunk that is gone."""
        with Tracer() as tracer:
            cache = Cache(self.root, 8)
            for number in range(8):
                cache.request([number])
            stored = self.files()
            way = tracer.follow(
                "Reclaimer._run",
                lambda: not all(path.exists() for path in stored),
                lambda: [cache.request([number]) for number in range(8, 12)],
            )
        self.check("eviction", "auto", way)
