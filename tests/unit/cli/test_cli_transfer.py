"""Mirrors `vua.cli.transfer`: what goes into an archive, and what of one is not taken."""

from __future__ import annotations

import io
import json
import os
import tarfile
from pathlib import Path
from unittest import mock

import torch

from commands import run, run_json
from helpers import DirectoryTest, Memory, caches_of, flip, kv_bits, model_arrays, save_chunk
from vua.capacity.limits import Limits, write_bounds
from vua.capacity.listing import ancestors
from vua.capacity.spaces import Space
from vua.cli.transfer import Writer
from vua.core import VUA, VUAConfig
from vua.format.identity import Identity
from vua.format.keys import KeyChain, token_ids
from vua.format.layout import KVLayout
from vua.store.namespace import Namespace

TRUNK, BRANCH = list(range(16)), [*range(8), *range(40, 52)]
CONFIG = VUAConfig(split_factor=4, model="one")
END = "vua-export.end.json"
Members = list[tuple[str, bytes]]


def names_of(tokens: list[int]) -> list[str]:
    return [key.name for key in KeyChain(token_ids(tokens), 4).first(len(tokens) // 4)]


class TransferTest(DirectoryTest):
    """A directory with a forked prompt of one model and a chunk of another one."""

    def setUp(self) -> None:
        super().setUp()
        self.here, self.there = self.root / "here", self.root / "there"
        self.file = self.root / "archive.tar"
        for config, prompts in ((CONFIG, (TRUNK, BRANCH)), (self.other(), ([1, 2, 3, 4],))):
            with VUA(config, self.here) as vua:
                for prompt in prompts:
                    vua.put(torch.tensor(prompt), self.cache(len(prompt)))
        (self.space,) = (path for path in self.here.iterdir() if len(self.entries(path)) == 7)
        self.description = (self.space / "namespace.json").read_bytes()

    @staticmethod
    def other() -> VUAConfig:
        return VUAConfig(split_factor=4, model="two")

    @staticmethod
    def cache(tokens: int) -> list[list[torch.Tensor]]:
        return caches_of(layers=2, heads=2, tokens=tokens, dim=8)

    @staticmethod
    def entries(path: Path) -> list[str]:
        """The files of chunks below a directory, by their names in it."""
        found = path.rglob("*.safetensors")
        return sorted(str(one.relative_to(path)) for one in found if "quarantine" not in one.parts)

    def members(self) -> Members:
        with tarfile.open(self.file) as archive:
            return [(one.name, archive.extractfile(one).read()) for one in archive]  # type: ignore[union-attr]

    def rewrite(self, members: Members) -> None:
        """Make an archive of these, whole as far as its end can tell."""
        with self.file.open("wb") as stream:
            writer = Writer(stream)
            for name, data in members:
                if not name.startswith("vua-export"):
                    writer.add(name, data)
            writer.close()


class TestRoundTrip(TransferTest):
    """What goes in comes out."""

    def test_everything(self) -> None:
        """All of a directory arrives byte for byte, is found and read there; a second time none."""
        code, report = run_json("export", self.here, self.file, "--all")
        self.assertEqual(
            (0, 8, 8, []), (code, *(report[k] for k in ("chunks", "files", "problems")))
        )
        self.assertEqual(0o600, self.file.stat().st_mode & 0o777)
        code, report = run_json("import", self.there, self.file)
        self.assertEqual(
            (0, 8, 0, 0), (code, *(report[k] for k in ("written", "present", "refused")))
        )
        self.assertEqual(self.entries(self.here), self.entries(self.there))
        for name in self.entries(self.here):
            self.assertEqual((self.here / name).read_bytes(), (self.there / name).read_bytes())
        self.assertEqual(0, run("verify", self.there)[0])
        with VUA(CONFIG, self.there) as vua:
            found = vua.get_closest(torch.tensor(TRUNK))
            self.assertEqual(len(BRANCH), vua.get_closest(torch.tensor(BRANCH)).num_tokens)
        self.assertEqual(kv_bits(self.cache(16), 16), kv_bits([list(pair) for pair in found.data]))
        before = self.snapshot()
        code, report = run_json("import", self.there, self.file)
        self.assertEqual((0, 0, 8), (code, report["written"], report["present"]))
        after = self.snapshot()
        entries = [path for path in before if path.endswith((".safetensors", ".json"))]
        self.assertEqual([before[path] for path in entries], [after[path] for path in entries])

    def test_prefix(self) -> None:
        """A chunk brings its prefix; with --following what comes after it."""
        middle = names_of(TRUNK)[1]
        for arguments, expected in (
            ([middle[:20]], 2),
            ([middle, "--following"], 7),
            ([self.space.name[:12]], 7),
        ):
            self.file.unlink(missing_ok=True)
            code, report = run_json("export", self.here, self.file, *arguments)
            self.assertEqual((0, expected), (code, report["chunks"]), arguments)

    def test_extras(self) -> None:
        """A chunk with an image in mid-prompt knows its prefix on the other side too."""
        layout = KVLayout(layers=1, kv_heads=1, k_dim=8, v_dim=8, dtype="F32", chunk_tokens=4)
        identity = Identity(model="image", kv_dtype="F32", chunk_tokens=4)
        store = Namespace.create(self.here, identity, [layout]).stores[0]
        keys = KeyChain(token_ids(list(range(16))), 4, {2: [("multimodal", b"picture")]})
        memory = Memory(layout, layout.full, 4).fill(model_arrays(layout, 4)).map()
        for place in range(4):
            save_chunk(store, keys[place], memory, place=place)
        self.assertEqual(0, run("export", self.here, self.file, keys[3].name)[0])
        self.assertEqual(0, run("import", self.there, self.file)[0])
        taken = Namespace.create(self.there, identity, [layout]).stores[0]
        self.assertEqual(4, taken.lookup(keys))
        fd = taken.storage.fileno()  # type: ignore[attr-defined]
        found = list(ancestors(Space(identity.namespace, fd), keys[3].name))
        self.assertEqual([keys[place].name for place in (3, 2, 1, 0)], found)

    def test_stream(self) -> None:
        """Archives go through pipes."""
        with mock.patch("sys.stdout", io.TextIOWrapper(io.BytesIO())) as out:
            with mock.patch("sys.stderr", io.StringIO()):
                from vua.cli import main

                self.assertEqual(0, main(["export", str(self.here), "-", "--all"]))
            data = out.buffer.getvalue()  # type: ignore[attr-defined]
        with mock.patch("sys.stdin", io.TextIOWrapper(io.BytesIO(data))):
            self.assertEqual(0, run("import", self.there, "-")[0])
        self.assertEqual(self.entries(self.here), self.entries(self.there))


class TestExport(TransferTest):
    """What is not exported."""

    def test_damage(self) -> None:
        """A damaged chunk is left out with all that follows it, and told."""
        (path,) = (self.space / "x").parent.rglob(f"{names_of(TRUNK)[2]}/*.safetensors")
        flip(path, path.stat().st_size - 1)
        code, report = run_json("export", self.here, self.file, "--all")
        self.assertEqual((1, 6, 1), (code, report["chunks"], len(report["problems"])))
        self.assertIn("checksum", report["problems"][0])
        self.assertEqual(0, run("import", self.there, self.file)[0])
        self.assertEqual(6, len(self.entries(self.there)))

    def test_huge(self) -> None:
        """A file longer than any of its namespace can be is told, and not read whole."""
        (path,) = (self.space / "x").parent.rglob(f"{names_of(TRUNK)[2]}/*.safetensors")
        os.truncate(path, 1 << 36)  # a hole, 64 GiB
        os.truncate(self.space / "namespace.json", 1 << 36)
        code, report = run_json("export", self.here, self.file, "--all")
        self.assertEqual((1, 6), (code, report["chunks"]))  # headers say what they are
        os.truncate(self.space / "namespace.json", len(self.description))
        self.file.unlink()
        code, report = run_json("export", self.here, self.file, "--all")
        self.assertEqual((1, 6, 1), (code, report["chunks"], len(report["problems"])))
        self.assertIn("bytes long, expected", report["problems"][0])


class TestHostile(TransferTest):
    """What is not taken in."""

    def setUp(self) -> None:
        super().setUp()
        self.assertEqual(0, run("export", self.here, self.file, names_of(TRUNK)[3])[0])
        self.sound = self.members()

    def taken(self) -> tuple[int, int]:
        """Import; return the exit status and how many files are there then."""
        code = run("import", self.there, self.file)[0]
        found = self.entries(self.there) if self.there.is_dir() else []
        for name in found:
            self.assertEqual((self.here / name).read_bytes(), (self.there / name).read_bytes())
        return code, len(found)

    def test_every_member_changed(self) -> None:
        """A bit changed anywhere in a file: neither it nor what follows it is written."""
        self.rewrite(self.sound)  # as it is, it is taken in whole
        self.assertEqual((0, 4), self.taken())
        files = [at for at, (name, _) in enumerate(self.sound) if name.endswith("safetensors")]
        for place, at in enumerate(files):
            for byte in (20, 700, 4090, 4100, -1):
                name, data = self.sound[at]
                changed = bytearray(data)
                changed[byte] ^= 1
                self.rewrite([*self.sound[:at], (name, bytes(changed)), *self.sound[at + 1 :]])
                self.there = self.root / f"there-{place}-{byte}"
                self.assertEqual((1, place), self.taken(), (place, byte))

    def test_names(self) -> None:
        """Files with other names are not written anywhere; the sound ones are."""
        name, data = self.sound[2]
        folder = name.rpartition("/")[0]
        odd = [
            "/etc/vua-test",
            "../escaped",
            f"../{name}",
            f"{folder}/../../../escaped",
            f"{folder}/.tmp-x",
            f"{folder}/pin-{names_of(TRUNK)[0]}",
            f"{folder}/l0-9.h0-9.safetensors",
            f"{folder}/after-x",
            name.replace(name[65:67], "zz", 1),
            f"{'0' * 64}/{name[65:]}",
            "bounds.json",
            f"{'0' * 64}/namespace.json",
        ]
        for one in odd:
            with self.subTest(name=one):
                self.rewrite([*self.sound, (one, data)])
                before = {str(path) for path in self.root.rglob("*")}
                self.assertEqual((1, 4), self.taken())
                new = {str(path) for path in self.root.rglob("*")} - before
                self.assertTrue(all(path.startswith(str(self.there)) for path in new), new)
                self.assertFalse((self.there / "bounds.json").exists())

    def test_another_identity(self) -> None:
        """A description that does not give the namespace's name opens none."""
        changes = [({"name": "two"}, {}, 0), ({"epoch": "2"}, {}, 1), ({}, {"format": "x"}, 1)]
        for place, (identity, whole, expected) in enumerate(changes):  # the name is for people
            at = next(n for n, (name, _) in enumerate(self.sound) if name.endswith("space.json"))
            name, data = self.sound[at]
            said = json.loads(data)
            said["identity"].update(identity)
            said.update(whole)
            changed = (name, json.dumps(said).encode())
            self.rewrite([*self.sound[:at], changed, *self.sound[at + 1 :]])
            self.there = self.root / f"there-{place}"
            self.assertEqual((expected, 4 * (1 - expected)), self.taken())

    def test_another_layout(self) -> None:
        """A damaged description of the namespace that is there is mended: entries decide."""
        self.assertEqual(0, run("import", self.there, self.file)[0])
        (space,) = (path for path in self.there.iterdir() if len(path.name) == 64)
        described = json.loads((space / "namespace.json").read_text())
        described["layout"]["layers"] = 3
        (space / "namespace.json").write_text(json.dumps(described))
        self.assertEqual(0, run("import", self.there, self.file)[0])
        self.assertEqual(2, json.loads((space / "namespace.json").read_text())["layout"]["layers"])

    def test_forms(self) -> None:
        """Links, devices, extended headers and other tars are refused before they are looked at."""
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.XHDTYPE, b"L"):
            with self.subTest(kind=kind), self.file.open("wb") as stream:
                writer = Writer(stream)
                info = tarfile.TarInfo("x")
                info.type, info.linkname, info.size = kind, "/etc/passwd", 0
                stream.write(info.tobuf(tarfile.USTAR_FORMAT))
                writer.close()
            self.assertEqual((1, 0), self.taken())
        for data in (b"", b"x" * 5000, bytes(10240)):
            self.file.write_bytes(data)
            self.assertEqual((2, 0), self.taken())

    def test_sizes(self) -> None:
        """A size that is only claimed allocates nothing, and is refused."""
        for size in (1 << 60, len(self.sound[2][1]) + 1):
            with self.file.open("wb") as stream:
                writer = Writer(stream)
                writer.add(*self.sound[1])
                info = tarfile.TarInfo(self.sound[2][0])
                info.size = size
                stream.write(info.tobuf(tarfile.GNU_FORMAT))
            self.assertEqual((1, 0), self.taken())

    def test_cut_short(self) -> None:
        """Of an archive that ends early what is whole is taken in, and the loss is told."""
        whole = self.file.read_bytes()
        counts = set()
        for length in range(1500, len(whole) - 1024, 1111):
            self.there = self.root / f"cut-{length}"
            self.file.write_bytes(whole[:length])
            code, count = self.taken()
            self.assertEqual(1, code, length)
            counts.add(count)
        self.assertEqual({0, 1, 2, 3, 4}, counts)

    def test_something_missing(self) -> None:
        """Without a member, or with members in disorder, the archive's end tells; chains hold."""
        end = self.sound[-1]
        self.assertEqual(END, end[0])
        raw = self.file.read_bytes()
        name, data = self.sound[3]
        start = raw.index(name[-20:].encode(), 0) // 512 * 512
        length = 512 + -(-len(data) // 512) * 512
        second = raw.index(data) - 512
        self.assertGreaterEqual(second, start)
        self.file.write_bytes(raw[:second] + raw[second + length :])
        code, report = run_json("import", self.there, self.file)
        self.assertEqual((1, 1, 2), (code, report["written"], report["refused"]))
        self.assertIn("missing", report["problems"][0])
        self.assertEqual(1, len(self.entries(self.there)))

    def test_bounds(self) -> None:
        """A full directory takes in the front of the prompt and stays within its bounds."""
        self.there.mkdir()
        nbytes = len(self.sound[2][1])
        write_bounds(self.there, Limits(max_bytes=2 * nbytes + 100, min_free_bytes=0))
        code, report = run_json("import", self.there, self.file)
        self.assertEqual((1, 2, 2), (code, report["written"], report["refused"]))
        self.assertEqual(2, len(self.entries(self.there)))
