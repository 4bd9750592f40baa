"""Pages of SGLang's host pools and chunks: by way of pools of SGLang's shapes, without SGLang."""

from __future__ import annotations

import errno
import threading
import unittest
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from helpers import DirectoryTest
from vua.capacity.limits import Limits
from vua.connector.cache_spec import UncachedError
from vua.connector.config import ConnectorConfig, Timeouts
from vua.connector.metrics import Recorder
from vua.errors import InputError
from vua.format.identity import Identity
from vua.format.keys import KeyChain, token_ids
from vua.format.layout import KVLayout
from vua.sglang.session import chunk_keys
from vua.sglang.transfers import HostPages, Transfers
from vua.storage.base import Batch, ReadResult, Storage, WriteResult
from vua.store.namespace import Namespace
from vua.testing import FaultyStorage

PAGE, PAGES, LAYERS, HEADS, DIM = 16, 6, 3, 4, 8
LAYOUT = KVLayout(
    layers=LAYERS, kv_heads=HEADS, k_dim=DIM, v_dim=DIM, dtype="F32", chunk_tokens=PAGE
)
"""As all tests here have it."""


def slots(pages: int = PAGES) -> torch.Tensor:
    """The token slots of a pool's first pages."""
    return torch.arange(pages * PAGE)


def pool(layout: str = "page_first") -> Any:
    """A host pool with SGLang's tensors of one layout, all elements different."""
    buffer = torch.arange(2 * PAGE * PAGES * LAYERS * HEADS * DIM, dtype=torch.float32)
    buffer = buffer.view(2, PAGE * PAGES, LAYERS, HEADS, DIM)
    return SimpleNamespace(
        layout=layout,
        page_size=PAGE,
        page_num=PAGES,
        kv_buffer=buffer,
        k_buffer=buffer[0],
        v_buffer=buffer[1],
    )


class HostPagesTest(unittest.TestCase):
    def test_unknown_layout(self) -> None:
        """A layout that is not known is refused with its name and those that are."""
        with self.assertRaisesRegex(UncachedError, "page_first_kv_split.*page_head"):
            HostPages(pool("page_first_kv_split"), latent=False)

    def test_slots(self) -> None:
        """Only slots that are whole pages of the pool name pages."""
        pages = HostPages(pool(), latent=False)
        slots = torch.tensor([3, 1])[:, None] * PAGE + torch.arange(PAGE)
        self.assertEqual([3, 1], pages.numbers(slots.flatten(), 2).tolist())
        for wrong in (slots.flatten()[1:], slots.flatten() + 1, slots.flatten() + PAGES * PAGE):
            with self.assertRaises(InputError):
                pages.numbers(wrong, 2)


class PageKeysTest(unittest.TestCase):
    def test_same_as_a_prompt(self) -> None:
        """Keys made of hashes are those made of tokens, wherever the hashes are cut."""
        chain = KeyChain(token_ids(range(5 * PAGE)), PAGE)
        names = [chain[at].name for at in range(5)]
        for cut in range(5):
            self.assertEqual(chain.first(5), [*chunk_keys(names[:cut], names[cut:], PAGE)])


class Hanging(FaultyStorage):
    """A storage that hangs until it is let go."""

    def __init__(self, inner: Storage) -> None:
        super().__init__(inner, {})
        self.go = threading.Event()
        self.hangs = False
        self._before = set[threading.Thread]()

    def hang(self) -> None:
        self.hangs, self._before = True, {*threading.enumerate()}

    def let_go(self, moves: Transfers) -> None:
        """Let it go, and end what moves, with the threads that it has given up."""
        waiting = {*threading.enumerate()} - self._before
        self.go.set()
        moves.close()
        for thread in waiting:
            thread.join(60)

    def write(self, batch: Batch) -> WriteResult:
        if self.hangs:
            self.go.wait()
        return super().write(batch)

    def read(self, batch: Batch) -> ReadResult:
        if self.hangs:
            self.go.wait()
        return super().read(batch)


class TransfersTest(DirectoryTest):
    def setUp(self) -> None:
        """A namespace, and the keys of a prompt as long as a pool."""
        super().setUp()
        self.namespace = Namespace.create(
            self.root, Identity(model="test", chunk_tokens=PAGE), [LAYOUT]
        )
        self.addCleanup(self.namespace.close)
        self.keys = KeyChain(token_ids(range(PAGES * PAGE)), PAGE).first(PAGES)
        self.stats = Recorder()

    def transfers(self, one: Any, io_s: float = 60.0, *, proven: bool = True) -> Transfers:
        """What moves K and V between a pool and the namespace; whether the weights stay."""
        config = ConnectorConfig(shared_storage_path=str(self.root), timeouts=Timeouts(io_s=io_s))
        moving = self.namespace.stores[0], LAYOUT.full, HostPages(one, latent=False), config
        made = Transfers(*moving, self.stats, proof=lambda: lambda: proven)
        self.addCleanup(made.close)
        return made

    def files_of(self, at: int) -> list[Path]:
        """The files of a chunk of the prompt."""
        return [file for file in self.files() if self.keys[at].name in file.parts]

    def test_damage(self) -> None:
        """A damaged chunk ends the load before it, and it and what else is damaged goes away."""
        source, target = pool(), pool()
        self.transfers(source).save(self.keys, slots())
        for at in (2, 4):
            (file,) = self.files_of(at)
            data = bytearray(file.read_bytes())
            data[-5] ^= 1
            file.write_bytes(data)
        target.kv_buffer[:] = -1
        loads = self.transfers(target)
        self.assertEqual(2, loads.load(self.keys, slots()))
        self.assertTrue(
            torch.equal(source.kv_buffer[:, : 2 * PAGE], target.kv_buffer[:, : 2 * PAGE])
        )
        self.assertTrue((target.k_buffer[2 * PAGE :] == -1).all())
        loads.close()  # waits for the threads
        self.assertEqual([[], []], [self.files_of(at) for at in (2, 4)])

    def test_changed_weights(self) -> None:
        """What was read when the weights changed stays out of the pool; nothing is stored."""
        self.transfers(pool()).save(self.keys[:2], slots(2))
        target = pool()
        target.kv_buffer[:] = -1
        moves = self.transfers(target, proven=False)
        self.assertEqual(0, moves.load(self.keys[:2], slots(2)))
        self.assertTrue((target.kv_buffer == -1).all())
        moves.save(self.keys, slots())
        self.assertEqual(2, len(self.files()))

    def test_hanging_storage(self) -> None:
        """A load and a save that hang are given up; their threads never touch the pool again."""
        self.transfers(pool()).save(self.keys[:3], slots(3))
        store = self.namespace.stores[0]
        storage = Hanging(store.storage)
        store.storage = storage
        self.addCleanup(storage.go.set)
        target = pool()
        target.kv_buffer[:] = -1
        moves = self.transfers(target, io_s=0.2)
        storage.hang()
        self.assertEqual(0, moves.load(self.keys[:3], slots(3)))
        moves.save(self.keys, slots())
        storage.let_go(moves)
        self.assertTrue((target.kv_buffer == -1).all())
        found = self.stats.take() or {}
        self.assertEqual(1, found["vua_load_stops_total"]["timeout"])
        self.assertLess(0, found["vua_chunks_saved_total"]["timeout"])

    def test_pages_of_another_request(self) -> None:
        """A save that was given up takes nothing more out of the pool: its pages are others'."""
        store, source = self.namespace.stores[0], pool()
        storage = store.storage = Hanging(store.storage)
        self.addCleanup(storage.go.set)
        moves = self.transfers(source, io_s=0.2)
        moves.chunks = 1
        storage.hang()
        moves.save(self.keys, slots())
        source.kv_buffer[:] = -1  # another request's
        storage.let_go(moves)
        target = pool()
        self.assertEqual(1, self.transfers(target).load(self.keys, slots()))
        self.assertTrue(torch.equal(pool().kv_buffer, target.kv_buffer))

    def test_counts(self) -> None:
        """What is present is counted as that, also if what follows it cannot be written."""
        self.transfers(pool()).save(self.keys[:2], slots(2))
        store = self.namespace.stores[0]
        store.storage = FaultyStorage(store.storage, {"write": OSError(errno.EIO, "broken")})
        self.transfers(pool()).save(self.keys, slots())
        counts = {"written": 2, "present": 2, "error": PAGES - 2}
        self.assertEqual(counts, dict((self.stats.take() or {})["vua_chunks_saved_total"]))

    def test_no_room(self) -> None:
        """What has no room is refused, and what stands before it stays."""
        self.namespace.close()
        self.namespace = Namespace.create(
            self.root,
            Identity(model="test", chunk_tokens=PAGE),
            [LAYOUT],
            bounds=Limits(max_bytes=LAYOUT.full.payload_nbytes(LAYOUT) // 2),
        )
        self.transfers(pool()).save(self.keys, slots())
        found = self.stats.take() or {}
        self.assertEqual(PAGES, found["vua_chunks_saved_total"]["refused"])
        self.assertEqual([], self.files())
