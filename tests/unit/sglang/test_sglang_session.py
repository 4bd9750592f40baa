"""SGLang's pages, settings and choices, and pages of other setups: without SGLang."""

from __future__ import annotations

import errno
import random
import tempfile
import threading
import unittest
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from helpers import SOON_S, DirectoryTest
from sglang_case import transfers_of
from vua.capacity.limits import Limits
from vua.capacity.upkeep import parted_at
from vua.connector.cache_spec import Group, Model, UncachedError
from vua.connector.config import ConnectorConfig, Timeouts
from vua.connector.metrics import Recorder
from vua.connector.opening import OpenedNamespace
from vua.connector.proved import written
from vua.errors import ConfigError, InputError
from vua.format.identity import Identity
from vua.format.keys import ChunkKey, KeyChain, KeyRun, token_ids
from vua.format.layout import KVLayout, Shard
from vua.security.settings import Security
from vua.sglang.session import Part, Pools, Reuse, Session, chunk_keys, settings_of
from vua.sglang.transfers import HostPages, Transfers
from vua.storage.base import Batch, ReadResult, Storage, WriteResult
from vua.storage.mark import make_mark
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


def pool(layout: str = "page_first", layers: int = LAYERS, heads: int = HEADS) -> Any:
    """A host pool with SGLang's tensors of one layout, all elements different."""
    buffer = torch.arange(2 * PAGE * PAGES * layers * heads * DIM, dtype=torch.float32)
    buffer = buffer.view(2, PAGE * PAGES, layers, heads, DIM)
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
        with self.assertRaisesRegex(UncachedError, "page_first_kv_split.*page_first_direct"):
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
        pages = HostPages(one, latent=False)
        made = transfers_of(
            *(self.root, self.namespace, LAYOUT.full, pages, self.stats), io_s=io_s, proven=proven
        )
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


CHUNK = 64
LONGER = replace(LAYOUT, chunk_tokens=CHUNK)
MODEL = Model(
    Identity(model="test"), (Group(LONGER, (0, 1, 2), ((LONGER.full,),), (0,)),), (CHUNK,)
)


def keys_of_chunks(seed: int, chunks: int) -> list[ChunkKey]:
    """The keys of a prompt of its own."""
    return KeyChain(token_ids([seed] * chunks * CHUNK), CHUNK).first(chunks)


class ReuseTest(unittest.TestCase):
    def setUp(self) -> None:
        """A clock that stands still unless it is moved."""
        self.now = 100.0
        config = ConnectorConfig(shared_storage_path="/nowhere")
        self.reuse = Reuse(MODEL, config, Recorder(), clock=lambda: self.now)

    def compute(self, seed: int, chunks: int, seconds: float) -> None:
        """A prompt that is not stored is computed and comes to be stored."""
        asked = keys_of_chunks(seed, chunks)
        self.assertEqual(0, self.reuse.decide(asked, 0))
        self.now += seconds
        self.reuse.computed(asked)

    def load(self, seed: int, chunks: int, seconds: float) -> None:
        asked = keys_of_chunks(seed, chunks)
        ended = self.reuse.loading(asked)
        self.now += seconds
        ended(chunks)

    def test_slow_loads(self) -> None:
        """Where loads take longer than computing they are left out; where not they are made."""
        for loads_s, expected in ((10.0, 0), (0.01, 16)):
            with self.subTest(loads_s):
                self.setUp()
                for seed in range(4):
                    self.compute(seed, 16, 1.0)
                    self.load(10 + seed, 16, loads_s)
                self.assertEqual(expected, self.reuse.decide(keys_of_chunks(20, 16), 16))

    def test_unmeasured(self) -> None:
        """Before anything is measured what is stored is loaded."""
        self.assertEqual(16, self.reuse.decide(keys_of_chunks(1, 16), 16))

    def test_waiting_counts_once(self) -> None:
        """Prompts that wait for each other count from the end of the one before."""
        prompts = [keys_of_chunks(seed, 16) for seed in range(4)]
        for asked in prompts:
            self.reuse.decide(asked, 0)
        for asked in prompts:  # the last one has waited four seconds, and took one
            self.now += 1.0
            self.reuse.computed(asked)
        for seed in range(4):
            self.load(10 + seed, 16, 2.0)
        self.assertEqual(0, self.reuse.decide(keys_of_chunks(20, 16), 16))

    def test_where_prompts_part(self) -> None:
        """Also of prompts that SGLang asks for in several calls, or holds the beginning of."""
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as root:
            make_mark(Path(root))
            self.reuse.savings.keep_at(Path(root), "", Security())
            long = keys_of_chunks(1, 300)
            for asked, found in (
                (long[:128], 128), (long[128:256], 128), (long[256:], 10),
                (keys_of_chunks(2, 128), 128),  # and no more of it
                (keys_of_chunks(4, 7), 7),
                (keys_of_chunks(5, 7), 0),
                (keys_of_chunks(6, 60)[20:], 0),  # 1280 tokens are in memory
            ):  # fmt: skip
                self.reuse.decide(asked, found)
            self.reuse.savings.close()
            ((_, noted),) = parted_at(Path(root)).items()
        ends = {"32768": 1, "whole": 2, "64": 1, "2048": 1}
        self.assertEqual({MODEL.identity.namespace: ends}, noted)


class SettingsTest(unittest.TestCase):
    def test_sglang_keys(self) -> None:
        """SGLang's own keys are passed over, VUA's are read, and the rest is refused by name."""
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as root:
            extra = {
                "backend_name": "vua",
                "module_path": "vua.sglang.storage",
                "class_name": "VUAHiCacheStorage",
                "interface_v1": 1,
                "shared_storage_path": root,
                "limits": {"max_bytes": "1G"},
            }
            self.assertEqual("1G", settings_of(extra).limits.max_bytes)
            refused = (
                ({"chunk_token": 64}, "extra-config has no key 'chunk_token'.*'chunk_tokens'"),
                ({"interface_v1": 0}, "interface_v1"),
                ({"security": {"key_file": "/key"}}, "keys cannot be used with SGLang"),
                ({"gds_mode": "required"}, "through host memory"),
            )
            for wrong, text in refused:
                with self.subTest(text), self.assertRaisesRegex(ConfigError, text):
                    settings_of(extra | wrong)


OF_TWO = KVLayout(layers=2, kv_heads=2, k_dim=DIM, v_dim=DIM, dtype="F32", chunk_tokens=PAGE)


class Rank:
    """One rank of a server that computes K and V of tokens times a factor."""

    def __init__(
        self, test: ComparisonsTest, setup: str, shard: Shard, factor: float, every: int
    ) -> None:
        group = Group(OF_TWO, (0, 1), ((shard,),), (0,))
        model = Model(Identity(model="test", chunk_tokens=PAGE), (group,), (PAGE,))
        namespace = Namespace.create(test.root, model.identity, [OF_TWO])
        config = ConnectorConfig(
            shared_storage_path=str(test.root),
            witness_every=every,
            timeouts=Timeouts(lookup_s=SOON_S),  # on a busy machine
        )
        self.factor = factor
        layers = shard.layer_stop - shard.layer_start
        self.pool = pool(layers=layers, heads=shard.head_stop - shard.head_start)
        part = Part(group, HostPages(self.pool, latent=False), writes=True)
        pools = Pools({"kv": part}, model, setup * 64)
        opened = OpenedNamespace(model, namespace)
        self.session = Session(*(pools, opened, config, Recorder(), 1), proof=lambda: lambda: True)
        test.addCleanup(self.session.close)

    def serve(self, keys: KeyRun, seed: int, loaded: int) -> int:
        """Load so many pages, compute and store the rest; how many were loaded."""
        self.pool.kv_buffer[:] = -1.0
        if loaded:
            loaded = self.session.load("kv", keys[:loaded], slots(loaded))
        tokens = torch.arange(PAGES * PAGE) + 1000.0 * seed
        right = (torch.sin(tokens) * self.factor)[None, :, None, None, None]
        right = right.expand(self.pool.kv_buffer.shape)
        self.right = torch.equal(self.pool.kv_buffer[:, : loaded * PAGE], right[:, : loaded * PAGE])
        self.pool.kv_buffer[:] = right
        if loaded < PAGES:
            self.session.save("kv", keys[loaded:], slots()[loaded * PAGE :])
        written()
        return loaded


class Server:
    """All ranks of a server, each with its part of K and V."""

    def __init__(
        self,
        test: ComparisonsTest,
        setup: str,
        factor: float = 1.0,
        *,
        every: int = 1000,
        tp: int = 1,
        pp: int = 1,
    ) -> None:
        """``factor``: of what the last rank computes."""
        layers, heads = OF_TWO.layers // pp, OF_TWO.kv_heads // tp
        shards = [
            Shard(at * layers, (at + 1) * layers, rank * heads, (rank + 1) * heads)
            for at in range(pp)
            for rank in range(tp)
        ]
        factors = [1.0] * (tp * pp - 1) + [factor]
        self.ranks = [
            Rank(test, setup, shard, one, every) for shard, one in zip(shards, factors, strict=True)
        ]

    def ask(self, seed: int) -> int:
        """Serve a prompt: what all ranks may load they do; pages loaded."""
        chain = KeyChain(token_ids(range(1000 * seed, 1000 * seed + PAGES * PAGE)), PAGE)
        keys = chunk_keys([], [chain[at].name for at in range(PAGES)], PAGE)
        loaded = min(rank.session.find(keys, 0) for rank in self.ranks)
        return min(rank.serve(keys, seed, loaded) for rank in self.ranks)


class ComparisonsTest(DirectoryTest):
    def test_own_setup(self) -> None:
        """What a server of this setup stored is loaded from the first request on."""
        self.assertEqual(0, Server(self, "a").ask(1))
        self.assertEqual(PAGES, Server(self, "a").ask(1))

    def test_another_setup(self) -> None:
        """Another's is loaded after one comparison, which all servers of the setup inherit."""
        writer = Server(self, "a")
        for seed in (1, 2, 3):
            writer.ask(seed)
        reader = Server(self, "b")
        self.assertEqual([0, PAGES], [reader.ask(seed) for seed in (1, 2)])
        self.assertEqual(PAGES, Server(self, "b").ask(3))
        self.assertEqual(0, Server(self, "c").ask(3))

    def test_another_computation(self) -> None:
        """A writer that differs is refused, with one line; what others stored is loaded."""
        wrong, right = Server(self, "a", 2.0), Server(self, "b")
        for seed in (1, 2):
            wrong.ask(seed)
        right.ask(3)
        reader = Server(self, "b")
        with self.assertLogs("vllm.vua", "ERROR") as log:
            self.assertEqual([0, 0, 0, PAGES], [reader.ask(seed) for seed in (1, 1, 2, 3)])
        self.assertEqual(1, len(log.output))
        self.assertEqual(0, Server(self, "b").ask(2))  # the verdict is inherited

    def test_ranks(self) -> None:
        """Each rank compares its own heads and layers; one that differs keeps all from loading."""
        one: dict[str, int] = {}
        for sizes in ({"tp": 2}, {"pp": 2}, {"tp": 2, "pp": 2}):
            for stored_by, factor, loads in (
                (one, 1.0, PAGES),
                (sizes, 1.0, PAGES),
                (sizes, 2.0, 0),
            ):
                with self.subTest(sizes, stored_by=stored_by, factor=factor):
                    self.root = Path(tempfile.mkdtemp(dir=self.root))
                    writer = Server(self, "a", factor, **stored_by)
                    reader = Server(self, "b", **sizes)
                    for seed in (1, 2):
                        writer.ask(seed)
                    self.assertEqual([0, loads], [reader.ask(seed) for seed in (1, 2)])
                    self.assertTrue(all(rank.right for rank in reader.ranks))

    def test_off(self) -> None:
        """With `witness_every` 0 nothing is compared."""
        Server(self, "a", 2.0).ask(1)
        self.assertEqual(PAGES, Server(self, "b", every=0).ask(1))

    @pytest.mark.thorough
    def test_random_servers(self) -> None:
        """Servers of random setups and computations never load what they do not compute."""
        rng, loads = random.Random(5), 0
        factors = {"a": 1.0, "b": 1.0, "c": 1.5, "d": 0.5}
        for _ in range(40):
            setup = rng.choice("abcd")
            server = Server(self, setup, factors[setup], every=rng.choice((2, 1000)))
            for _ in range(rng.randrange(1, 5)):
                loads += server.ask(rng.randrange(8)) > 0
                self.assertTrue(all(rank.right for rank in server.ranks))
        self.assertGreater(loads, 10)
