"""The connector's worker on the ways of GPU memory, with tensors on the CPU; and on a GPU."""

from __future__ import annotations

import os
import unittest
from collections.abc import Iterable
from importlib.util import find_spec
from itertools import product
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from devices import on_cpu_too

from helpers import DirectoryTest, bits, keys_of, noise, save_step
from scheduling import loading, saving, worker_of
from vua.connector.cache_spec import UncachedError
from vua.connector.config import ConnectorConfig
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

    def test_pages_that_a_backend_packs_by_itself(self) -> None:
        """Specs that say so have no canonical kind: their shapes look like other layouts."""
        from vllm.v1.kv_cache_interface import FullAttentionSpec

        from vua.vllm.cache_spec import known_kind

        same = {"block_size": 16, "num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}
        config = SimpleNamespace(
            cache_config=SimpleNamespace(cache_dtype="auto"), model_config=SimpleNamespace()
        )
        self.assertEqual("", known_kind(FullAttentionSpec(**same), config))
        for name in ("num_head_slots", "state_content_bytes"):
            self.assertIsNone(known_kind(FullAttentionSpec(**same, **{name: 4}), config))

    def test_required(self) -> None:
        """Where GDS is required and there is none, the engine does not start; `auto` goes on."""
        if not torch.cuda.is_available():
            config = ConnectorConfig(shared_storage_path=str(self.root), gds_mode="required")
            with self.assertRaisesRegex(ConfigError, "needs a CUDA driver"):
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
