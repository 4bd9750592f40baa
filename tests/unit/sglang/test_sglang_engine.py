"""SGLang's own pools, names and versions. Runs in SGLang's environment: `dev.py sglang`."""

from __future__ import annotations

import time
import unittest
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from safetensors.torch import save_file

from helpers import DirectoryTest, until
from sglang_case import transfers_of
from vua.connector.cache_spec import Group, Model, UncachedError
from vua.errors import ConfigError
from vua.format.identity import Identity
from vua.format.keys import KeyChain, token_ids
from vua.format.layout import KVLayout, Shard
from vua.sglang.session import chunk_keys
from vua.sglang.transfers import HostPages, Transfers
from vua.store.namespace import Namespace

pytest.importorskip("sglang.srt", reason="SGLang has an environment of its own: `dev.py sglang`")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # SGLang's, about missing GPUs

PAGE, LAYERS, HEADS, DIM, TOKENS = 16, 4, 4, 16, 64
LATENT = 40
LAYOUTS = ("layer_first", "page_first", "page_first_direct")


def mha(layout: str, heads: int = HEADS, first_layer: int = 0, layers: int = LAYERS) -> Any:
    """SGLang's host pool of K and V in CPU memory, all elements different."""
    from sglang.srt.mem_cache.device_pool_info import KVBufferLayout, KVBuffers, MHABufferInfo
    from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost

    device = [torch.zeros(TOKENS, heads, DIM) for _ in range(layers)]
    pointers = torch.tensor([each.data_ptr() for each in device], dtype=torch.uint64)
    buffers = KVBuffers(
        k=tuple(device),
        v=tuple(device),
        k_data_ptrs=pointers,
        v_data_ptrs=pointers,
        layout=KVBufferLayout.NHD,
    )
    info = MHABufferInfo(
        buffers=buffers,
        page_size=PAGE,
        head_num=heads,
        head_dim=DIM,
        v_head_dim=DIM,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    return filled(MHATokenToKVPoolHost, info, layout, range(first_layer, first_layer + layers))


def mla(layout: str) -> Any:
    from sglang.srt.mem_cache.device_pool_info import MLABufferInfo
    from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost

    device = [torch.zeros(TOKENS, 1, LATENT) for _ in range(LAYERS)]
    info = MLABufferInfo(
        buffers=tuple(device),
        data_ptrs=torch.tensor([each.data_ptr() for each in device], dtype=torch.uint64),
        layer_indices=tuple(range(LAYERS)),
        device_layer_num=LAYERS,
        page_size=PAGE,
        kv_lora_rank=LATENT - 8,
        qk_rope_head_dim=8,
        kv_cache_dim=LATENT,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )
    return filled(MLATokenToKVPoolHost, info, layout, range(LAYERS), target_layer_num=LAYERS)


def filled(kind: Any, info: Any, layout: str, layers: range, **more: Any) -> Any:
    """A host pool of some layers in CPU memory, all elements different."""
    made = kind(
        info,
        2.0,
        0,
        PAGE,
        layout,
        pin_memory=False,
        device_capacity_tokens=TOKENS,
        start_layer=layers.start,
        end_layer=layers.stop,
        **more,
    )
    made.kv_buffer.copy_(torch.arange(made.kv_buffer.numel()).view(made.kv_buffer.shape))
    return made


def slots(*pages: int) -> torch.Tensor:
    """The token slots of pages."""
    return torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages])


def rows(pool: Any, page: int) -> list[torch.Tensor]:
    """K and V of a page as SGLang's own comments order them: ``[layers, slots, heads, dim]``."""
    flat = pool.get_data_page(page * PAGE, flat=False)
    heads, layers = pool.head_num, pool.layer_num
    if pool.layout == "page_first":
        return list(flat.reshape(2, PAGE, layers, heads, DIM).transpose(1, 2))
    return list(flat.reshape(2, layers, PAGE, heads, DIM))


def plain(layout: KVLayout) -> Group:
    """All layers of a model, of one kind."""
    return Group(layout, tuple(range(layout.layers)), ((layout.full,),), (0,))


def held(pool: Any) -> range:
    """The layers of a pool that holds all that its rank computes."""
    return range(pool.start_layer, pool.end_layer)


class PoolTest(DirectoryTest):
    def transfers(self, pool: Any, shard: Shard, layout: KVLayout) -> Transfers:
        """What moves a shard between a pool and the test's directory."""
        identity = Identity(model="test", chunk_tokens=PAGE)
        namespace = Namespace.create(self.root, identity, [layout])
        self.addCleanup(namespace.close)
        pages = HostPages(pool, latent=not layout.v_dim)
        made = transfers_of(self.root, namespace, shard, pages)
        self.addCleanup(made.close)
        return made

    def test_layouts(self) -> None:
        """What a pool of any layout stores a pool of any other loads, as SGLang sees them."""
        layout = KVLayout(LAYERS, HEADS, DIM, DIM, "F32", PAGE)
        for at, one in enumerate(LAYOUTS):
            source = mha(one)
            keys = KeyChain(token_ids([at] * 3 * PAGE), PAGE).first(3)
            self.transfers(source, layout.full, layout).save(keys, slots(5, 1, 3))
            for other in LAYOUTS:
                with self.subTest(one=one, other=other):
                    target = mha(other)
                    target.kv_buffer.fill_(-1)
                    moves = self.transfers(target, layout.full, layout)
                    self.assertEqual(3, moves.load(keys, slots(0, 2, 4)))
                    for page, came in ((5, 0), (1, 2), (3, 4)):
                        pairs = zip(rows(source, page), rows(target, came), strict=True)
                        self.assertTrue(all(torch.equal(*pair) for pair in pairs))
                    others = [each for page in (1, 3, 5) for each in rows(target, page)]
                    self.assertTrue(all((each == -1).all() for each in others))

    def test_ranks(self) -> None:
        """Ranks of any size of tensor and pipeline parallelism load what any other stored."""
        from vua.sglang.identity import shard_of

        layout = KVLayout(LAYERS, HEADS, DIM, DIM, "F32", PAGE)
        sizes = ((1, 1), (2, 1), (4, 1), (8, 1), (1, 2), (2, 2))
        for stored_by in sizes:
            keys = KeyChain(token_ids([10 * stored_by[0] + stored_by[1]] * PAGE), PAGE).first(1)
            whole = [torch.zeros(LAYERS, PAGE, HEADS, DIM) for _ in range(2)]
            for tp, pp, pool in self.pools(*stored_by):
                shard, writes = shard_of(plain(layout), held(pool), pool, tp, stored_by[0])
                pool.kv_buffer += 10000 * (shard.head_start + 10 * pp)
                if writes:
                    self.transfers(pool, shard, layout).save(keys, slots(2))
                    for array, found in zip(whole, rows(pool, 2), strict=True):
                        array[
                            shard.layer_start : shard.layer_stop,
                            :,
                            shard.head_start : shard.head_stop,
                        ] = found
            for loaded_by in sizes:
                for tp, _, pool in self.pools(*loaded_by):
                    with self.subTest(stored_by=stored_by, loaded_by=loaded_by, tp=tp):
                        shard, _ = shard_of(plain(layout), held(pool), pool, tp, loaded_by[0])
                        moves = self.transfers(pool, shard, layout)
                        self.assertEqual(1, moves.load(keys, slots(1)))
                        for array, found in zip(whole, rows(pool, 1), strict=True):
                            expected = array[
                                shard.layer_start : shard.layer_stop,
                                :,
                                shard.head_start : shard.head_stop,
                            ]
                            self.assertTrue(torch.equal(expected, found))

    def pools(self, tp_size: int, pp_size: int) -> list[tuple[int, int, Any]]:
        """The pools of all ranks: (tensor-parallel rank, pipeline-parallel rank, pool)."""
        layers = LAYERS // pp_size
        return [
            (tp, pp, mha("page_first_direct", max(1, HEADS // tp_size), pp * layers, layers))
            for pp in range(pp_size)
            for tp in range(tp_size)
        ]

    def test_latent(self) -> None:
        """Latents come back in any layout; one rank of all writes them."""
        from vua.sglang.identity import shard_of

        layout = KVLayout(LAYERS, 1, LATENT, 0, "F32", PAGE)
        source = mla("page_first")
        shards = [shard_of(plain(layout), held(source), source, rank, 4) for rank in range(4)]
        self.assertEqual([(layout.full, rank == 0) for rank in range(4)], shards)
        keys = KeyChain(token_ids([7] * 2 * PAGE), PAGE).first(2)
        self.transfers(source, layout.full, layout).save(keys, slots(1, 4))
        for name in LAYOUTS:
            with self.subTest(name):
                target = mla(name)
                target.kv_buffer.fill_(-1)
                moves = self.transfers(target, layout.full, layout)
                self.assertEqual(2, moves.load(keys, slots(3, 0)))
                found = target.kv_buffer
                if name == "layer_first":
                    found = found[:, 3 * PAGE : 4 * PAGE]
                elif name == "page_first":
                    found = found[3 * PAGE : 4 * PAGE].transpose(0, 1)
                else:
                    found = found[3]
                expected = source.kv_buffer[PAGE : 2 * PAGE].transpose(0, 1)
                self.assertTrue(torch.equal(expected.flatten(), found.flatten()))

    def test_other_shapes(self) -> None:
        """A rank that holds other heads or layers than it should is refused."""
        from vua.sglang.identity import shard_of

        layout = KVLayout(LAYERS, HEADS, DIM, DIM, "F32", PAGE)
        for pool in (mha("page_first", heads=1), mha("page_first", layers=3)):
            with self.assertRaisesRegex(UncachedError, "4 such layers and 4 KV heads"):
                shard_of(plain(layout), range(LAYERS), pool, 0, 1)

    def test_windows_of_ranks(self) -> None:
        """Of the layers with a window each rank holds those that it computes."""
        from vua.sglang.identity import shard_of

        layout = KVLayout(2, HEADS, DIM, DIM, "F32", PAGE, "w32")
        group = Group(layout, (0, 2), ((layout.full,),), (1,))
        cases = (
            (range(4), 2, Shard(0, 2, 0, HEADS, "w32")),
            (range(2), 1, Shard(0, 1, 0, HEADS, "w32")),
            (range(1, 4), 1, Shard(1, 2, 0, HEADS, "w32")),
        )
        for layers, count, expected in cases:
            with self.subTest(layers):
                pool = mha("page_first", layers=count)
                self.assertEqual((expected, True), shard_of(group, layers, pool, 0, 1))
                with self.assertRaisesRegex(UncachedError, "2 such layers"):
                    shard_of(group, layers, mha("page_first", layers=3), 0, 1)

    def test_other_pools(self) -> None:
        """A pool of states, of an index or of a draft model is refused by its name."""
        from sglang.srt.mem_cache.hicache_storage import PoolName

        from vua.sglang.storage import check_name

        for name in PoolName:
            if name in (PoolName.KV, PoolName.SWA):
                check_name(name)
            else:
                with self.assertRaisesRegex(UncachedError, f"'{name.value}'.*not stored"):
                    check_name(name)


class NamesTest(unittest.TestCase):
    def test_salts(self) -> None:
        """SGLang's names are VUA's without a salt, and others with each salt and extra key."""
        from sglang.srt.mem_cache.utils import get_hash_str, storage_namespace_seed

        ids = list(range(3 * PAGE))
        chain, names = KeyChain(token_ids(ids), PAGE), set[str]()
        for extra_key, salt in ((None, None), (None, "a"), ("a", None), ("a", "a"), (None, "b")):
            pages = get_hash_str(ids, storage_namespace_seed(extra_key, salt), PAGE)
            if extra_key is salt is None:
                self.assertEqual(chain.first(3), [*chunk_keys([], pages, PAGE)])
            self.assertFalse(names & set(pages))
            names |= set(pages)

    def test_versions(self) -> None:
        """Another SGLang is refused with its version."""
        import sglang

        from vua.sglang import storage

        storage.check_version()
        for version in ("0.5.22", "0.5.24", "0.6.0"):
            with (
                mock.patch.object(sglang, "__version__", version),
                self.assertRaisesRegex(ConfigError, f"{version} is not supported"),
            ):
                storage.check_version()


class Scheduler:
    """As much of SGLang's scheduler as VUA looks for, with a model of one layer."""

    def __init__(self, folder: Path = Path("/nowhere")) -> None:
        updater = SimpleNamespace(
            update_weights_from_disk=lambda *_, **__: (True, ""),
            load_weights_from_distributed=lambda *_: (True, ""),
            update_weights_from_tensor=lambda *_, **__: (True, ""),
            update_weights_from_ipc=lambda *_: (True, ""),
            begin_weight_update=lambda: None,
            end_weight_update=lambda **_: None,
        )
        self.model = torch.nn.Linear(64, 64)
        arguments = SimpleNamespace(
            model_path=str(folder), revision=None, download_dir=None, random_seed=1
        )
        runner = SimpleNamespace(
            model=self.model,
            weight_updater=updater,
            lora_manager=None,
            server_args=arguments,
        )
        self.tp_worker = SimpleNamespace(model_runner=runner)
        self.engine: Any = None

    def attach(self) -> Any:
        from vua.sglang.identity import Engine

        return Engine.find()


class Starting(Scheduler):
    """A scheduler that makes VUA at its start."""

    def __init__(self, folder: Path) -> None:
        from vua.sglang.identity import Engine

        super().__init__(folder)
        self.engine = Engine.find()


class BackendTest(DirectoryTest):
    def test_outside_of_a_scheduler(self) -> None:
        """A backend that no scheduler makes finds no model, and is told so in one sentence."""
        from vua.sglang.identity import Engine

        with self.assertRaisesRegex(UncachedError, "its model cannot be found"):
            Engine.find()

    def test_updates(self) -> None:
        """From the beginning of any update on nothing counts; what is attached again knows that."""
        updates: tuple[Callable[[Any], Any], ...] = (
            lambda to: to.update_weights_from_disk("somewhere", "auto"),
            lambda to: to.load_weights_from_distributed([("a", 0)]),
            lambda to: to.update_weights_from_tensor(named_tensors=[("a", torch.ones(1))]),
            lambda to: to.update_weights_from_ipc(None),
            lambda to: to.begin_weight_update(),
            lambda to: to.end_weight_update(run_post_load=False),
        )
        for number, update in enumerate(updates):
            with self.subTest(number):
                scheduler = Starting(self.root)
                engine, runner = scheduler.engine, scheduler.tp_worker.model_runner
                proven = engine.proof()
                self.assertTrue(engine.unchanged() and proven())
                with self.assertLogs("vllm.vua", "WARNING"):
                    update(runner.weight_updater)
                self.assertEqual((False, False), (engine.unchanged(), proven()))
                self.assertIs(engine, scheduler.attach())

    def test_changed_in_memory(self) -> None:
        """Weights that somebody wrote to are noticed."""
        scheduler = Starting(self.root)
        with torch.no_grad():
            scheduler.model.weight.add_(1)
        self.assertFalse(scheduler.engine.unchanged())

    def test_attached_later(self) -> None:
        """An engine not watched from its start on is refused: its weights may be others."""
        with self.assertRaisesRegex(UncachedError, "start SGLang with VUA"):
            Scheduler().attach()


class Storing(Scheduler):
    """A scheduler on one rank of several that makes VUA's backend at its start."""

    def __init__(self, folder: Path, root: Path, rank: int, ranks: int) -> None:
        from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig, PoolName

        from vua.sglang.identity import shard_of
        from vua.sglang.session import Part, Pools
        from vua.sglang.storage import VUAHiCacheStorage

        super().__init__(folder)
        hicache_storage_pass_prefix_keys = True  # noqa: F841 - looked for in SGLang's frame
        extra: dict[str, Any] = {"shared_storage_path": str(root), "chunk_tokens": PAGE}
        extra |= {"interface_v1": 1, "load_policy": "always", "witness_every": 0}
        place = HiCacheStorageConfig(
            tp_rank=rank,
            tp_size=ranks,
            pp_rank=0,
            pp_size=1,
            attn_cp_rank=0,
            attn_cp_size=1,
            is_mla_model=False,
            enable_storage_metrics=False,
            is_page_first_layout=True,
            model_name="m",
            extra_config=extra,
        )
        self.storage = VUAHiCacheStorage(place, {})
        self.tp_worker.model_runner.weight_updater.vua_engine.loaded_s = time.time()
        self.pool = mha("page_first", HEADS // ranks)
        group = plain(KVLayout(LAYERS, HEADS, DIM, DIM, "F32", PAGE))
        shard, writes = shard_of(group, range(LAYERS), self.pool, rank, ranks)
        own = replace(group, shards=((shard,),))
        identity = Identity(model="test", chunk_tokens=PAGE)
        model = Model(identity, (own,), (PAGE,), identified=False)
        parts = {PoolName.KV: Part(own, HostPages(self.pool, latent=False), writes)}
        self.storage.register_mem_pool_host(self.pool)
        with mock.patch("vua.sglang.storage.pools_of", return_value=Pools(parts, model)):
            self.storage.on_host_pools_registered()


class StorageTest(DirectoryTest):
    """The backend as SGLang's threads call it."""

    PAGES = 5

    def setUp(self) -> None:
        """Make a checkpoint, and the hashes of a prompt."""
        super().setUp()
        self.cache, self.folder = self.root / "kv", self.root / "model"
        self.folder.mkdir()
        save_file({"a": torch.ones(2)}, self.folder / "model.safetensors")
        chain = KeyChain(token_ids(range(self.PAGES * PAGE)), PAGE)
        self.hashes = [chain[at].name for at in range(self.PAGES)]

    def ranks(self, count: int) -> list[Storing]:
        servers = [Storing(self.folder, self.cache, rank, count) for rank in range(count)]
        for one in servers:
            self.addCleanup(one.storage.close)
        return servers

    def store(self, one: Storing) -> None:
        slots = torch.arange(self.PAGES * PAGE)
        self.assertEqual([True] * self.PAGES, one.storage.batch_set_v1(self.hashes, slots))

    def fill(self, ranks: int) -> None:
        """Have all ranks of a server store the prompt: as soon as they know their weights."""
        for number, one in enumerate(self.ranks(ranks), start=1):

            def done(one: Storing = one, files: int = number * self.PAGES) -> bool:
                self.store(one)
                return len(self.entries()) == files

            until(done)

    def entries(self) -> dict[str, tuple[int, bytes]]:
        """All that is stored, with what a new file would change."""
        return {
            path.relative_to(self.cache).as_posix(): (path.stat().st_ino, path.read_bytes())
            for path in self.cache.rglob("*.safetensors")
        }

    def test_nothing_is_stored_twice(self) -> None:
        """What the ranks of a server of another size have stored is found, and not written anew."""
        for first, second in ((1, 2), (2, 1), (4, 2)):
            with self.subTest(first=first, second=second):
                self.cache = self.root / f"of {first} for {second}"
                self.fill(first)
                stored = self.entries()
                self.assertEqual(first * self.PAGES, len(stored))
                for one in self.ranks(second):
                    until(lambda one=one: one.storage.batch_exists(self.hashes) == self.PAGES)
                    self.store(one)
                    self.assertEqual([True] * self.PAGES, self.loaded(one))
                self.assertEqual(stored, self.entries())

    def loaded(self, one: Storing) -> list[bool]:
        """Which pages of the prompt a rank loads."""
        return one.storage.batch_get_v1(self.hashes, torch.arange(self.PAGES * PAGE))
