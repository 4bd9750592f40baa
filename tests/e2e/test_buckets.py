"""Engines on several hosts that share a bucket: what one stored another one loads."""

from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from buckets import seaweedfs, speaking_to
from commands import run as command
from commands import run_json
from e2e.harness import PROMPT, Batch, EngineTest, Phase, Served, run, tokens
from proxy import FaultyProxy
from vua.format.entry import ENCRYPTED
from vua.format.parse import parse_entry
from vua.security.keyring import tenant_of, write_key
from vua.storage.bucket import Bucket

pytestmark = [pytest.mark.vllm, pytest.mark.thorough]
pytest.importorskip("obstore")

BATCH = Batch([PROMPT])


class BucketTest(EngineTest):
    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls.server = seaweedfs()
        cls.proxy = FaultyProxy(cls.server.endpoint)
        cls.addClassCleanup(cls.proxy.close)
        cls.enterClassContext(speaking_to(cls.proxy.endpoint))

    def setUp(self) -> None:
        """Take an empty place; at first the proxy passes everything on."""
        super().setUp()
        self.url = self.server.place()
        self.proxy.plan = lambda *_: ""
        self.proxy.counts.clear()

    def on(self, host: str, *batches: Batch, url: str = "", **extra: Any) -> Served:
        """Run an engine on a host: a directory of its own, and the bucket behind it."""
        path = [str(self.root.parent / host), url or self.url]
        (self.root.parent / host).mkdir(exist_ok=True)
        phase = Phase(batches, root=self.root, extra={"shared_storage_path": path, **extra})
        (served,) = run(phase)
        self.assertIsNone(served.problem)
        return served

    def on_the_bucket(self, *batches: Batch, role: str = "kv_both", **extra: Any) -> Served:
        """Run an engine without a directory, in a process of its own."""
        phase = Phase(
            batches,
            root=self.root,
            extra={"shared_storage_path": self.url, **extra},
            transfer={"kv_role": role},
        )
        (served,) = run(phase)
        self.assertIsNone(served.problem)
        return served

    def arrived(self) -> int:
        return len(self.chunks())

    def all_arrive(self, count: int, known: Batch) -> None:
        """What a host did not send when its engine ended, at most for 5 s, it sends later."""
        stop_s = time.monotonic() + 100
        while self.arrived() < count and time.monotonic() < stop_s:
            self.on("a", known)  # looks for it when it starts
        self.assertEqual(count, self.arrived())

    def chunks(self, url: str = "") -> dict[str, bytes]:
        """The entries in a bucket, by the names of their chunks: each is of one shard."""
        bucket = Bucket.at(url or self.url)
        keys = [one.key for one in bucket.walk() if one.key.endswith(".safetensors")]
        return {key.split("/")[-2]: bytes(bucket.get(key)[1]) for key in keys}

    def test_from_host_to_host(self) -> None:
        """A cold engine on one host; a warm one on another, which has an empty directory."""
        (expected,) = self.baseline(BATCH)
        cold = self.on("a", BATCH)
        self.assertEqual(([expected], [0]), (cold.tokens, cold.cached))
        self.all_arrive(10, BATCH)
        warm = self.on("b", BATCH)
        self.assertEqual(([expected], [640]), (warm.tokens, warm.cached))
        self.assertEqual(640, warm.counts["tokens_loaded"])
        control = self.on("c", BATCH, url=self.server.place())
        self.assertEqual(([expected], [0]), (control.tokens, control.cached))

    def keys_of(self, *salts: str) -> dict[str, Any]:
        """Give an engine keys of tenants, each made once; return its settings."""
        at = self.root.with_name("-".join(salts))
        at.mkdir()
        for salt in salts:
            name = f"{tenant_of(salt.encode())}.key"
            made = self.root.with_name(name)
            if not made.exists():
                write_key(made)
            shutil.copy2(made, at / name)
        return {"security": {"tenant_keys": str(at)}}

    def test_tenants(self) -> None:
        """What a tenant has stored is loaded with its key, and nothing of it without."""
        alice, bob, nobody = (Batch([PROMPT], salt=salt) for salt in ("alice", "bob", None))
        (expected,) = self.baseline(BATCH)
        both, bobs = self.keys_of("alice", "bob"), self.keys_of("bob")

        cold = self.on_the_bucket(alice, **both)
        self.assertEqual(([expected], [0]), (cold.tokens, cold.cached))
        stored = self.chunks()
        warm = self.on_the_bucket(alice, **both)
        self.assertEqual(([expected], [640]), (warm.tokens, warm.cached))
        self.assertEqual(640, warm.counts["tokens_loaded"])
        other = self.on_the_bucket(bob, alice, nobody, role="kv_consumer", **bobs)
        self.assertEqual(([expected] * 3, [0] * 3), (other.tokens, other.cached))
        self.assertEqual(0, other.counts.get("tokens_loaded", 0))
        self.tells_nothing(stored, "alice")

        self.on_the_bucket(bob, **both)
        self.assertEqual(20, self.arrived())
        (keys,) = both["security"].values()
        (Path(keys) / f"{tenant_of(b'alice')}.key").unlink()
        after = self.on_the_bucket(alice, bob, **both)
        self.assertEqual(([expected] * 2, [0, 640]), (after.tokens, after.cached))
        self.assertEqual(stored, {name: self.chunks()[name] for name in stored})
        (found,) = run_json("verify", self.url, "--tenant-keys", keys)[1]["namespaces"]
        self.assertEqual([10, 10], list(found["sealed"].values()))
        self.assertEqual([10], list(found["authentic"].values()))
        self.assertEqual(0, command("gc", self.url, "--lost-keys", "--tenant-keys", keys)[0])
        self.assertEqual(10, self.arrived())
        self.assertFalse(stored.keys() & self.chunks().keys())

    def tells_nothing(self, stored: dict[str, bytes], salt: str) -> None:
        """Neither names nor bytes of chunks are those that an engine without keys stores."""
        url = self.server.place()
        self.on_the_bucket(Batch([PROMPT], salt=salt), shared_storage_path=url)
        plain = self.chunks(url)
        self.assertEqual(10, len(plain))
        self.assertFalse(plain.keys() & stored.keys())
        self.assertEqual({ENCRYPTED}, {parse_entry(data).kind for data in stored.values()})
        for data in plain.values():
            self.assertEqual("", parse_entry(data).kind)
            self.assertFalse(any(data[-64:] in sealed for sealed in stored.values()))

    def test_server_killed_in_the_middle(self) -> None:
        """It dies while chunks travel, and comes back later: no token changes, all arrive."""
        prompts = [Batch([tokens(700, seed=seed)]) for seed in range(40, 46)]
        expected = self.baseline(*prompts)

        def kill() -> None:
            stop_s = time.monotonic() + 100
            while time.monotonic() < stop_s:
                if self.proxy.counts[""] > 20:
                    break
                time.sleep(0.01)
            self.server.stop()

        killer = threading.Thread(target=kill)
        killer.start()
        try:
            served = self.on("a", *prompts)
            self.assertEqual(expected, served.tokens)
            killer.join()
            served = self.on("a", *prompts)  # from its directory
            self.assertEqual((expected, [640] * 6), (served.tokens, served.cached))
            served = self.on("b", *prompts)
            self.assertEqual((expected, [0] * 6), (served.tokens, served.cached))
        finally:
            killer.join()
            self.server.start()
        self.assertLess(self.arrived(), 60)
        self.all_arrive(60, prompts[0])
