"""Mirrors `seal` and `keyring`: only who has the key writes what is read, and reads it."""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import sys
import unittest
from collections.abc import Iterator
from unittest import mock

import numpy as np
import pytest
import torch

from forgery import forged
from helpers import (
    PACKED,
    Memory,
    caches_of,
    flip,
    has_native,
    kv_bits,
    native_code,
    save_chunk,
)
from seals import CHUNKS, DEEP, KINDS, LATENT, NAMESPACE, SMALL, SealTest
from vua.core import VUA, VUAConfig
from vua.errors import ConfigError
from vua.format.entry import PLAIN, EntryCodec, SealInfo
from vua.format.keys import KeyChain, token_ids
from vua.format.layout import KVLayout, Shard
from vua.format.parse import EntryInfo, parse_entry
from vua.security.keyring import (
    KeyFaults,
    Keyring,
    KnownKeys,
    NoKeyError,
    check_keys,
    read_key,
    tenant_of,
    write_key,
)
from vua.security.settings import Security
from vua.store.store import LoadResult


def natives() -> Iterator[str]:
    """Both ways of loading, where there are two."""
    for native in ("off", "require") if has_native() else ("off",):
        with native_code(native):
            yield native


class TestRoundTrip(SealTest):
    """What was sealed comes back, as a whole and in parts."""

    def check(
        self, layout: KVLayout, writers: list[Shard], readers: list[Shard], *blocks: int | None
    ) -> None:
        """Let every reader read what the writers wrote, in each kind and by each way."""
        for encrypt in KINDS:
            store = self.store(layout, self.security(encrypt=encrypt))
            keys, model = self.save(store, shards=writers)
            for reader in readers:
                for block in blocks:
                    for native in natives():
                        with self.subTest(reader.name, native=native, encrypt=encrypt):
                            loaded = self.load(store, keys, model, reader, block)
                            self.assertEqual((CHUNKS, None), (loaded.chunks, loaded.reason))

    def test_shards(self) -> None:
        """Any reader gets its part of any writer's files, also where it cuts through blocks."""
        self.check(DEEP, [DEEP.full], [DEEP.full, Shard(3, 11, 1, 2)], 16)

    @pytest.mark.thorough
    def test_more_shards(self) -> None:
        """Likewise for other writers, layouts and memories."""
        pair = [Shard(0, 4, 0, 2), Shard(0, 4, 2, 4)]
        self.check(SMALL, pair, [SMALL.full, Shard(1, 2, 1, 3)], None, 2, PACKED)
        self.check(DEEP, [DEEP.full], [DEEP.full, Shard(0, 1, 0, 1)], None, PACKED)
        self.check(LATENT, [LATENT.full], [LATENT.full, Shard(2, 9, 0, 1)], None, 8, PACKED)

    def test_stored_bytes(self) -> None:
        """Encrypted payloads share nothing with the values, those in clear are the values."""
        for encrypt in KINDS:
            store = self.store(security=self.security(encrypt=encrypt))
            keys, model = self.save(store)
            payload = self.file(keys, 0).read_bytes()[4096:]
            k = np.moveaxis(model[0][:, :, : SMALL.chunk_tokens], 0, 1).tobytes()

            self.assertEqual(encrypt, not payload.startswith(k))
            if encrypt:
                same = np.frombuffer(payload[: len(k)], "u1") == np.frombuffer(k, "u1")
                self.assertLess(same.mean(), 0.05)

    def test_same_again(self) -> None:
        """Two files of the same chunk are different throughout: each has a nonce of its own."""
        store = self.store(security=self.security(encrypt=True))
        keys, _ = self.save(store)
        first = self.file(keys).read_bytes()
        self.file(keys).unlink()
        self.save(store)
        second = self.file(keys).read_bytes()

        self.assertNotEqual(parse_entry(first).seal_info.nonce, parse_entry(second).seal_info.nonce)
        same = np.frombuffer(first[4096:], "u1") == np.frombuffer(second[4096:], "u1")
        self.assertLess(same.mean(), 0.05)

    def test_nonce_again(self) -> None:
        """Two chunks of one nonce, as cloned machines make them, are not of one key."""
        for encrypt in KINDS:
            store = self.store(security=self.security(encrypt=encrypt))
            with mock.patch("vua.security.seal.new_nonce", return_value="ab" * 16):
                keys, _ = self.save(store)
            first, second = (self.file(keys, at).read_bytes() for at in (0, 1))
            seal, bounds = store.keyring.seal(), []
            assert seal is not None
            codec = store.codec(SMALL.full, seal.kind)
            for data, key in ((first, keys[0]), (second, keys[1])):
                at = parse_entry(data).header_nbytes
                payload = memoryview(bytearray(data[at:]))
                sizes = codec.block_nbytes()
                ends = [sum(sizes[: n + 1]) for n in range(len(sizes))]
                blocks = [[payload[a:b]] for a, b in itertools.pairwise([0, *ends])]
                seal.open(codec, key, memoryview(data[:at]), blocks, range(codec.blocks))
                bounds.append(bytes(payload))
            if encrypt:  # a stream that is used twice shows the difference of two texts
                one, two = (np.frombuffer(data[4096:], "u1") for data in (first, second))
                clear = np.frombuffer(bounds[0], "u1") ^ np.frombuffer(bounds[1], "u1")
                self.assertLess((one ^ two == clear).mean(), 0.05)
            else:  # a tag of one is none of another, though text and place are the same
                tags = [codec.seal_of(memoryview(data[:4096]))[1] for data in (first, second)]
                self.assertFalse(np.array_equal(tags[0], tags[1]))


class TestNames(SealTest):
    """What names tell."""

    def test_disjoint(self) -> None:
        """With each key, kind and namespace the same prompt has other names throughout."""
        ids, seen = token_ids(range(12)), []
        namings = [None]
        for namespace in (NAMESPACE, "cd" * 32):
            for encrypt in KINDS:
                keyring = Keyring(namespace, self.security(encrypt=encrypt))
                namings.append(keyring.naming())
            namings += [keyring.naming(b"alice"), keyring.naming(b"bob")]
        for naming in namings:
            chain = KeyChain(ids, 4, {1: [("image", b"x")]}, naming)
            seen += [part for n in range(3) for part in (chain[n].prefix_hash, chain[n].parent)]
        distinct = {part for part in seen if part}

        self.assertEqual(len(namings) * 4, len(distinct))  # 3 names, and one parent by extras

    def test_pins(self) -> None:
        """Pins of the library hold what is stored under secret names, and only with the key."""
        tokens, kv = list(range(8)), caches_of(layers=1, heads=1, tokens=8, dim=8)
        config = VUAConfig(split_factor=4, security=self.security())
        with VUA(config, self.root / "cache") as vua:
            self.assertEqual(2, vua.put(tokens, kv))
            self.assertEqual([8], vua.pin(tokens))
        with VUA(VUAConfig(split_factor=4), self.root / "cache") as vua:
            self.assertEqual([0], vua.unpin(tokens))
        with VUA(config, self.root / "cache") as vua:
            self.assertEqual([8], vua.unpin(tokens))

    def test_repr(self) -> None:
        """Nothing that is printed holds a secret."""
        keyring = Keyring(NAMESPACE, self.security())
        seal, naming = keyring.seal(), keyring.naming()
        shown = f"{seal!r} {naming!r} {keyring!r} {self.security()!r}"

        self.assertNotIn(self.key.read_text().strip(), shown)
        self.assertNotIn(repr(naming.secret)[2:-1], shown)
        self.assertNotIn("_files", shown)


class TestForged(SealTest):
    """Files of somebody who may write to the directory, knows the format, and has no key."""

    def attacks(self, info: EntryInfo, data: bytes, other: bytes) -> Iterator[tuple[str, bytes]]:
        """What such a person may try in place of a file: from it, and from another chunk's."""
        at, blocks = info.header_nbytes, len(info.checksums)
        codec = EntryCodec(info.namespace, info.layout, info.shard, info.kind)
        tags = codec.seal_of(memoryview(data[:at]))[1]
        foreign = codec.seal_of(memoryview(other[:at]))[1].tobytes()
        payload = bytearray(data[at:])
        for place in (0, 1, len(payload) // 2, len(payload) - 1):
            changed = payload[:]
            changed[place] ^= 0x10
            yield f"bit of byte {place}", forged(data, payload=bytes(changed))
        size = codec.block_nbytes()[0]
        swapped = payload[size : 2 * size] + payload[:size] + payload[2 * size :]
        yield "blocks swapped", forged(data, payload=bytes(swapped))
        turned = tags.copy()
        turned[[0, 1]] = turned[[1, 0]]
        yield (
            "blocks swapped with their tags",
            forged(data, payload=bytes(swapped), tags=turned.tobytes()),
        )
        yield "tags of zeros", forged(data, tags=bytes(16 * blocks))
        yield "other's payload", forged(data, payload=other[at:])
        yield "other's payload and tags", forged(data, payload=other[at:], tags=foreign)
        seal_info = parse_entry(other).seal_info
        yield (
            "other's all but the key",
            forged(data, payload=other[at:], tags=foreign, seal_info=seal_info),
        )
        yield "another nonce", forged(data, seal_info=SealInfo(info.seal_info.key_id, "0" * 32))
        yield "another key's name", forged(data, seal_info=SealInfo("0" * 16, info.seal_info.nonce))
        plain = EntryCodec(info.namespace, info.layout, info.shard)
        yield "plain", forged(data, codec=plain, seal_info=PLAIN, tags=b"")

    @pytest.mark.thorough
    def test_attacks(self) -> None:
        """None is taken for the chunk: each is a miss, and goes out of sight."""
        for encrypt in KINDS:
            store = self.store(security=self.security(encrypt=encrypt))
            keys, model = self.save(store)
            path = self.file(keys)
            sound, other = path.read_bytes(), self.file(keys, 2).read_bytes()
            self.assertEqual(parse_entry(sound).seal_info, parse_entry(forged(sound)).seal_info)
            for native in natives():
                for name, data in self.attacks(parse_entry(sound), sound, other):
                    with self.subTest(name, encrypt=encrypt, native=native):
                        self.assertEqual(len(sound), len(data))
                        path.write_bytes(data)
                        loaded = self.load(store, keys, model)

                        self.assertEqual(1, loaded.chunks)
                        self.assertIn(loaded.reason, ("corrupt", "foreign"))
                        self.assertFalse(path.exists())
            path.write_bytes(sound)
            self.assertEqual(CHUNKS, self.load(store, keys, model).chunks)

    def test_control(self) -> None:
        """The forger is good enough: a store without keys takes a forged file for its own."""
        store = self.store(security=Security())
        keys, model = self.save(store)
        path = self.file(keys)
        data = path.read_bytes()
        payload = bytes([data[4096] ^ 1]) + data[4097:]
        path.write_bytes(forged(data, payload=payload))
        memory = Memory(SMALL, SMALL.full, CHUNKS)
        loaded = store.load(keys, memory.map())

        self.assertEqual((CHUNKS, None), (loaded.chunks, loaded.reason))
        expected = Memory(SMALL, SMALL.full, CHUNKS).fill(model)
        self.assertFalse(np.array_equal(expected.buffers[0], memory.buffers[0]))

    def test_damage(self) -> None:
        """Damage is found and healed as in plain files."""
        store = self.store(security=self.security(encrypt=True))
        keys, model = self.save(store)
        for at in (0, 40, 300, 700, 4000, 4096, 5000):
            path = self.file(keys)
            flip(path, at)
            self.assertEqual(1, self.load(store, keys, model).chunks)
            self.save(store)
            self.assertEqual(CHUNKS, self.load(store, keys, model).chunks)


class TestKeys(SealTest):
    """Keys in files."""

    def test_deleted(self) -> None:
        """Without its key a tenant's chunks are gone at once, others' are not; none is put."""
        store = self.store(security=Security(tenant_keys=str(self.keys)))
        plain, model = self.save(store)
        alice, hers = self.save(store, b"alice")
        bob, his = self.save(store, b"bob")
        self.assertEqual(CHUNKS, self.load(store, alice, hers).chunks)
        key = self.keys / f"{tenant_of(b'alice')}.key"
        aside = key.rename(self.root / "aside")

        self.assertEqual(LoadResult(0, "locked"), self.load(store, alice))
        self.assertEqual(CHUNKS, self.load(store, bob, his).chunks)
        self.assertEqual(CHUNKS, self.load(store, plain, model).chunks)
        with self.assertRaisesRegex(NoKeyError, "No such file"):
            store.keyring.naming(b"alice")
        self.file(alice).unlink()
        memory = Memory(SMALL, SMALL.full, CHUNKS).map()
        self.assertFalse(save_chunk(store, alice[1], memory, place=1))
        self.assertEqual(1, store.counts["chunks_refused"])
        aside.rename(key)
        self.assertEqual(1, self.load(store, alice, hers).chunks)

    def test_another_key(self) -> None:
        """A new key in its place does not open what the old one sealed: its names are others."""
        store = self.store(security=self.security(encrypt=True))
        keys, _ = self.save(store)
        self.key.unlink()
        write_key(self.key)
        again = KeyChain(token_ids(range(12)), 4, naming=store.keyring.naming())

        self.assertEqual((CHUNKS, 0), (store.lookup(keys), store.lookup(again)))
        self.assertEqual(0, self.load(store, keys).chunks)

    def test_unusable(self) -> None:
        """A key that others may read, or that is none, is refused with what to do."""
        good = self.key.read_text()
        for mode, text, expected in (
            (0o644, good, "mode 644; expected.*mode 600 or 400.*chmod it to 600"),
            (0o604, good, "mode 604"),
            (0o620, good, "mode 620"),
            (0o460, good, "mode 460"),
            (0o600, good[:-3], "64 hex digits"),
            (0o600, "z" * 64, "64 hex digits"),
            (0o600, "", "64 hex digits"),
        ):
            with self.subTest(expected):
                self.key.write_text(text)
                self.key.chmod(mode)
                with self.assertRaisesRegex(NoKeyError, expected):
                    Keyring(NAMESPACE, self.security()).naming()
        self.key.unlink()
        for make in (os.mkfifo, os.mkdir):
            make(self.key)
            with self.assertRaises(NoKeyError):
                read_key(self.key)
            self.key.rmdir() if self.key.is_dir() else self.key.unlink()

    @pytest.mark.thorough
    @unittest.skipUnless(os.geteuid() == 0, "only root can give files to others")
    def test_group(self) -> None:
        """A pod's user reads the Secret that its fsGroup may read; others' keys are refused."""
        uid, group = 4242, 4343
        self.root.chmod(0o755)
        for owner, mode, usable in (
            (0, 0o440, True),
            (0, 0o640, True),
            (uid, 0o400, True),
            (uid, 0o440, True),
            (0, 0o444, False),
            (0, 0o460, False),
            (uid, 0o660, False),
            (4244, 0o440, False),
            (0, 0o400, False),  # the system refuses it
        ):
            os.chown(self.key, owner, group)
            self.key.chmod(mode)
            child = os.fork()
            if not child:
                code = 9
                with contextlib.suppress(BaseException):
                    os.setgroups([group])
                    os.setresgid(group, group, group)
                    os.setresuid(uid, uid, uid)
                    try:
                        code = 0 if len(read_key(self.key)) == 32 else 8
                    except NoKeyError as problem:
                        code = 1 if "expected" in str(problem) or problem.fault != "wrong" else 7
                os._exit(code)
            with self.subTest(owner=owner, mode=oct(mode)):
                code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
                self.assertEqual(0 if usable else 1, code)

    def test_directory(self) -> None:
        """Keys in a directory that all may write to are not believed, at the start and later."""
        ring = Keyring(NAMESPACE, self.security())
        self.keys.chmod(0o777)
        with self.assertRaisesRegex(ConfigError, "keys.*mode 777.*chmod it to 700"):
            check_keys(self.security())
        with self.assertRaisesRegex(ConfigError, "mode 777"):
            KnownKeys(self.security())
        anybody = Security(tenant_keys=str(self.keys), trusted_uids="any")
        for keyring in (ring, Keyring(NAMESPACE, anybody)):
            with self.assertRaisesRegex(NoKeyError, "mode 777"):
                keyring.naming(b"alice")
        for mode in (0o700, 0o750, 0o1777):  # of a Secret's volume: sticky
            self.keys.chmod(mode)
            check_keys(self.security())
            self.assertTrue(ring.naming(b"alice"))
        self.keys.chmod(0o777)
        with self.assertRaisesRegex(NoKeyError, "mode 777"):
            ring.naming(b"alice")

    @unittest.skipUnless(os.geteuid() == 0, "only root can give files to others")
    def test_foreign_directory(self) -> None:
        """A directory of keys belongs to this process's user, to root or to whom is trusted."""
        os.chown(self.keys, 4242, -1)
        with self.assertRaisesRegex(ConfigError, "belongs to user 4242"):
            check_keys(self.security())
        check_keys(Security(tenant_keys=str(self.keys), trusted_uids=[4242]))

    def test_faults_are_told(self) -> None:
        """Each key's fault is logged once a minute, and invented salts silence no other kind."""
        now_s = [0.0]
        faults = KeyFaults(clock=lambda: now_s[0])
        ring = Keyring(NAMESPACE, self.security())
        alice, bob = (self.keys / f"{tenant_of(salt)}.key" for salt in (b"alice", b"bob"))
        ring.naming(b"alice")

        def tell(*salts: bytes) -> list[str]:
            with self.assertLogs("vua.security.keyring", "WARNING") as logged:
                logging.getLogger("vua.security.keyring").warning("-")
                for salt in salts:
                    with self.assertRaises(NoKeyError) as caught:
                        ring.naming(salt)
                    faults.tell(caught.exception, "not cached")
            return [line for line in logged.output if not line.endswith(":-")]

        invented = [b"salt %d" % n for n in range(1000)]
        self.assertLessEqual(len(tell(*invented)), 20)
        alice.unlink()
        bob.chmod(0o644)
        lines = tell(b"alice", b"bob", b"alice", b"bob", *invented)
        self.assertEqual(2, len(lines), lines)
        self.assertIn(alice.name, lines[0])
        self.assertIn(bob.name, lines[1])
        now_s[0] += 61
        lines = tell(b"bob", b"carol", b"bob")
        self.assertIn(bob.name, "".join(lines))
        self.assertIn(tenant_of(b"carol"), "".join(lines))

    @unittest.skipUnless(os.geteuid() == 0, "only root can give files to others")
    def test_foreign(self) -> None:
        """A key that belongs to another user is not used."""
        os.chown(self.key, 4242, -1)
        with self.assertRaisesRegex(NoKeyError, "belongs to user 4242"):
            read_key(self.key)

    def test_written_once(self) -> None:
        """A key is never overwritten, is of 32 bytes, and private whatever the umask."""
        before = os.umask(0)
        try:
            write_key(self.root / "new")
        finally:
            os.umask(before)
        self.assertEqual(0o600, (self.root / "new").stat().st_mode & 0o777)
        self.assertEqual(32, len(read_key(self.root / "new")))
        self.assertNotEqual(read_key(self.key), read_key(self.root / "new"))
        with self.assertRaises(FileExistsError):
            write_key(self.root / "new")

    def test_no_package(self) -> None:
        """Without the package the error says what to install; plain caches do without it."""
        with mock.patch.dict(sys.modules, {"vua.security.seal": None}):
            with self.assertRaisesRegex(ConfigError, "pip install cryptography"):
                Keyring(NAMESPACE, self.security()).naming()
            self.assertIsNone(Keyring(NAMESPACE, Security()).naming())

    def test_checked_at_start(self) -> None:
        """Keys that cannot be used are refused when a cache is opened, in the library too."""
        for settings in (
            {"key_file": str(self.root / "absent")},
            {"tenant_keys": str(self.root / "absent")},
            {"tenant_keys": str(self.key)},
        ):
            with self.subTest(settings), self.assertRaises(ConfigError):
                VUA(VUAConfig(security=Security(**settings)), self.root / "cache")
        check_keys(self.security())
        with self.assertRaisesRegex(ConfigError, "vua.security.settings.Security"):
            VUA(VUAConfig(security={"encrypt": False}), self.root / "cache")

    def test_library(self) -> None:
        """The library's front door: with the key all is there, without it nothing."""
        tokens, kv = torch.arange(64), caches_of(layers=1, heads=1, tokens=64, dim=8)
        config = VUAConfig(security=self.security(encrypt=True))
        with VUA(config, self.root / "cache") as vua:
            self.assertEqual(1, vua.put(tokens, kv))
            self.assertEqual(kv_bits(kv), kv_bits(vua.get_closest(tokens).data))
            self.key.unlink()
            self.assertFalse(vua.get_closest(tokens))
            with self.assertRaises(NoKeyError):
                vua.put(tokens, kv)
        with VUA(VUAConfig(), self.root / "cache") as vua:
            self.assertFalse(vua.get_closest(tokens))

    def test_salts(self) -> None:
        """Salts never become paths, and those without a key are not cached."""
        keyring = Keyring(NAMESPACE, self.security())
        self.assertEqual(tenant_of(b"alice"), keyring.naming(b"alice").tenant)
        for salt in (b"../own", b"carol", b"\x00", b"a" * 5000):
            with self.subTest(salt), self.assertRaises(NoKeyError):
                keyring.naming(salt)
        without = Keyring(NAMESPACE, Security(key_file=str(self.key)))
        self.assertEqual("", without.naming(b"carol").tenant)
