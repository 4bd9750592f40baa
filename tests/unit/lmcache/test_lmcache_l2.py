"""Mirrors `vua.lmcache.l2_adapter`, by the real LMCache: `dev.py lmcache` has it."""

from __future__ import annotations

import os
import select
import time
import unittest
from importlib import util
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from safetensors.torch import save_file

from buckets import seaweedfs, speaking_to
from commands import told
from helpers import DirectoryTest, flip, noise
from vua.errors import ConfigError, NotWritableError
from vua.storage.bucket import Bucket

os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")

HAS_LMCACHE = util.find_spec("lmcache") is not None
WHERE = "LMCache is not installed here; `dev.py lmcache` runs these tests where it is"
SHAPE, COUNT, DEADLINE_S = (2, 3, 16, 8), 7, 120
MODULE = {"module_path": "vua.lmcache.l2_adapter", "class_name": "VUAL2Adapter"}


@unittest.skipUnless(HAS_LMCACHE, WHERE)
class TestL2Adapter(DirectoryTest):
    def adapter(self, **params: Any) -> Any:
        """The adapter as LMCache makes it from its command line."""
        from lmcache.v1.distributed.l2_adapters.plugin_l2_adapter import (
            PluginL2AdapterConfig,
            _create_plugin_adapter,
        )

        said = {"path": str(self.root / "kv"), "plain_engines": True, "label": "test", **params}
        given = {**MODULE, "adapter_params": said}
        adapter = _create_plugin_adapter(PluginL2AdapterConfig.from_dict(given))
        self.addCleanup(adapter.close)
        return adapter

    def keys(self, count: int = COUNT, **fields: Any) -> list[Any]:
        from lmcache.v1.distributed.api import ObjectKey

        given = {"model_name": "org/model", "kv_rank": 1, **fields}
        return [ObjectKey(bytes([number] * 32), **given) for number in range(count)]

    def objects(self, values: list[torch.Tensor]) -> list[Any]:
        from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj

        made = []
        for one in values:
            raw = one.view(torch.uint8).flatten()
            meta = MemoryObjMetadata(
                one.shape, one.dtype, one.data_ptr(), raw.numel(), 1, fmt=MemoryFormat.KV_2LTD
            )
            made.append(TensorMemoryObj(raw, meta, parent_allocator=None))
        return made

    def values(self, count: int = COUNT, seed: int = 0) -> list[torch.Tensor]:
        return [noise(*SHAPE, dtype=torch.bfloat16, seed=seed + one) for one in range(count)]

    def done(self, fd: int, ask: Any) -> Any:
        """What LMCache is told when a task is done."""
        while (found := ask()) is None:
            self.assertTrue(select.select([fd], [], [], DEADLINE_S)[0], "no answer")
            os.read(fd, 8)
        return found

    def store(self, adapter: Any, keys: list[Any], values: list[torch.Tensor]) -> Any:
        task = adapter.submit_store_task(keys, self.objects(values))
        return self.done(
            adapter.get_store_event_fd(), lambda: adapter.pop_completed_store_tasks().get(task)
        )

    def load(self, adapter: Any, keys: list[Any], dtype: torch.dtype = torch.bfloat16) -> list[Any]:
        into = [torch.full(SHAPE, 7, dtype=dtype) for _ in keys]
        task = adapter.submit_load_task(keys, self.objects(into))
        fd = adapter.get_load_event_fd()
        bits = self.done(fd, lambda: adapter.query_load_result(task))
        return [one if bits.test(at) else None for at, one in enumerate(into)]

    def found(self, adapter: Any, keys: list[Any], dtype: torch.dtype = torch.bfloat16) -> int:
        """How many a lookup finds, with the layout that LMCache says."""
        from lmcache.v1.distributed.api import MemoryLayoutDesc

        layout = MemoryLayoutDesc([torch.Size(SHAPE)], [dtype])
        task = adapter.submit_lookup_and_lock_task(keys, {0: layout})
        fd = adapter.get_lookup_and_lock_event_fd()
        bits = self.done(fd, lambda: adapter.query_lookup_and_lock_result(task))
        adapter.submit_unlock(keys)
        return sum(bits.test(at) for at in range(len(keys)))

    def same(self, values: list[torch.Tensor], found: list[Any]) -> list[bool]:
        """Which were found, after comparing the bits of these."""
        for mine, theirs in zip(values, found, strict=True):
            if theirs is not None:
                self.assertTrue(torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8)))
        return [one is not None for one in found]

    def test_restart(self) -> None:
        """Another server finds and loads every bit that one has stored; in part, too."""
        values, keys = self.values(), self.keys()
        stored = self.store(self.adapter(), keys, values)
        second = self.adapter()

        self.assertTrue(stored.is_successful())
        self.assertEqual(sum(one.nbytes for one in values), stored.bytes_transferred())
        self.assertEqual(COUNT, self.found(second, keys))
        self.assertEqual([True] * COUNT, self.same(values, self.load(second, keys)))
        mixed = [keys[3], *self.keys(2, cache_salt="x"), keys[0], keys[6]]
        found = self.load(second, mixed)
        expected = [values[at] for at in (3, 0, 0, 0, 6)]
        self.assertEqual([True, False, False, True, True], self.same(expected, found))
        self.assertEqual(3, self.found(second, mixed))
        second.close()
        said = f" {(COUNT + 3) * SHAPE[-2]} tokens loaded, {COUNT + 3} of {COUNT + 5} chunks found"
        self.assertRegex(told(self.root / "kv"), f"^unknown time saved .*,{said}$")
        self.assertEqual(1, len(list((self.root / "kv").glob("*/namespace.json"))))

    def test_ranks_and_groups(self) -> None:
        """The objects of a chunk are counted as one, which is found if all of them are."""
        values, adapter = self.values(COUNT * 3), self.adapter()
        fields = ({"kv_rank": 1}, {"kv_rank": 2}, {"object_group_id": 1})
        keys = [key for given in fields for key in self.keys(**given)]
        self.store(adapter, keys[:-1], values[:-1])  # the last chunk lacks one
        self.assertEqual([True] * (3 * COUNT - 1), self.same(values, self.load(adapter, keys))[:-1])
        adapter.close()
        self.assertIn(f" {(COUNT - 1) * SHAPE[-2]} tokens loaded, ", told(self.root / "kv"))

    def test_kept_apart(self) -> None:
        """Another model, rank, group, salt, dtype, shape or epoch finds nothing."""
        keys = self.keys()
        self.store(self.adapter(), keys, self.values())
        second = self.adapter()
        fields: tuple[dict[str, Any], ...] = (
            {"model_name": "org/other"},
            {"kv_rank": 2},
            {"object_group_id": 1},
            {"cache_salt": "tenant"},
        )
        for given in fields:
            with self.subTest(**given):
                self.assertEqual([None] * COUNT, self.load(second, self.keys(**given)))
        self.assertEqual(0, self.found(second, keys, torch.float16))
        self.assertEqual([None] * COUNT, self.load(second, keys, torch.float16))
        self.assertEqual([None] * COUNT, self.load(self.adapter(epoch="b"), keys))
        self.assertEqual([True] * COUNT, self.same(self.values(), self.load(second, keys)))

    def model(self) -> Path:
        """A model's directory, as old as a server that starts now."""
        folder = self.root / "models" / "one"
        folder.mkdir(parents=True, exist_ok=True)
        self.configure(folder, 10000)
        self.weigh(folder, 1.0)
        return folder

    def weigh(self, folder: Path, value: float) -> None:
        """Give a model other weights, and wait until a clock shows that they are old."""
        save_file({"a": torch.full((8,), value)}, folder / "model.safetensors")
        self.grow_old(folder / "model.safetensors")

    def configure(self, folder: Path, theta: int) -> None:
        (folder / "config.json").write_text(f'{{"rope_theta": {theta}}}')
        self.grow_old(folder / "config.json")

    def grow_old(self, file: Path) -> None:
        """Wait until a clock shows that a file is older than now."""
        while time.time() <= file.stat().st_ctime + 0.02:
            time.sleep(0.001)

    def test_another_checkpoint(self) -> None:
        """Other weights, or another configuration, at the same path find nothing of the old."""
        folder, values = self.model(), self.values()
        keys = self.keys(model_name=str(folder))
        self.assertTrue(self.store(self.adapter(label=None), keys, values).is_successful())
        found = self.load(self.adapter(label=None), keys)
        self.assertEqual([True] * COUNT, self.same(values, found))

        self.weigh(folder, 2.0)
        other = self.adapter(label=None)
        self.assertEqual(0, self.found(other, keys))
        self.assertEqual([None] * COUNT, self.load(other, keys))
        self.weigh(folder, 1.0)
        self.configure(folder, 500)
        self.assertEqual([None] * COUNT, self.load(self.adapter(label=None), keys))
        self.configure(folder, 10000)
        found = self.load(self.adapter(label=None), keys)
        self.assertEqual([True] * COUNT, self.same(values, found))

    def test_a_checkpoint_that_changes(self) -> None:
        """Once its files change nothing is loaded or stored of a model: engines have either."""
        folder, values = self.model(), self.values()
        keys = self.keys(model_name=str(folder))
        adapter = self.adapter(label=None)
        self.assertTrue(self.store(adapter, keys[:3], values[:3]).is_successful())
        self.assertEqual(3, self.found(adapter, keys))
        self.weigh(folder, 2.0)
        with self.assertLogs("vua", "ERROR") as told:
            self.assertEqual(0, self.found(adapter, keys))
            self.assertEqual([None] * COUNT, self.load(adapter, keys))
            self.assertFalse(self.store(adapter, keys, values).is_successful())
            self.weigh(folder, 1.0)
            self.assertEqual(0, self.found(adapter, keys))
        self.assertEqual(1, len(told.records))
        late = self.adapter(label=None)
        self.weigh(folder, 3.0)  # after the start, and before it is looked at first
        with self.assertLogs("vua", "ERROR"):
            self.assertFalse(self.store(late, keys, values).is_successful())
        late = self.adapter(label=None)
        self.configure(folder, 500)
        with self.assertLogs("vua", "ERROR"):
            self.assertFalse(self.store(late, keys, values).is_successful())

    def test_label(self) -> None:
        """Without a model's files a label has to be given, and each label has its own objects."""
        keys, values = self.keys(), self.values()
        adapter = self.adapter(label=None)
        with self.assertLogs("vua", "ERROR") as told:
            self.assertFalse(self.store(adapter, keys, values).is_successful())
            self.assertEqual(0, self.found(adapter, keys))
        self.assertRegex(told.output[0], 'set "label": {"org/model"')
        self.assertTrue(self.store(self.adapter(label="v1"), keys, values).is_successful())
        named = {"org/model": "v1", "org/other": "v2"}
        self.assertEqual(COUNT, self.found(self.adapter(label=named), keys))
        self.assertEqual(0, self.found(self.adapter(label="v2"), keys))
        for wrong in ("", {"org/model": ""}, {"org/model": 1}):
            with self.assertRaisesRegex(ConfigError, "label"):
                self.adapter(label=wrong)

    def test_engines_that_are_not_plain(self) -> None:
        """Nothing is stored until somebody says that no engine has adapters, which no key tells."""
        for said in (None, False, "yes", 1):
            with self.subTest(said), self.assertRaisesRegex(ConfigError, '"plain_engines": true'):
                self.adapter(plain_engines=said)
        self.assertFalse((self.root / "kv").exists())

    def test_damage(self) -> None:
        """A flipped bit or a shorter file is a miss, is stored anew, and costs nobody else."""
        keys, values = self.keys(), self.values()
        self.store(self.adapter(), keys, values)
        files = self.files()
        flip(files[0], files[0].stat().st_size - 9)
        os.truncate(files[1], files[1].stat().st_size - 1)
        second = self.adapter()
        with self.assertLogs("vua"):
            found = self.same(values, self.load(second, keys))

        self.assertEqual(COUNT - 2, sum(found))
        self.assertTrue(self.store(second, keys, values).is_successful())
        self.assertEqual([True] * COUNT, self.same(values, self.load(self.adapter(), keys)))

    @unittest.skipUnless(util.find_spec("obstore"), "the extra `object` is not installed")
    def test_bucket(self) -> None:
        """The same on a bucket: found by another server; damage is a miss, and stored anew."""
        server = seaweedfs()
        place, keys, values = server.place(), self.keys(), self.values()
        with speaking_to(server.endpoint):
            self.assertTrue(self.store(self.adapter(path=place), keys, values).is_successful())
            second = self.adapter(path=place)
            self.assertEqual(COUNT, self.found(second, keys))
            self.assertEqual([True] * COUNT, self.same(values, self.load(second, keys)))
            bucket = Bucket.at(place)
            damaged = next(one.key for one in bucket.walk() if one.key.endswith(".safetensors"))
            content = bytearray(bucket.get(damaged)[1])
            content[-9] ^= 1
            bucket.put(damaged, bytes(content))
            with self.assertLogs("vua"):
                found = self.same(values, self.load(self.adapter(path=place), keys))
            self.assertEqual(COUNT - 1, sum(found))
            third = self.adapter(path=place)
            self.assertTrue(self.store(third, keys, values).is_successful())
            self.assertEqual([True] * COUNT, self.same(values, self.load(third, keys)))

    def test_refused(self) -> None:
        """A directory that refuses fails the task and nothing else; then it goes on."""
        adapter, values, keys = self.adapter(), self.values(), self.keys()
        refused = NotWritableError(30, "read-only")
        with (
            mock.patch("vua.storage.local.LocalStorage.write", side_effect=refused),
            self.assertLogs("vua"),
        ):
            self.assertFalse(self.store(adapter, keys, values).is_successful())
        self.assertEqual(0, self.found(adapter, keys))
        self.assertTrue(self.store(adapter, keys, values).is_successful())

    def test_delete(self) -> None:
        """LMCache's own eviction deletes; its account of bytes follows."""
        adapter, keys = self.adapter(), self.keys()
        self.store(adapter, keys, self.values())
        before = adapter.get_usage().total_bytes_used
        adapter.delete(keys[:3])

        self.assertEqual(COUNT - 3, self.found(self.adapter(), keys))
        self.assertEqual(before * (COUNT - 3) // COUNT, adapter.get_usage().total_bytes_used)

    def test_settings(self) -> None:
        """A setting that is not known is refused; an empty task is answered."""
        with self.assertRaisesRegex(ConfigError, "adapter_params has paht"):
            self.adapter(paht="x")
        adapter = self.adapter(max_bytes="1G", threads=1)
        self.assertEqual([], self.load(adapter, []))
        self.assertTrue(adapter.report_status()["is_healthy"])
