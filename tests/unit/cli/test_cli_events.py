"""Mirrors `vua.cli.events`: what routers are told."""

from __future__ import annotations

import json
import os
import random
import shutil
import threading
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from buckets import memory_url
from commands import PATIENCE_MS, TOKENS, CliTest, SocketTest, documented, put_prompt, run
from helpers import (
    DirectoryTest,
    Memory,
    keys_of,
    model_arrays,
    rectangle,
    save_chunk,
    until,
)
from vua.capacity.listing import Listing
from vua.catalog.directory import DirectoryNamespace
from vua.cli.events import EventSocket
from vua.format.identity import Identity
from vua.format.keys import KeyChain, token_ids
from vua.format.layout import KVLayout, Shard
from vua.store.namespace import Namespace

KEYS = [key.name for key in keys_of(TOKENS.tolist(), 4)]


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def told(text: str) -> list[tuple[str, str]]:
    return [(one["type"], *one["block_hashes"]) for one in lines(text)]


def resident_nbytes() -> int:
    return int(Path("/proc/self/statm").read_text("ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def delete(root: Path, chunk: str) -> None:
    """Remove a chunk of every namespace, as an eviction does."""
    for path in root.glob(f"*/{chunk[:2]}/{chunk}"):
        shutil.rmtree(path)


class TestEvents(CliTest):
    """What is printed of a directory with two namespaces."""

    def follow(self, *steps: Callable[[], object]) -> list[tuple[str, str]]:
        """What is told while these things happen, one between two looks; at last all is deleted."""
        ways = iter([*steps, lambda: shutil.rmtree(self.root)])
        with mock.patch("time.sleep", side_effect=lambda _: next(ways)()):
            code, out, err = run("events", self.root, "--follow", "--interval", "1")
        self.assertEqual(2, code, err)
        return told(out)

    def test_what_is_there(self) -> None:
        """One event per chunk and namespace, parents before children, as the page describes it."""
        code, out, _ = run("events", self.root)
        found = lines(out)
        self.assertEqual(0, code)
        self.assertEqual(sorted([*KEYS, KEYS[0]]), sorted(one["block_hashes"][0] for one in found))
        (long,) = {one["ownership"] for one in found if one["block_hashes"] == [KEYS[2]]}
        mine = [one for one in found if one["ownership"] == long]
        self.assertEqual(KEYS, [one["block_hashes"][0] for one in mine])
        self.assertEqual([None, *KEYS[:2]], [one["parent_block_hash"] for one in mine])
        self.assertEqual({"STORAGE"}, {one["medium"] for one in found})
        self.assertEqual({4}, {one["block_size"] for one in found})
        self.assertEqual(set(found[0]), documented("events"))

    def test_locality(self) -> None:
        """By the file system's kind; one that is not known may be shared."""
        _, out, _ = run("events", self.root)
        self.assertEqual({"LOCAL"}, {one["locality"] for one in lines(out)})
        with mock.patch("vua.io.posix._LOCAL", frozenset()):
            _, out, _ = run("events", self.root)
        self.assertEqual({"REMOTE"}, {one["locality"] for one in lines(out)})

    def test_follow(self) -> None:
        """What is stored and removed between two looks is told; what was only used is not."""
        first = told(run("events", self.root)[1])

        def use() -> None:
            for path in self.entries():
                os.utime(path.parent)

        seen = self.follow(
            use, lambda: self.put("qwen", 2, torch.bfloat16), lambda: delete(self.root, KEYS[2])
        )
        self.assertEqual(first, seen[:4])
        self.assertEqual([("BlockStored", KEYS[1]), ("BlockRemoved", KEYS[2])], seen[4:])

    def test_gap(self) -> None:
        """Without the chunk before it no lookup finds a chunk: it is gone until that is back."""
        seen = self.follow(
            lambda: delete(self.root, KEYS[1]), lambda: self.put("llama", 3, torch.float32)
        )
        gone = [("BlockRemoved", KEYS[2]), ("BlockRemoved", KEYS[1])]
        self.assertEqual([*gone, ("BlockStored", KEYS[1]), ("BlockStored", KEYS[2])], seen[4:])

    def test_completed_during_a_look(self) -> None:
        """A chunk whose file comes while a look reads is told by the next one, with its parent."""
        (file,) = self.root.glob(f"*/{KEYS[1][:2]}/{KEYS[1]}/*.safetensors")
        partial = file.with_name(".tmp-0-1-0")
        file.rename(partial)
        real = DirectoryNamespace.listing

        def listing(self: DirectoryNamespace, *words: Any) -> Listing:
            found = real(self, *words)
            if self.name == file.parents[2].name and partial.exists():
                partial.rename(file)
            return found

        steps = iter([lambda: None, lambda: shutil.rmtree(self.root)])
        with (
            mock.patch.object(DirectoryNamespace, "listing", listing),
            mock.patch("time.sleep", side_effect=lambda _: next(steps)()),
        ):
            found = lines(run("events", self.root, "--follow")[1])
        stored = [one for one in found if one["block_hashes"][0] in KEYS[1:]]
        self.assertEqual(KEYS[:2], [one["parent_block_hash"] for one in stored[:2]])

    def test_hostile_names(self) -> None:
        """Names that are not of chunks, and files that are none, neither stop it nor are told."""
        before = run("events", self.root)[1]
        fan = self.entries()[0].parents[1]
        for name in (" " * 64, "ab" * 20 + " " * 24, "AB" * 32, "\n" * 64, "g" * 64, "a" * 63):
            (fan / name).mkdir()
        (fan / ("a" * 63 + "\x1b")).mkdir()
        fake = fan / (fan.name + "0" * 62)
        fake.mkdir()
        os.mkfifo(fake / self.entries()[0].name)
        (self.root / ("0" * 64)).mkdir()
        (self.root / ("1" * 64)).symlink_to("/")
        code, out, err = run("events", self.root)
        self.assertEqual((0, ""), (code, err))
        self.assertEqual(told(before), told(out))

    def test_circle(self) -> None:
        """Chunks that claim to follow each other are not reached from a first one."""
        namespace = self.entries()[0].parents[2]
        for one, other in ((0, 2), (2, 0)):
            chunk = namespace / KEYS[one][:2] / KEYS[one]
            (chunk / f"after-{KEYS[other]}").touch()
        self.assertEqual([("BlockStored", KEYS[0])], told(run("events", self.root)[1]))


class TestShards(DirectoryTest):
    """Chunks in several files, and behind extras."""

    layout = KVLayout(2, 2, 8, 8, "BF16", 4)

    def save(self, shards: list[Shard], extras: dict[int, list[tuple[str, bytes]]]) -> list[str]:
        """Store a prompt as an engine with these shards does; return its chunks."""
        identity = Identity(model="m", chunk_tokens=4)
        namespace = Namespace.create(self.root, identity, [self.layout])
        self.addCleanup(namespace.close)
        keys = namespace.keys(token_ids(TOKENS), extras).first(3)
        for shard in shards:
            arrays = rectangle(model_arrays(self.layout, 3), shard)
            memory = Memory(self.layout, shard, 3).fill(arrays).map()
            for place, key in enumerate(keys):
                self.assertTrue(
                    save_chunk(namespace.stores[0], key, memory, shard=shard, place=place)
                )
        return [key.name for key in keys]

    def test_all_shards(self) -> None:
        """A chunk is stored once the files of all ranks are there, and gone without one."""
        left, right = Shard(0, 2, 0, 1), Shard(0, 2, 1, 2)
        names = self.save([left], {})
        self.assertEqual("", run("events", self.root)[1])
        steps = iter([
            lambda: self.save([right], {}),
            lambda: next(self.root.glob(f"*/*/{names[2]}/{left.name}.*")).unlink(),
            lambda: shutil.rmtree(self.root),
        ])  # fmt: skip
        with mock.patch("time.sleep", side_effect=lambda _: next(steps)()):
            seen = told(run("events", self.root, "--follow")[1])
        stored = [("BlockStored", name) for name in names]
        self.assertEqual([*stored, ("BlockRemoved", names[2])], seen)

    def test_extras(self) -> None:
        """Behind a salt and an image the parent is the chunk before, not the digest of extras."""
        names = self.save([self.layout.full], {0: [("salt", b"s")], 1: [("image", b"i")]})
        chain = KeyChain(token_ids(TOKENS), 4, {0: [("salt", b"s")], 1: [("image", b"i")]})
        self.assertNotEqual(names[0], chain[1].parent.hex())
        found = [(*one["block_hashes"], one["parent_block_hash"])
                 for one in lines(run("events", self.root)[1])]  # fmt: skip
        self.assertEqual(list(zip(names, [None, *names[:2]], strict=True)), found)


class TestBucket(unittest.TestCase):
    """A cache in a bucket."""

    def test_follow(self) -> None:
        """It is told as a directory is; headers are read once, whatever number of looks."""
        pytest.importorskip("obstore")
        from vua.storage.bucket import Bucket

        url = memory_url()

        def remove() -> None:
            bucket = Bucket.at(url)
            bucket.delete([one.key for one in bucket.walk() if f"/{KEYS[2]}/" in one.key])

        put_prompt(url, TOKENS[:8])
        steps = iter([lambda: put_prompt(url, TOKENS[:12]), remove])
        reads: list[str] = []

        def step(_: float) -> None:
            before = len(reads)
            try:
                next(steps)()
            except StopIteration:
                raise KeyboardInterrupt from None
            del reads[before:]  # not the command's

        real = Bucket.get

        def get(self: Bucket, key: str, *rest: int) -> Any:
            reads.append(key)
            return real(self, key, *rest)

        with mock.patch("time.sleep", side_effect=step), mock.patch.object(Bucket, "get", get):
            code, out, _ = run("events", url, "--follow")
        self.assertEqual(130, code)
        stored = [("BlockStored", key) for key in KEYS]
        self.assertEqual([*stored, ("BlockRemoved", KEYS[2])], told(out))
        self.assertEqual({"REMOTE"}, {one["locality"] for one in lines(out)})
        headers = [key for key in reads if key.endswith(".safetensors")]
        # Two are read once more: they tell the layout when the bucket is opened.
        self.assertEqual((3, 5), (len(set(headers)), len(headers)))


class TestSocket(SocketTest):
    """What comes over ZeroMQ."""

    def test_everything(self) -> None:
        """Whoever subscribes before it begins gets all, with the topic; then it ends."""
        for bind in (False, True):
            with (
                self.subTest(bind=bind),
                self.running("--topic", "kv@d", *["--connect"] * bind) as codes,
            ):
                subscriber = self.socket(self.zmq.SUB, self.out, bind=bind)
                subscriber.subscribe(b"kv")
                events = self.received(subscriber, 0, b"kv@d")
                subscriber.close(linger=0)
            self.assertEqual([0], codes)
            self.assertEqual({"type": "AllBlocksCleared"}, events.pop(0))
            hashes = [event["block_hashes"][0].hex() for event in events]
            self.assertEqual(sorted([*KEYS, KEYS[0]]), sorted(hashes))

    def test_follow(self) -> None:
        """Changes are numbered on."""
        with self.running("--follow", "--interval", "0.01") as codes:
            subscriber = self.socket(self.zmq.SUB, self.out)
            subscriber.subscribe(b"")
            self.assertEqual(5, len(self.received(subscriber, 0)))
            self.put("qwen", 2, torch.bfloat16)
            (event,) = self.received(subscriber, 1)
            names = [event["parent_block_hash"], *event["block_hashes"]]
            self.assertEqual(KEYS[:2], [name.hex() for name in names])
            shutil.rmtree(self.root)
        self.assertEqual([2], codes)

    def test_latecomer(self) -> None:
        """Whoever subscribes later is told everything with the next look, and so are all."""
        with self.running("--follow", "--interval", "0.01") as codes:
            first, later = (self.socket(self.zmq.SUB, self.out) for _ in range(2))
            first.subscribe(b"")
            told = self.received(first, 0)
            later.subscribe(b"")
            again = self.received(later, 1)
            self.assertEqual(told, again)
            self.assertEqual(told, self.received(first, 1))
            shutil.rmtree(self.root)
        self.assertEqual([2], codes)

    def test_any_bytes(self) -> None:
        """After 10,000 messages of any form others are still told."""
        draw = random.Random(56)

        def part() -> bytes:
            size = draw.choice((0, 1, 7, 8, 8, 9, 300))
            return draw.choice((b"\xff" * size, bytes(size), b"\1" * size, draw.randbytes(size)))

        with self.running("--follow", "--interval", "0.01") as codes:
            first = self.socket(self.zmq.SUB, self.out)
            first.subscribe(b"")
            self.received(first, 0)
            peers = [self.socket(self.zmq.XSUB, self.out) for _ in range(4)]
            for number in range(10_000):
                peer = peers[number % 4]
                peer.setsockopt(self.zmq.SNDTIMEO, PATIENCE_MS)
                if number % 3:
                    peer.send_multipart([part() for _ in range(draw.randrange(1, 5))])
                else:  # as a router's, but for the topic
                    peer.send_multipart([b"\1" + part()])
                while peer.poll(0):
                    peer.recv_multipart()
                if number % 500 == 499:  # one goes, with what it was sent
                    peer.close(linger=0)
                    peers[number % 4] = self.socket(self.zmq.XSUB, self.out)
            self.put("qwen", 2, torch.bfloat16)
            until(lambda: KEYS[1] in [event.hex() for event in self.stored(first)])
            shutil.rmtree(self.root)
        self.assertEqual([2], codes)

    def stored(self, subscriber: Any) -> list[bytes]:
        events = self.msgpack.decode(subscriber.recv_multipart()[2])[1]
        return [key for event in events for key in event.get("block_hashes", ())]

    @pytest.mark.thorough
    def test_slow_subscriber(self) -> None:
        """One that does not read is waited for once, and misses batches; others get them all."""
        big = {"type": "BlockStored", "block_hashes": [bytes(100_000)]}
        self.enterContext(mock.patch("vua.cli.events._PATIENCE_MS", 1000))
        self.enterContext(mock.patch("vua.cli.events._LINGER_S", 0.0))
        out = EventSocket(self.out)
        slow = self.context.socket(self.zmq.SUB)
        slow.set_hwm(1)
        slow.connect(self.out)
        slow.subscribe(b"")
        self.addCleanup(slow.close, linger=0)
        with self.assertLogs("vua.cli.events", "WARNING") as logged, out:
            reader = self.socket(self.zmq.SUB, self.out)
            reader.subscribe(b"")
            out.newcomers = False
            until(lambda: out.wait(0.1) or out.newcomers)
            before, seen = resident_nbytes(), []
            for _ in range(300):
                out.publish([big])
                seen.append(int.from_bytes(reader.recv_multipart()[1], "big"))
            self.assertEqual(list(range(300)), seen)
            self.assertLess(resident_nbytes() - before, 24 << 20)
            slow.close(linger=0)
        self.assertEqual(1, len(logged.output), logged.output)

    @pytest.mark.thorough
    def test_end(self) -> None:
        """The end is bounded, also if libzmq never closes its connections."""
        done, term = threading.Event(), self.zmq.Context.term
        self.addCleanup(done.set)
        subscriber = self.socket(self.zmq.SUB, self.out)
        subscriber.subscribe(b"")
        with (
            mock.patch.object(self.zmq.Context, "term", lambda one: done.wait() and term(one)),
            mock.patch("vua.cli.events._LINGER_S", 0.0),
            EventSocket(self.out) as out,
        ):
            out.publish([])
        self.assertFalse(done.is_set())

    def test_endpoints(self) -> None:
        """One that cannot be used, and a package that is missing, are told in a sentence."""
        for endpoint in ("nonsense", "tcp://127.0.0.1:port", f"ipc://{self.folder}/no/such"):
            code, _, err = run("events", self.root, "--zmq", endpoint)
            self.assertEqual((2, 1), (code, len(err.splitlines())), err)
        with mock.patch.dict("sys.modules", {"zmq": None}):
            code, _, err = run("events", self.root, "--zmq", self.out)
        self.assertEqual(2, code)
        self.assertIn("pip install pyzmq msgspec", err)
