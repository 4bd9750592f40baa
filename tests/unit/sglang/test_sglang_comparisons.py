"""SGLang's pages of other setups are compared: lookups, loads and saves, without SGLang."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from helpers import SOON_S, DirectoryTest
from vua.connector.cache_spec import Group, Model
from vua.connector.config import ConnectorConfig, Timeouts
from vua.connector.metrics import Recorder
from vua.connector.opening import OpenedNamespace
from vua.connector.proved import written
from vua.format.identity import Identity
from vua.format.keys import KeyChain, KeyRun, token_ids
from vua.format.layout import KVLayout, Shard
from vua.sglang.session import Part, Pools, Session, chunk_keys
from vua.sglang.transfers import HostPages
from vua.store.namespace import Namespace

PAGE, PAGES, HEADS = 16, 6, 2
LAYOUT = KVLayout(layers=2, kv_heads=HEADS, k_dim=8, v_dim=8, dtype="F32", chunk_tokens=PAGE)


class Rank:
    """One rank of a server that computes K and V of tokens times a factor."""

    def __init__(
        self, test: ComparisonsTest, setup: str, shard: Shard, factor: float, every: int
    ) -> None:
        group = Group(LAYOUT, (0, 1), ((shard,),), (0,))
        model = Model(Identity(model="test", chunk_tokens=PAGE), (group,), (PAGE,))
        namespace = Namespace.create(test.root, model.identity, [LAYOUT])
        config = ConnectorConfig(
            shared_storage_path=str(test.root),
            witness_every=every,
            timeouts=Timeouts(lookup_s=SOON_S),  # on a busy machine
        )
        self.factor = factor
        layers = shard.layer_stop - shard.layer_start
        buffer = torch.zeros(2, PAGES * PAGE, layers, shard.head_stop - shard.head_start, 8)
        self.pool: Any = SimpleNamespace(
            layout="page_first", page_size=PAGE, page_num=PAGES, kv_buffer=buffer,
            k_buffer=buffer[0], v_buffer=buffer[1],
        )  # fmt: skip
        part = Part(group, HostPages(self.pool, latent=False), writes=True)
        pools = Pools({"kv": part}, model, setup * 64)
        opened = OpenedNamespace(model, namespace)
        self.session = Session(*(pools, opened, config, Recorder(), 1), proof=lambda: lambda: True)
        test.addCleanup(self.session.close)

    def serve(self, keys: KeyRun, seed: int, loaded: int) -> int:
        """Load so many pages, compute and store the rest; how many were loaded."""
        slots = torch.arange(PAGES * PAGE)
        self.pool.kv_buffer[:] = -1.0
        if loaded:
            given = keys[:loaded], slots[: loaded * PAGE]
            loaded = self.session.load("kv", *given)
        tokens = torch.arange(PAGES * PAGE) + 1000.0 * seed
        right = (torch.sin(tokens) * self.factor)[None, :, None, None, None]
        right = right.expand(self.pool.kv_buffer.shape)
        self.right = torch.equal(self.pool.kv_buffer[:, : loaded * PAGE], right[:, : loaded * PAGE])
        self.pool.kv_buffer[:] = right
        if loaded < PAGES:
            self.session.save("kv", keys[loaded:], slots[loaded * PAGE :])
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
        layers, heads = LAYOUT.layers // pp, HEADS // tp
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
