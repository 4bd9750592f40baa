"""Simulated workers: every rank of every parallel size writes, and any other size reads it."""

from __future__ import annotations

import itertools
import unittest
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from devices import on_cpu_too

from helpers import DirectoryTest, save_step
from vua.connector.cache_spec import Group, Model
from vua.connector.config import ConnectorConfig
from vua.connector.group_transfer import Rank
from vua.connector.metadata import ConnectorMetadata, GroupLoad, LoadOrder, SaveOrder
from vua.connector.worker import WorkerSide
from vua.format.identity import Identity
from vua.format.keys import KeyChain, token_ids
from vua.format.layout import KVLayout

pytestmark = [pytest.mark.vllm, pytest.mark.thorough]

SIZE, BLOCK, CHUNKS = 16, 16, 3
GQA = KVLayout(layers=6, kv_heads=8, k_dim=32, v_dim=32, dtype="F32", chunk_tokens=SIZE)
FEW = replace(GQA, kv_heads=2)
LATENT = KVLayout(layers=4, kv_heads=1, k_dim=576, v_dim=0, dtype="BF16", chunk_tokens=SIZE)
SIZES = ((1, 1), (1, 2), (1, 4), (1, 8), (2, 1), (2, 4))  # (PP, TP)
DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16}


@unittest.skipUnless(find_spec("vllm"), "vLLM is not installed")
class RanksTest(DirectoryTest):
    """`WorkerSide` of each rank, over paged caches as large as the rank's part of the model."""

    def setUp(self) -> None:
        super().setUp()
        keys = KeyChain(token_ids(list(range(CHUNKS * SIZE))), SIZE)
        self.keys = keys.first(CHUNKS)
        self.table, self.seed = [3, 1, 4], 7

    def model(self, layout: KVLayout, sizes: tuple[int, int]) -> Any:
        """The model as an engine of these parallel sizes sees it."""
        from vua.vllm.cache_spec import worker_shards

        shards = worker_shards(layout, pp_size=sizes[0], tp_size=sizes[1])
        group = Group(layout, tuple(range(layout.layers)), shards, (0,))
        identity = Identity(model="ranks", chunk_tokens=SIZE)
        return Model(identity, (group,), (BLOCK,))

    def content(self, layout: KVLayout) -> torch.Tensor:
        """What the whole model holds: ``[layers, heads, tokens, K and V]``."""
        generator = torch.Generator().manual_seed(self.seed)
        shape = (layout.layers, layout.kv_heads, CHUNKS * SIZE, layout.k_dim + layout.v_dim)
        return torch.randn(shape, generator=generator).to(DTYPES[layout.dtype])

    def caches(self, layout: KVLayout, shard: Any) -> dict[str, torch.Tensor]:
        """One rank's pages, as vLLM lays them out, filled with what nobody wrote."""
        width = layout.k_dim + layout.v_dim
        shape = (6, shard.heads, BLOCK, width)
        layers = range(shard.layer_start, shard.layer_stop)
        dtype = DTYPES[layout.dtype]
        return {
            f"model.layers.{layer}.attn": torch.full(shape, -7, dtype=dtype) for layer in layers
        }

    def write(self, layout: KVLayout, caches: dict[str, torch.Tensor], shard: Any) -> None:
        """Let vLLM's own writer put the rank's part of the content into its pages."""
        from vua.vllm.cache_spec import engine_writer

        content = self.content(layout)
        slots = torch.tensor([b * BLOCK + s for b in self.table for s in range(BLOCK)])
        for layer, cache in zip(range(shard.layer_start, shard.layer_stop), caches.values()):  # noqa: B905
            part = content[layer, shard.head_start : shard.head_stop].transpose(0, 1)
            k, v = part[..., : layout.k_dim].contiguous(), part[..., layout.k_dim :].contiguous()
            if layout.v_dim:
                engine_writer(cache.dtype, BLOCK, layout.k_dim, "vec")(cache, slots, k, v)
            else:
                cache.view(-1, layout.k_dim)[slots] = k[:, 0]

    def workers(self, layout: KVLayout, sizes: tuple[int, int], *, fill: bool) -> Any:
        from vua.vllm import cache_spec

        config = ConnectorConfig(shared_storage_path=str(self.root), chunk_tokens=SIZE)
        model = self.model(layout, sizes)
        for pp, tp in itertools.product(*map(range, sizes)):
            worker = WorkerSide(model, config, Rank(pp, tp))
            shard = model.groups[0].shards[pp][tp]
            caches = self.caches(layout, shard)
            if fill:
                self.write(layout, caches, shard)
            layer_of = {name: int(name.split(".")[2]) for name in caches}
            worker.register(caches, layer_of, dict.fromkeys(caches, 0), cache_spec)
            yield worker, shard, caches

    def save(self, layout: KVLayout, sizes: tuple[int, int]) -> None:
        for worker, _, _ in self.workers(layout, sizes, fill=True):
            save_step(worker, ConnectorMetadata(saves=[SaveOrder([self.table], [(0, self.keys)])]))
            worker.shutdown()

    def test_nothing_is_stored_twice(self) -> None:
        """What ranks of other sizes have stored as a whole is not stored anew."""
        pairs = (((1, 1), (1, 4)), ((1, 4), (1, 1)), ((2, 4), (1, 2)), ((1, 8), (2, 1)))
        for first, second in pairs:
            with self.subTest(first=first, second=second):
                for path in self.files():
                    path.unlink()
                self.save(GQA, first)
                stored = sorted(self.files())
                self.save(GQA, second)
                self.assertEqual(CHUNKS * first[0] * first[1], len(stored))
                self.assertEqual(stored, sorted(self.files()))

    def check(self, layout: KVLayout, sizes: tuple[int, int]) -> None:
        """Load them into all ranks and compare every page with what vLLM itself writes."""
        part = GroupLoad(0, 0, CHUNKS * SIZE, self.keys)
        for worker, shard, caches in self.workers(layout, sizes, fill=False):
            worker.start_loads(ConnectorMetadata(loads=[LoadOrder("r", [self.table], [part])]))
            worker.shutdown()
            self.assertEqual(set(), worker.take_failed_blocks())
            self.assertEqual({"r"}, worker.take_received(idle=False))
            expected = self.caches(layout, shard)
            self.write(layout, expected, shard)
            for name, cache in caches.items():
                self.assertTrue(torch.equal(expected[name], cache), (sizes, shard, name))

    def exchange(self, layout: KVLayout, files: list[int]) -> None:
        """Each size reads what half of all sizes wrote; ``files`` counts those of a chunk."""
        for at, (sizes, count) in enumerate(zip(SIZES, files, strict=True)):
            with self.subTest(written=sizes):
                for path in self.files():
                    path.unlink()
                self.save(layout, sizes)
                self.assertEqual(count * CHUNKS, len(self.files()))
                for other in SIZES[at // 2 % 2 :: 2]:
                    self.check(layout, other)

    def test_many_heads(self) -> None:
        """GQA with as many KV heads as the largest size has ranks."""
        self.exchange(GQA, [1, 2, 4, 8, 2, 8])

    def test_fewer_heads_than_ranks(self) -> None:
        """Ranks that share a KV head: each head is stored once."""
        self.exchange(FEW, [1, 2, 2, 2, 2, 4])

    def test_latent(self) -> None:
        """MLA: every rank holds the latent, one stores it."""
        self.exchange(LATENT, [1, 1, 1, 1, 2, 2])


class StagedRanksTest(RanksTest):
    """Every parallel size writes and reads through buffers, from pages as GPUs have them."""

    test_nothing_is_stored_twice = None  # type: ignore[assignment] # it is asked before

    def setUp(self) -> None:
        on_cpu_too(self)
        super().setUp()

    def exchange(self, layout: KVLayout, files: list[int]) -> None:
        for sizes, others in (((1, 1), ((2, 4),)), ((1, 8), ((1, 2),)), ((2, 4), ((1, 1),))):
            with self.subTest(written=sizes):
                for path in self.files():
                    path.unlink()
                self.save(layout, sizes)
                count = files[SIZES.index(sizes)]
                self.assertEqual(count * CHUNKS, len(self.files()))
                for other in others:
                    self.check(layout, other)

    def write(self, layout: KVLayout, caches: dict[str, torch.Tensor], shard: Any) -> None:
        """Put the rank's part of the content into plain pages."""
        content = self.content(layout)
        slots = torch.tensor([b * BLOCK + s for b in self.table for s in range(BLOCK)])
        layers = range(shard.layer_start, shard.layer_stop)
        for layer, cache in zip(layers, caches.values(), strict=True):
            part = content[layer, shard.head_start : shard.head_stop].transpose(0, 1)
            cache[slots // BLOCK, :, slots % BLOCK] = part
