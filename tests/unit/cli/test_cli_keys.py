"""Mirrors `vua.cli.command` and `vua.cli.prompt`: what the tools do with keys."""

from __future__ import annotations

import pickle
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from commands import run, run_json
from forgery import forged
from helpers import flip
from seals import ALICE, CHUNKS, KINDS, LONG, SMALL, WIDE, KeysTest
from vua.format.entry import AUTHENTIC, ENCRYPTED, SealInfo
from vua.format.layout import KVLayout, Shard
from vua.format.parse import codec_of, parse_entry
from vua.security.keyring import KnownKeys
from vua.security.settings import Security


class TestVerify(KeysTest):
    """`vua verify` with keys."""

    def verify(self, *arguments: str | Path) -> tuple[int, dict[str, Any]]:
        """Exit code, and the report of the only namespace."""
        code, report = run_json("verify", self.cache, *arguments)
        (one,) = report["namespaces"]
        return code, one

    def test_proved(self) -> None:
        """Files of every key given are proved, whole models and slices of either kind."""
        halves = [Shard(0, 20, 0, 1), Shard(0, 13, 1, 3), Shard(13, 20, 1, 3)]
        for encrypt, shards in zip(KINDS, (None, halves), strict=True):
            shutil.rmtree(self.cache, ignore_errors=True)
            store = self.store(LONG, self.security(encrypt=encrypt))
            self.save(store, shards=shards)
            self.save(store, ALICE)
            before = self.snapshot()
            files = CHUNKS * len(shards or [LONG.full])
            own, hers = self.id_of(self.key), self.id_of(self.key_of(ALICE))
            everything = {own: files, hers: CHUNKS}
            for arguments, proved in (
                (self.given, everything),
                (("--key-file", self.key), {own: files}),
                (("--tenant-keys", self.keys), {hers: CHUNKS}),
                (("--key-file", self.wrong), {}),
                ((), {}),
            ):
                with self.subTest(arguments, encrypt=encrypt):
                    code, one = self.verify(*arguments)

                    self.assertEqual((0, []), (code, one["problems"]))
                    self.assertEqual((everything, proved), (one["sealed"], one["authentic"]))
            self.assertEqual(before, self.snapshot())

    def test_report(self) -> None:
        """People are told what was proved, what needs a key and what no key can tell."""
        store = self.store()
        self.save(store)
        self.save(store, ALICE)
        self.save(self.store(security=Security()))
        own, hers = self.id_of(self.key), self.id_of(self.key_of(ALICE))
        _, out, _ = run("verify", self.cache, "--key-file", self.key)

        self.assertIn(f"3 files are sealed with key {own}: 3 of them proved to be written", out)
        self.assertIn(f"3 files are sealed with key {hers}: checked for damage; who wrote", out)
        self.assertIn("3 files are not sealed: the writer is not proved", out)
        _, out, _ = run("verify", self.cache)
        self.assertEqual(2, out.count("who wrote them needs the key"))
        self.assertNotIn("not sealed", out)

    def forgeries(self, sound: bytes, other: bytes) -> Iterator[tuple[str, bytes]]:
        """Files with right checksums, of somebody who has no key."""
        info, at = parse_entry(sound), parse_entry(sound).header_nbytes
        tags = bytearray(codec_of(info).seal_of(memoryview(sound[:at]))[1].tobytes())
        for place in (at, len(sound) - 1):
            changed = bytearray(sound)
            changed[place] ^= 1
            yield f"payload at {place}", forged(sound, payload=bytes(changed[at:]))
        for place in (0, len(tags) - 1):
            turned = tags[:]
            turned[place] ^= 0x80
            yield f"tag at {place}", forged(sound, tags=bytes(turned))
        yield "another nonce", forged(sound, seal_info=SealInfo(info.seal_info.key_id, "0" * 32))
        yield "another chunk in its place", forged(other, key=info.key)

    def test_forged(self) -> None:
        """What somebody without the key wrote is corrupt for who has it, and only for them."""
        for encrypt in KINDS:
            store = self.store(security=self.security(encrypt=encrypt))
            keys, _ = self.save(store)
            path = self.file(keys)
            sound, other = path.read_bytes(), self.file(keys, 2).read_bytes()
            for name, data in self.forgeries(sound, other):
                with self.subTest(name, encrypt=encrypt):
                    path.write_bytes(data)
                    code, one = self.verify(*self.given)
                    proved = one["authentic"][self.id_of(self.key)]
                    (problem,) = one["problems"]

                    self.assertEqual((1, CHUNKS - 1), (code, proved))
                    self.assertEqual("corrupt", problem["outcome"])
                    self.assertRegex(problem["reason"], "tags do not match.*without the key")
                    self.assertEqual(0, self.verify()[0])
                    self.assertEqual(0, self.verify("--key-file", self.wrong)[0])
            shutil.rmtree(self.cache)

    def test_which_block(self) -> None:
        """The reason names the part of the model whose tag is wrong, also far into a long file."""
        for encrypt in KINDS:
            keys, _ = self.save(self.store(LONG, self.security(encrypt=encrypt)))
            path = self.file(keys)
            sound = path.read_bytes()
            path.write_bytes(forged(sound, payload=sound[4096:-1] + bytes([sound[-1] ^ 1])))
            _, one = self.verify(*self.given)
            self.assertIn("1 of 18 tags do not match", one["problems"][0]["reason"])
            self.assertIn("V, head 2, layers 16-20", one["problems"][0]["reason"])
            shutil.rmtree(self.cache)

    def test_repair(self) -> None:
        """A forged file is taken out of sight like a damaged one; without its key it stays."""
        keys, _ = self.save(self.store(security=self.security(encrypt=True)))
        path = self.file(keys)
        sound = path.read_bytes()
        path.write_bytes(forged(sound, payload=sound[4096:-1] + bytes([sound[-1] ^ 1])))
        self.assertEqual(0, self.verify("--repair")[0])
        self.assertTrue(path.exists())
        code, one = self.verify("--repair", *self.given)

        self.assertEqual((0, 1, False), (code, one["removed"], path.exists()))
        self.assertEqual(CHUNKS - 1, len(self.entries()))
        self.assertEqual(1, len(list(self.cache.glob("*/quarantine/*"))))

    def test_unusable(self) -> None:
        """Keys that cannot be used are told, and nothing is looked at."""
        self.save(self.store())
        (self.keys / "odd.key").write_text("nothing")
        for arguments, words in (
            (("--key-file", self.root / "absent"), "No such file"),
            (("--tenant-keys", self.root / "absent"), "is not a directory"),
            (("--tenant-keys", self.keys), "odd.key"),
            (("--encrypt",), "encrypt needs a key_file"),
        ):
            code, out, err = run("verify", self.cache, *arguments)
            self.assertEqual((2, ""), (code, out), arguments)
            self.assertIn(words, err)

    def test_processes(self) -> None:
        """Keys reach the processes that share the work on a large directory."""
        keys = KnownKeys(self.security())
        again = pickle.loads(pickle.dumps(keys))
        self.assertEqual((3, keys.ids), (len(keys.ids), again.ids))
        self.assertNotIn(self.key.read_text().strip(), repr(keys))


class TestExplain(KeysTest):
    """`vua explain` with keys."""

    def ask(self, *arguments: str | Path, layout: KVLayout = SMALL) -> tuple[int, dict[str, Any]]:
        """Exit code, and what is said of the only namespace."""
        code, report = run_json("explain", self.cache, "--tokens", self.tokens(layout), *arguments)
        (one,) = report["namespaces"]
        return code, one

    def test_own(self) -> None:
        """A prompt of the directory's key is found with it, and with none or another one not."""
        for encrypt, kind in zip(KINDS, (AUTHENTIC, ENCRYPTED), strict=True):
            self.save(self.store(WIDE, self.security(encrypt=encrypt)))
            given = ("--key-file", self.key, *(["--encrypt"] if encrypt else []))
            code, one = self.ask(*given, layout=WIDE)

            self.assertEqual((0, CHUNKS), (code, one["usable_chunks"]))
            self.assertEqual((kind, self.id_of(self.key)), (one["seal"], one["key"]))
            for other in ((), ("--key-file", self.wrong)):
                self.assertEqual(0, self.ask(*other, layout=WIDE)[1]["usable_chunks"])
            shutil.rmtree(self.cache)

    def test_tenant(self) -> None:
        """A salt's prompt is found with its key; without that it is not cached, as is said."""
        store = self.store(security=Security(tenant_keys=str(self.keys)))
        self.save(store, ALICE)
        given = ("--tenant-keys", self.keys)
        code, one = self.ask(*given, "--salt", "alice")
        self.assertEqual((0, CHUNKS), (code, one["usable_chunks"]))
        self.assertEqual(self.id_of(self.key_of(ALICE)), one["key"])
        self.assertEqual(0, self.ask(*given, "--salt", "bob")[1]["usable_chunks"])
        self.assertIsNone(self.ask(*given)[1]["key"])
        self.key_of(ALICE).unlink()
        code, one = self.ask(*given, "--salt", "alice")

        expected = "not cached: no key for this salt; `vua key DIR --salt S`"
        self.assertEqual((0, expected), (code, one["verdict"]))
        _, out, _ = run("explain", self.cache, "--tokens", self.tokens(), *given, "--salt", "carol")
        self.assertIn(expected, out)

    def test_damage(self) -> None:
        """A damaged header of a sealed file is found, and a sealed one under a key is its own."""
        keys, _ = self.save(self.store())
        flip(self.file(keys), 300)
        code, one = self.ask(*self.given)
        gap = one["groups"][0]["first_missing"]
        self.assertEqual((1, 1, "damaged"), (code, gap["chunk"], gap["state"]))


class TestTransfer(KeysTest):
    """Sealed files in archives."""

    def test_everything(self) -> None:
        """Of either kind whole directories move without any key."""
        store = self.store(WIDE)
        self.save(store)
        self.save(store, ALICE)
        archive, there = self.root / "archive.tar", self.root / "there"
        self.assertEqual(0, run("export", self.cache, archive, "--all")[0])
        self.assertEqual(0, run("import", there, archive)[0])
        moved = {path.relative_to(there): path.read_bytes() for path in there.glob("*/??/*/*")}
        here = {path.relative_to(self.cache): data for path, data in self.entries().items()}
        self.assertEqual((2 * CHUNKS, here), (len(moved), moved))


class TestPackage(KeysTest):
    """Without the package that keys need."""

    def test_missing(self) -> None:
        """Whoever gives keys is told what to install; the rest works, on sealed files too."""
        self.save(self.store())
        with mock.patch.dict(sys.modules, {"vua.security.seal": None}):
            for words in (
                ("verify", self.cache),
                ("explain", self.cache, "--tokens", self.tokens()),
            ):
                for given in (("--key-file", self.key), ("--tenant-keys", self.keys)):
                    code, out, err = run(*words, *given)
                    self.assertEqual((2, ""), (code, out), words)
                    self.assertIn("pip install cryptography", err)
            self.assertEqual(0, run("verify", self.cache)[0])
