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
from vua.sglang.settings import chunk_keys
from vua.sglang.transfers import HostPages, Transfers
from vua.storage.base import Batch, ReadResult, Storage, WriteResult
from vua.store.namespace import Namespace
from vua.testing.faulty import FaultyStorage

PAGE, PAGES, LAYERS, HEADS, DIM = 16, 6, 3, 4, 8
LAYOUT = KVLayout(
    layers=LAYERS, kv_heads=HEADS, k_dim=DIM, v_dim=DIM, dtype="F32", chunk_tokens=PAGE
)
"""As all tests here have it."""


def always() -> bool:
    return True


def pool(layout: str, *, latent: bool = False) -> Any:
    """A host pool with SGLang's tensors for one of its layouts, all elements different."""
    tokens, rows = PAGE * PAGES, (1 if latent else HEADS, DIM)
    dims: dict[str, tuple[int, ...]] = {
        "layer_first": (LAYERS, tokens, *rows),
        "page_first": (tokens, LAYERS, *rows),
        "page_first_direct": (PAGES, LAYERS, PAGE, *rows),
        "page_head": (PAGES, HEADS, PAGE, LAYERS, DIM),
    }
    shape = dims[layout]
    arrays = 1 if latent else 2
    buffer = torch.arange(arrays * PAGES * PAGE * LAYERS * rows[0] * DIM, dtype=torch.float32)
    buffer = buffer.view(arrays, *shape)
    return SimpleNamespace(
        layout=layout,
        page_size=PAGE,
        page_num=PAGES,
        kv_buffer=buffer[0] if latent else buffer,
        k_buffer=buffer[0],
        v_buffer=buffer[-1],
    )


def element(one: Any, array: int, layer: int, token: int, head: int) -> torch.Tensor:
    """A row of a pool, by the indices that SGLang's own code uses."""
    buffer = (one.k_buffer, one.v_buffer)[array]
    page, slot = divmod(token, PAGE)
    at: dict[str, tuple[int, ...]] = {
        "layer_first": (layer, token, head),
        "page_first": (token, layer, head),
        "page_first_direct": (page, layer, slot, head),
        "page_head": (page, head, slot, layer),
    }
    return buffer[at[one.layout]]


class HostPagesTest(unittest.TestCase):
    def test_each_layout(self) -> None:
        """A page is gathered row by row as SGLang keeps it, and scattered to the same places."""
        for layout in ("layer_first", "page_first", "page_first_direct", "page_head"):
            with self.subTest(layout):
                one = pool(layout)
                pages = HostPages(one, latent=False)
                arrays = [torch.zeros(HEADS, LAYERS, PAGE, DIM) for _ in range(2)]
                pages.gather(4, arrays)
                for array in range(2):
                    for layer, slot, head in ((0, 0, 0), (2, 15, 3), (1, 7, 2)):
                        row = element(one, array, layer, 4 * PAGE + slot, head)
                        self.assertTrue(torch.equal(row, arrays[array][head, layer, slot]))
                before = one.kv_buffer.clone()
                one.kv_buffer[:] = -1
                pages.scatter([4], [array[None] for array in arrays])
                same = one.kv_buffer == before
                self.assertEqual(same.sum().item(), one.kv_buffer.numel() // PAGES)
                self.assertTrue((one.kv_buffer[~same] == -1).all())

    def test_latent(self) -> None:
        """One latent per token is one array without heads of its own."""
        for layout in ("layer_first", "page_first", "page_first_direct"):
            with self.subTest(layout):
                one = pool(layout, latent=True)
                array = torch.zeros(1, LAYERS, PAGE, DIM)
                HostPages(one, latent=True).gather(2, [array])
                row = element(one, 0, 1, 2 * PAGE + 5, 0)
                self.assertTrue(torch.equal(row, array[0, 1, 5]))

    def test_unknown_layout(self) -> None:
        """A layout that is not known is refused with its name and those that are."""
        one = pool("page_first")
        one.layout = "page_first_kv_split"
        with self.assertRaisesRegex(UncachedError, "page_first_kv_split.*page_head"):
            HostPages(one, latent=False)

    def test_slots(self) -> None:
        """Only slots that are whole pages of the pool name pages."""
        pages = HostPages(pool("page_first"), latent=False)
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

    def transfers(self, one: Any, io_s: float = 60.0) -> Transfers:
        """What moves K and V between a pool and the namespace."""
        config = ConnectorConfig(shared_storage_path=str(self.root), timeouts=Timeouts(io_s=io_s))
        pages = HostPages(one, latent=False)
        made = Transfers(self.namespace.stores[0], LAYOUT.full, pages, config, self.stats)
        self.addCleanup(made.close)
        return made

    def files_of(self, at: int) -> list[Path]:
        """The files of a chunk of the prompt."""
        return [file for file in self.files() if self.keys[at].name in file.parts]

    def test_damage(self) -> None:
        """A damaged chunk ends the load before it, and it and what else is damaged goes away."""
        source, target = pool("page_first"), pool("page_first")
        self.transfers(source).save(self.keys, range(PAGES), always)
        for at in (2, 4):
            (file,) = self.files_of(at)
            data = bytearray(file.read_bytes())
            data[-5] ^= 1
            file.write_bytes(data)
        target.kv_buffer[:] = -1
        loads = self.transfers(target)
        self.assertEqual(2, loads.load(self.keys, range(PAGES), always))
        self.assertTrue(
            torch.equal(source.kv_buffer[:, : 2 * PAGE], target.kv_buffer[:, : 2 * PAGE])
        )
        self.assertTrue((target.k_buffer[2 * PAGE :] == -1).all())
        loads.close()  # waits for the threads
        self.assertEqual([[], []], [self.files_of(at) for at in (2, 4)])

    def test_changed_weights(self) -> None:
        """What was read when the weights changed stays out of the pool; nothing is stored."""
        self.transfers(pool("page_first")).save(self.keys[:2], range(2), always)
        target = pool("page_first")
        target.kv_buffer[:] = -1
        moves = self.transfers(target)
        self.assertEqual(0, moves.load(self.keys[:2], range(2), lambda: False))
        self.assertTrue((target.kv_buffer == -1).all())
        moves.save(self.keys, range(PAGES), lambda: False)
        self.assertEqual(2, len(self.files()))

    def test_hanging_storage(self) -> None:
        """A load and a save that hang are given up; their threads never touch the pool again."""
        self.transfers(pool("page_first")).save(self.keys[:3], range(3), always)
        store = self.namespace.stores[0]
        storage = Hanging(store.storage)
        store.storage = storage
        self.addCleanup(storage.go.set)
        target = pool("page_first")
        target.kv_buffer[:] = -1
        moves = self.transfers(target, io_s=0.2)
        storage.hangs = True
        self.assertEqual(0, moves.load(self.keys[:3], range(3), always))
        moves.save(self.keys, range(PAGES), always)
        storage.go.set()
        moves.close()
        self.assertTrue((target.kv_buffer == -1).all())
        found = self.stats.take() or {}
        self.assertEqual(1, found["vua_load_stops_total"]["timeout"])
        self.assertLess(0, found["vua_chunks_saved_total"]["timeout"])

    def test_counts(self) -> None:
        """What is present is counted as that, also if what follows it cannot be written."""
        self.transfers(pool("page_first")).save(self.keys[:2], range(2), always)
        store = self.namespace.stores[0]
        store.storage = FaultyStorage(store.storage, {"write": OSError(errno.EIO, "broken")})
        self.transfers(pool("page_first")).save(self.keys, range(PAGES), always)
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
        self.transfers(pool("page_first")).save(self.keys, range(PAGES), always)
        found = self.stats.take() or {}
        self.assertEqual(PAGES, found["vua_chunks_saved_total"]["refused"])
        self.assertEqual([], self.files())
