"""Mirrors `gc`, `listing` and the commands that change a directory."""

from __future__ import annotations

import os
import pty
import tempfile
from importlib.util import find_spec
from pathlib import Path
from unittest import mock

import torch

from commands import collect, run, run_json
from helpers import DirectoryTest, Memory, caches_of, model_arrays, save_chunk
from vua.capacity.limits import Limits, ResolvedLimits, read_bounds
from vua.capacity.listing import ancestors, pin
from vua.capacity.spaces import Space
from vua.capacity.upkeep import server_now_ns
from vua.capacity.usage import measure
from vua.cli.upkeep import rm
from vua.core import VUA, VUAConfig
from vua.errors import ConfigError
from vua.format.identity import Identity
from vua.format.keys import KeyChain, token_ids
from vua.format.layout import KVLayout
from vua.security.keyring import write_key
from vua.security.settings import Security
from vua.store.namespace import Namespace

HOUR_NS = 3600 * 10**9
CONFIG = VUAConfig(split_factor=4, max_bytes="1G", min_free_bytes=0)


def names_of(tokens: list[int]) -> list[str]:
    chain = KeyChain(token_ids(tokens), 4)
    return [key.name for key in chain.first(len(chain))]


class GcTest(DirectoryTest):
    """A directory with some prompts of three to five chunks."""

    trunk, branch, other = list(range(12)), [*range(8), *range(20, 32)], list(range(50, 62))

    def setUp(self) -> None:
        super().setUp()
        with VUA(CONFIG, self.root) as vua:
            for prompt in (self.trunk, self.branch, self.other):
                kv = caches_of(layers=1, heads=1, tokens=len(prompt), dim=8)
                vua.put(torch.tensor(prompt), kv)
        (self.space,) = (path for path in self.root.iterdir() if len(path.name) == 64)
        self.fd = os.open(self.space, os.O_RDONLY)
        self.addCleanup(os.close, self.fd)
        self.opened = Space(self.space.name, self.fd)

    def limits(self, **said: str | float) -> ResolvedLimits:
        return ResolvedLimits.of(self.root, Limits(min_free_bytes=0, **said))  # type: ignore[arg-type]

    def path(self, name: str) -> Path:
        return self.space / name[:2] / name

    def stored(self, prompt: list[int]) -> int:
        """Leading chunks of a prompt that are stored."""
        there = [self.path(name).is_dir() for name in names_of(prompt)]
        self.assertEqual(sorted(there, reverse=True), there)
        return sum(there)


class TestCollect(GcTest):
    """The full pass."""

    def test_nothing_to_do(self) -> None:
        """A sound directory stays as it is."""

        def snapshot() -> dict[str, bytes]:
            return {path: data for path, data in self.snapshot().items() if ".upkeep" not in path}

        before = snapshot()
        report = collect(self.root, self.limits())
        self.assertEqual(before, snapshot())
        self.assertTrue(report.within)
        self.assertEqual(9, report.chunks)

    def test_after_a_gap(self) -> None:
        """Chunks whose prefix is gone stay: they hit again once it is stored."""
        self.path(names_of(self.branch)[2]).rename(self.root / "gone")
        self.assertEqual(8, collect(self.root, self.limits()).chunks)

    def test_extras_hide_the_parent(self) -> None:
        """The chunks before one with an image in mid-prompt are known."""
        layout = KVLayout(layers=1, kv_heads=1, k_dim=8, v_dim=8, dtype="F32", chunk_tokens=4)
        identity = Identity(model="image", kv_dtype="F32", chunk_tokens=4)
        store = Namespace.create(self.root, identity, [layout]).stores[0]
        keys = KeyChain(token_ids(list(range(16))), 4, {2: [("multimodal", b"picture")]})
        memory = Memory(layout, layout.full, 4).fill(model_arrays(layout, 4)).map()
        for place in range(4):
            save_chunk(store, keys[place], memory, place=place)
        fd = store.storage.fileno()  # type: ignore[attr-defined]
        space = Space(identity.namespace, fd)
        names = [keys[place].name for place in range(4)]
        self.assertEqual(names[::-1], list(ancestors(space, names[3])))

    def test_leftovers(self) -> None:
        """What a crash left behind goes after an hour of the server's, not before."""
        chunk = self.path(names_of(self.trunk)[0])
        old, new = (
            [
                chunk / f".tmp-host-{digit * 8}-1-2",
                self.space / f".tmp-{digit * 16}",
                self.space / f"trash-{digit * 16}",
                self.root / f".tmp-{digit * 16}",
            ]
            for digit in "ab"
        )
        empty, marked = (self.space / f"{digit * 2}" / (digit * 64) for digit in "01")
        for path in (*old, *new):
            if "trash" in path.name:
                path.mkdir()
                (path / "l0-1.h0-1.safetensors").write_bytes(bytes(100))
            else:
                path.write_bytes(b'{\n "format": "vua.'.ljust(100))
        empty.mkdir(parents=True)
        marked.mkdir(parents=True)
        (marked / f"after-{'2' * 64}").touch()  # a mark is no chunk
        past = server_now_ns(self.fd) - 2 * HOUR_NS
        for path in (*old, empty, marked):
            os.utime(path, ns=(past, past))
        report = collect(self.root, self.limits())

        self.assertEqual((4, 400), report.leftovers)
        self.assertEqual([False] * 4 + [True] * 4, [path.exists() for path in (*old, *new)])
        self.assertFalse(empty.exists() or marked.exists())

    def test_bounds_and_recency(self) -> None:
        """Down to the limit the least recently used goes, leaves first."""
        with VUA(CONFIG, self.root) as vua:
            self.assertEqual(12, vua.get_closest(torch.tensor(self.trunk)).num_tokens)
        nbytes = measure(self.root).nbytes // 9
        report = collect(self.root, self.limits(max_bytes=5 * nbytes))

        self.assertTrue(report.within)
        self.assertEqual(4, report.evicted.chunks)
        self.assertEqual([3, 2, 2], [*map(self.stored, (self.trunk, self.branch, self.other))])

    def test_quota_per_salt(self) -> None:
        """Of a salt that has too much the oldest goes; others are not touched."""
        layout = KVLayout(layers=1, kv_heads=1, k_dim=8, v_dim=8, dtype="F32", chunk_tokens=4)
        identity = Identity(model="salted", kv_dtype="F32", chunk_tokens=4)
        store = Namespace.create(self.root, identity, [layout]).stores[0]
        memory = Memory(layout, layout.full, 6).fill(model_arrays(layout, 6)).map()
        salts: dict[bytes, KeyChain] = {}
        for salt, chunks in ((b"a", 6), (b"b", 2)):
            salts[salt] = KeyChain(token_ids(list(range(4 * chunks))), 4, {0: [("salt", salt)]})
            for place in range(chunks):
                save_chunk(store, salts[salt][place], memory, place=place)
        nbytes = store.codec(layout.full).file_nbytes
        report = collect(self.root, self.limits(max_bytes_per_salt=4 * nbytes))
        self.assertEqual((2, 2 * nbytes), report.over_quota)
        self.assertEqual((4, 2), tuple(store.lookup(keys) for keys in salts.values()))
        self.assertEqual(3, self.stored(self.trunk))


class TestPins(GcTest):
    """What stays whatever happens."""

    def test_pinned_stays(self) -> None:
        """A pin keeps a chunk and its prefix from every reason to go, until it is lifted."""
        names = names_of(self.branch)
        stamps = [self.path(name).stat().st_mtime_ns for name in names]
        self.assertEqual(names[:4][::-1], pin(self.opened, names[3]))
        self.assertEqual(names[:1], pin(self.opened, names[0]))
        self.assertEqual(stamps, [self.path(name).stat().st_mtime_ns for name in names])
        collect(self.root, self.limits(max_bytes=0, ttl_s=1e-6))
        self.assertEqual([2, 4, 0], [*map(self.stored, (self.trunk, self.branch, self.other))])

        self.assertEqual(names[:4][::-1], pin(self.opened, names[3], on=False))
        report = collect(self.root, self.limits(max_bytes=0))
        self.assertEqual((1, False), (self.stored(self.branch), report.within))

    def test_by_tokens(self) -> None:
        """The library pins what is stored of a prompt, and lifts that when more is stored, too."""
        with VUA(CONFIG, self.root) as vua:
            longer = torch.tensor([*self.trunk, *range(100, 108)])
            self.assertEqual([12], vua.pin(longer))
            self.assertEqual([4], vua.pin(self.trunk[:7]))
            self.assertEqual([0], vua.pin([7, 7, 7, 7]))
            collect(self.root, self.limits(max_bytes=0))
            self.assertEqual([3, 2, 0], [*map(self.stored, (self.trunk, self.branch, self.other))])

            vua.put(longer, caches_of(layers=1, heads=1, tokens=20, dim=8))
            self.assertEqual([12, 0], [*vua.unpin(longer), *vua.unpin(longer)])
        collect(self.root, self.limits(max_bytes=0))
        self.assertEqual(0, self.stored(self.trunk))

    def test_by_tokens_with_a_key(self) -> None:
        """So it does where names are secret, and where what is stored is encrypted."""
        for encrypt in (False, True)[: 2 if find_spec("cryptography") else 1]:
            with self.subTest(encrypt=encrypt), tempfile.TemporaryDirectory() as folder:
                key, root = Path(folder, "key"), Path(folder, "kv")
                write_key(key)
                security = Security(key_file=str(key), encrypt=encrypt)
                config = VUAConfig(split_factor=4, security=security)
                prompts = torch.arange(12), torch.arange(50, 62)
                with VUA(config, root) as vua:
                    kv = caches_of(layers=1, heads=1, tokens=12, dim=8)
                    vua.put(prompts, [kv, kv])
                    before = [len(found.data) for found in vua.get_closest([*prompts])]
                    held = vua.pin(prompts[0])
                limits = ResolvedLimits.of(root, Limits(min_free_bytes=0, max_bytes=0))
                collect(root, limits)
                with VUA(config, root) as vua:
                    kept = [found.num_tokens for found in vua.get_closest([*prompts])]
                    released = vua.unpin(prompts[0])
                collect(root, limits)
                with VUA(config, root) as vua:
                    gone = vua.get_closest(prompts[0]).num_tokens
                self.assertEqual(([1, 1], [12], [12, 0]), (before, held, kept))
                self.assertEqual(([12], 0), (released, gone))


class TestCommands(GcTest):
    """`vua gc`, `du`, `ttl`, `pin`, `rm`."""

    def test_gc(self) -> None:
        """It reports what it did; settings are kept on demand; the exit status says the outcome."""
        nbytes = measure(self.root).nbytes
        code, report = run_json("gc", self.root, "--max-bytes", f"{nbytes}B", "--min-free", "0")
        self.assertEqual((0, True, 9), (code, report["within"], report["chunks"]))
        self.assertEqual(Limits(), read_bounds(self.root))
        size = f"{nbytes // 2}B"
        code, out, _ = run("gc", self.root, "--max-bytes", size, "--min-free", "0", "--set")
        self.assertEqual(0, code)
        self.assertIn("within", out)
        self.assertEqual(size, read_bounds(self.root).max_bytes)
        pin(self.opened, names_of(self.trunk)[0])
        code, report = run_json("gc", self.root, "--max-bytes", "1B", "--quick")
        self.assertEqual((1, False, 1), (code, report["within"], report["chunks"]))
        self.assertEqual(2, run("gc", self.root, "--max-bytes", "much")[0])
        self.assertEqual(2, run("gc", self.root / "absent")[0])

    def test_ttl(self) -> None:
        """It is set, shown and lifted."""
        self.assertEqual((0, None), self.ttl())
        self.assertEqual((0, 60.0), self.ttl("60s"))
        self.assertEqual((0, 60.0), self.ttl())
        self.assertEqual((0, None), self.ttl("--off"))
        self.assertEqual(2, run("ttl", self.root, "-1")[0])

    def ttl(self, *arguments: str) -> tuple[int, float | None]:
        code, report = run_json("ttl", self.root, *arguments)
        return code, report["ttl_s"]

    def test_rm_asks_for_its_own(self) -> None:
        """The question names what would go, not what else is stored."""
        with VUA(VUAConfig(split_factor=4, model="other"), self.root) as vua:
            vua.put(torch.arange(4), caches_of(layers=1, heads=1, tokens=4, dim=8))
        name = next(one.name for one in self.root.glob("?" * 64) if one != self.space)
        here, terminal = pty.openpty()
        os.write(here, b"n\n")
        with (
            os.fdopen(here, "rb", buffering=0) as screen,
            os.fdopen(os.dup(terminal), "r") as stdin,
            os.fdopen(terminal, "w") as stderr,
        ):
            with (
                mock.patch("sys.stdin", stdin),
                mock.patch("sys.stderr", stderr),
                self.assertRaisesRegex(ConfigError, "nothing was changed"),
            ):
                rm(str(self.root), [name])
            asked = screen.read(1 << 12).decode()
            while "[y/N]" not in asked:  # the terminal's echo of the answer comes by itself
                asked += screen.read(1 << 12).decode()
        self.assertIn("Delete 1 namespace", asked)
        self.assertIn("(1 chunk, ", asked)

    def test_rm_namespace(self) -> None:
        """A namespace goes as a whole, under the hands of a process that goes on using it."""
        with VUA(CONFIG, self.root) as vua:
            self.assertTrue(vua.get_closest(torch.tensor(self.trunk)))
            code, report = run_json("rm", self.root, self.space.name[:12])
            self.assertEqual((0, 9), (code, report["chunks"]))
            self.assertEqual([], self.files())
            self.assertFalse(vua.get_closest(torch.tensor(self.trunk)))
            kv = caches_of(layers=1, heads=1, tokens=12, dim=8)
            self.assertEqual(3, vua.put(torch.tensor(self.trunk), kv))
            self.assertEqual(12, vua.get_closest(torch.tensor(self.trunk)).num_tokens)
        self.assertEqual((0, 3), (run("rm", self.root, "--all")[0], 3))
        left = [path.name for path in self.files("*") if ".upkeep" not in path.parts]
        self.assertEqual(["vua.json"], left)
