"""SGLang's pages of other setups are compared: lookups, loads and saves, without SGLang."""

from __future__ import annotations

import random
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
from vua.format.keys import KeyChain, token_ids
from vua.format.layout import KVLayout
from vua.sglang.session import Part, Pools, Session
from vua.sglang.settings import chunk_keys
from vua.sglang.transfers import HostPages
from vua.store.namespace import Namespace

PAGE, PAGES = 16, 6
LAYOUT = KVLayout(layers=2, kv_heads=2, k_dim=8, v_dim=8, dtype="F32", chunk_tokens=PAGE)


class Server:
    """One rank of a server that computes K and V of tokens times a factor."""

    def __init__(
        self, test: ComparisonsTest, setup: str, factor: float = 1.0, every: int = 1000
    ) -> None:
        group = Group(LAYOUT, (0, 1), ((LAYOUT.full,),), (0,))
        model = Model(Identity(model="test", chunk_tokens=PAGE), (group,), (PAGE,))
        namespace = Namespace.create(test.root, model.identity, [LAYOUT])
        config = ConnectorConfig(
            shared_storage_path=str(test.root),
            witness_every=every,
            timeouts=Timeouts(lookup_s=SOON_S),  # on a busy machine
        )
        self.factor = factor
        buffer = torch.zeros(2, PAGES * PAGE, 2, 2, 8)
        self.pool: Any = SimpleNamespace(
            layout="page_first", page_size=PAGE, page_num=PAGES, kv_buffer=buffer,
            k_buffer=buffer[0], v_buffer=buffer[1],
        )  # fmt: skip
        part = Part(group, HostPages(self.pool, latent=False), writes=True)
        pools = Pools({"kv": part}, model, setup * 64)
        opened = OpenedNamespace(model, namespace)
        self.session = Session(pools, opened, config, Recorder(), seed=1)
        test.addCleanup(self.session.close)

    def ask(self, seed: int) -> int:
        """Serve a prompt: what may be loaded is, the rest is computed and stored; pages loaded."""
        chain = KeyChain(token_ids(range(1000 * seed, 1000 * seed + PAGES * PAGE)), PAGE)
        keys = chunk_keys([], [chain[at].name for at in range(PAGES)], PAGE)
        loaded, slots = self.session.find(keys, 0), torch.arange(PAGES * PAGE)
        self.pool.kv_buffer[:] = -1.0
        if loaded:
            given = keys[:loaded], slots[: loaded * PAGE]
            loaded = self.session.load("kv", *given, lambda: True)
        tokens = torch.arange(PAGES * PAGE) + 1000.0 * seed
        right = (torch.sin(tokens) * self.factor)[None, :, None, None, None]
        right = right.expand(self.pool.kv_buffer.shape)
        self.right = torch.equal(self.pool.kv_buffer[:, : loaded * PAGE], right[:, : loaded * PAGE])
        self.pool.kv_buffer[:] = right
        if loaded < PAGES:
            self.session.save("kv", keys[loaded:], slots[loaded * PAGE :], lambda: True)
        written()
        return loaded


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
                self.assertTrue(server.right)
        self.assertGreater(loads, 10)
