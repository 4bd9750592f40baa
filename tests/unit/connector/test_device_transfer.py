"""The connector's worker on the ways of GPU memory, with tensors on the CPU; and on a GPU."""

from __future__ import annotations

import os
import unittest
from collections.abc import Iterable
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from devices import on_cpu_too

from helpers import DirectoryTest, bits, has_native, keys_of, noise, save_step, until
from scheduling import loading, saving, worker_of
from vua.connector.cache_spec import UncachedError
from vua.connector.config import ConnectorConfig
from vua.device import xxh3
from vua.errors import ConfigError
from vua.format.layout import KVLayout

pytestmark = pytest.mark.vllm

HAS_VLLM = bool(find_spec("vllm"))
NEEDS_CUDA = unittest.skipUnless(torch.cuda.is_available(), "needs a CUDA device")
FIRST_SEED = int(os.environ.get("VUA_TEST_SEED", "0"))

if HAS_VLLM:
    from vua.connector import device_transfer
    from vua.connector.metadata import GroupLoad
    from vua.vllm.cache_spec import stored_as


@unittest.skipUnless(HAS_VLLM, "vLLM is not installed")
class FormsTest(DirectoryTest):
    """One rank of every form of cache that GPU backends have."""

    device = "cpu"
    layout = KVLayout(3, 2, 8, 8, "BF16", 16)

    def setUp(self) -> None:
        super().setUp()
        on_cpu_too(self)

    def side(self, layout: KVLayout, caches: list[torch.Tensor], **settings: Any) -> Any:
        return worker_of(self.root, caches, layout, block=8, name=f"{layout}", **settings)

    def memory(self, form: str, dtype: torch.dtype, seed: int) -> tuple[torch.Tensor, list[Any]]:
        """A form's whole memory, of ten blocks of 8 slots, and what vLLM registers of it."""
        dims = {"fused": (10, 3, 8, 2, 16), "mla": (3, 10, 8, 24)}
        dims |= {"fused mla": (3, 10, 1, 8, 24), "small pages": (3, 20, 2, 4, 16)}
        memory = noise(*dims[form], dtype=dtype, seed=seed).to(self.device)
        if form == "fused":
            return memory, list(memory.permute(1, 0, 3, 2, 4))
        return memory, list(memory)

    def check(self, form: str, dtype: torch.dtype) -> None:
        """Blocks that are stored come back into other blocks of another cache; nothing else."""
        latent = "mla" in form
        name = {2: "BF16", 1: "F8_E4M3"}[dtype.itemsize]
        layout = KVLayout(3, 1, 24, 0, name, 16) if latent else KVLayout(3, 2, 8, 8, name, 16)
        memory, layers = self.memory(form, dtype, seed=1)
        other, others = self.memory(form, dtype, seed=2)
        keys = keys_of(range(48), 16)
        out_ids, in_ids = [3, 1, 4, 8, 5, 9], [2, 7, 0, 6, 1, 4]
        first = self.side(layout, layers)
        save_step(first, saving(keys, out_ids))
        first.shutdown()
        second = self.side(layout, others)
        orders = loading(keys, in_ids)
        orders.loads[0].parts = [GroupLoad(0, 8, 40, keys)]  # begins and ends inside of chunks
        second.start_loads(orders)
        second.shutdown()

        expected = self.memory(form, dtype, seed=2)[0].cpu()
        axis = {"fused": 0}.get(form, 1)
        width = 2 if form == "small pages" else 1
        for at in range(1, 5):
            for step in range(width):
                source = memory.cpu().select(axis, out_ids[at] * width + step)
                expected.select(axis, in_ids[at] * width + step).copy_(source)
        self.assertEqual({"r"}, second.take_received(idle=False))
        self.assertEqual(set(), second.take_failed_blocks())
        self.assertEqual(bits(expected), bits(other.cpu()))
        self.assertNotEqual(bits(self.memory(form, dtype, seed=2)[0].cpu()), bits(expected))

    @pytest.mark.thorough
    def test_every_form(self) -> None:
        """Each layout, in both."""
        forms = ("fused", "mla", "fused mla", "small pages")
        self.check_all(product(forms, (torch.bfloat16, torch.uint8)))

    def check_all(self, cases: Iterable[tuple[str, torch.dtype]]) -> None:
        for form, dtype in cases:
            with self.subTest(form=form, dtype=dtype):
                for path in self.files():
                    path.unlink()
                self.check(form, dtype)

    def test_unknown_forms(self) -> None:
        """A tensor that fits no layout is refused with a word about it."""
        for shape, words in (
            ((10, 16, 2, 16), "narrow the caches to the shard"),
            ((10, 3, 8, 16), "narrow the caches to the shard"),
            ((10, 2, 16), "4 axes"),
            ((2, 2, 16, 2, 8), "4 axes"),
            ((10, 2, 16, 16), "no blocks of 8 tokens"),
        ):
            with self.subTest(shape), self.assertRaisesRegex(UncachedError, words):
                self.side(KVLayout(1, 2, 8, 8, "F32", 16), [torch.zeros(shape)])

    def test_dtypes(self) -> None:
        """fp8 is stored where its scales are the checkpoint's, and on a GPU alone."""

        def stored(dtype: torch.dtype, kind: str, *, gpu: bool = True, **more: Any) -> str | None:
            cache, spec = SimpleNamespace(cache_dtype=kind, **more), SimpleNamespace(dtype=dtype)
            platform = SimpleNamespace(is_cpu=lambda: not gpu)
            with mock.patch("vllm.platforms.current_platform", platform):
                return stored_as(spec, SimpleNamespace(cache_config=cache))

        self.assertEqual("F8_E4M3", stored(torch.uint8, "fp8"))
        self.assertEqual("F8_E5M2", stored(torch.uint8, "fp8_e5m2"))
        self.assertEqual("BF16", stored(torch.bfloat16, "auto"))
        self.assertIsNone(stored(torch.uint8, "fp8", kv_cache_dtype_skip_layers=["0"]))
        for kind in ("fp8_ds_mla", "int8_per_token_head", "nvfp4", "fp8_inc"):
            self.assertIsNone(stored(torch.uint8, kind), kind)
        self.assertIsNone(stored(torch.uint8, "fp8", gpu=False))

    def test_required(self) -> None:
        """Where GDS is required and there is none, the engine does not start; `auto` goes on."""
        if not torch.cuda.is_available():
            config = ConnectorConfig(shared_storage_path=str(self.root), gds_mode="required")
            with self.assertRaisesRegex(ConfigError, "cuFile cannot be used"):
                device_transfer.open_gds(config, torch.device("cuda:0"))
            config = ConnectorConfig(shared_storage_path=str(self.root), gds_mode="auto")
            gds = device_transfer.open_gds(config, torch.device("cuda:0"))
            self.assertIsNone(gds.mover)
            gds.close()
        device_transfer.STAGED_DEVICES.remove("cpu")
        with self.assertRaisesRegex(ConfigError, "lies in CPU memory"):
            tensor = torch.zeros(10, 2, 8, 16)
            self.side(KVLayout(1, 2, 8, 8, "F32", 16), [tensor], gds_mode="required")
        with self.assertRaisesRegex(ConfigError, "gds_mode must be .* found 'maybe'"):
            ConnectorConfig(shared_storage_path=str(self.root), gds_mode="maybe")


RING = KVLayout(3, 2, 8, 8, "BF16", 16)
CHUNKS, BLOCKS = 33, 80


@unittest.skipUnless(HAS_VLLM and has_native(), "needs vLLM, and native code")
class RingTest(DirectoryTest):
    """A prompt of 33 chunks by buffers of two."""

    def setUp(self) -> None:
        super().setUp()
        on_cpu_too(self)
        two = 2 * RING.full.payload_nbytes(RING)
        self.enterContext(mock.patch.object(device_transfer, "_LOAD_NBYTES", two))
        self.keys = keys_of(range(16 * CHUNKS), 16)
        self.memory = noise(3, BLOCKS, 2, 16, 16, dtype=torch.bfloat16, seed=1)
        first = worker_of(self.root, list(self.memory), RING)
        save_step(first, saving(self.keys, range(CHUNKS)))
        until(lambda: first.saves.pending == 0)
        first.shutdown()
        self.other = torch.zeros(3, BLOCKS, 2, 16, 16, dtype=torch.bfloat16)
        self.reader = worker_of(self.root, list(self.other), RING)
        self.addCleanup(self.reader.shutdown)
        self.group = self.reader.groups[0]
        self.blocks = [BLOCKS - 1 - at for at in range(CHUNKS)]

    def load(self) -> None:
        self.reader.start_loads(loading(self.keys, self.blocks))
        until(lambda: self.reader.take_received(idle=True))

    def check(self, chunks: int) -> None:
        """So many leading chunks are told as loaded, and are in their blocks."""
        self.assertEqual({*self.blocks[chunks:]}, self.reader.take_failed_blocks())
        for at in range(chunks):
            wanted, found = self.memory[:, at], self.other[:, self.blocks[at]]
            self.assertEqual(bits(wanted), bits(found), at)

    def rings(self) -> SimpleNamespace:
        found: list[int] = []
        load = device_transfer.RingLoads.load

        def note(ring: device_transfer.RingLoads, *given: object) -> int:
            found.append(load(ring, *given))
            return found[-1]

        self.enterContext(mock.patch.object(device_transfer.RingLoads, "load", note))
        return SimpleNamespace(found=found)

    def path(self, chunk: int) -> Path:
        return next(path for path in self.files() if path.parent.name == self.keys[chunk].name)

    def test_many_laps(self) -> None:
        """All of it comes, by the ring alone, and again."""
        rings = self.rings()
        for _ in range(2):
            self.other.zero_()
            self.load()
            self.check(CHUNKS)
        self.assertEqual([CHUNKS] * 2, rings.found)
        self.assertEqual(self.group.load_buffers.limit, self.group.load_buffers.left)

    def test_another_chunk(self) -> None:
        """A sound file under the name of another chunk is not taken for it."""
        self.path(7).write_bytes(self.path(8).read_bytes())
        self.load()
        self.check(7)

    def test_busy_buffers(self) -> None:
        """With too few buffers for a ring it is loaded by what there is."""
        taken = [self.group.load_buffers.take() for _ in range(self.group.load_buffers.limit - 1)]
        rings = self.rings()
        self.load()
        self.check(CHUNKS)
        self.assertEqual([0], rings.found)
        for buffer in taken:
            self.group.load_buffers.give_back(buffer)


class DeviceCheckTest(RingTest):
    """The same where the device compares checksums: here by xxhash in place of a GPU's kernel."""

    wrong: int | None = None
    """Of the next comparisons, the block whose digest is told wrongly."""

    def setUp(self) -> None:
        def digests(
            data: torch.Tensor,
            starts: torch.Tensor,
            lengths: torch.Tensor,
            keys: torch.Tensor,
            word: int,
        ) -> torch.Tensor:
            found = xxh3.on_host(data, starts.numpy(), lengths.numpy())
            if self.wrong is not None and self.wrong < len(found):
                found[self.wrong] ^= 1
            return torch.from_numpy(found.view("int64"))

        self.digests = digests
        for where in (device_transfer, xxh3):
            self.enterContext(mock.patch.object(where, "kernel_for", return_value=digests))
        super().setUp()

    def test_nothing_is_hashed_here(self) -> None:
        """The host leaves the hashing to the device: its digests are not looked at."""
        ring = self.rings()
        with mock.patch("vua.store.entry_reader.check_payload", side_effect=AssertionError):
            self.load()
        self.check(CHUNKS)
        self.assertEqual([CHUNKS], ring.found)

    def test_a_device_that_errs(self) -> None:
        """Right bytes that it finds wrong are read by the host, which judges."""
        self.wrong = 3
        rings = self.rings()
        self.load()
        self.check(CHUNKS)
        self.assertEqual([0], rings.found)
        self.assertEqual(CHUNKS, len(self.files()))


@pytest.mark.gpu
@NEEDS_CUDA
class GPUFormsTest(FormsTest):
    """The same on a GPU."""

    device = "cuda:0"


@unittest.skipUnless(HAS_VLLM, "vLLM is not installed")
@pytest.mark.thorough
class StagedSimulationTest(unittest.TestCase):
    """The connector under vLLM's scheduler, over plain pages that are reached through buffers."""

    def setUp(self) -> None:
        """Set what vLLM reads from the environment; compute on one thread."""
        from e2e.engine import ENVIRONMENT
        from sim.truth import Cache

        on_cpu_too(self)
        self.enterContext(mock.patch.multiple(Cache, packed=False))
        environment = ENVIRONMENT | {"VLLM_LOGGING_LEVEL": "ERROR"}
        self.enterContext(mock.patch.dict(os.environ, environment))
        self.addCleanup(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)

    @classmethod
    def tearDownClass(cls) -> None:
        """Leave the group that the simulation has joined."""
        from sim.engine import leave_world

        leave_world()

    def test_random_scenarios(self) -> None:
        """No slot that attention reads is ever wrong, for three kinds of models."""
        from sim.case import draw, play

        loaded = sum(play(draw(FIRST_SEED + seed))["loaded tokens"] for seed in range(3))
        self.assertGreater(loaded, 0)
