"""Mirrors `vua.core`: what a user of the library sees."""

from __future__ import annotations

import doctest
import logging
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from helpers import (
    DirectoryTest,
    caches_of,
    flip,
    kv_bits,
    noise,
    read_only,
    remove_tree,
)
from vua import core
from vua.capacity.hit_density import UseLog
from vua.core import VUA, ClosestKV, VUAConfig
from vua.errors import ConfigError, InputError, NotWritableError
from vua.serdes import DTYPES

SMALL = VUAConfig(split_factor=4)
TOKENS = torch.arange(100, 112)


class CoreTest(DirectoryTest):
    def setUp(self) -> None:
        super().setUp()
        self.vua = self.open()

    def open(self, **settings: Any) -> VUA:
        """Another VUA over the same directory, as another process would have it."""
        config = VUAConfig(**{"split_factor": 4} | settings)
        vua = VUA(config, self.root)
        self.addCleanup(vua.close)
        return vua

    def check(self, found: ClosestKV, cache: list[list[torch.Tensor]], tokens: int) -> None:
        """Compare an answer with the first tokens of what was put."""
        self.assertEqual(tokens, found.num_tokens)
        self.assertEqual(kv_bits(cache, tokens), kv_bits(found.data))


class TestPutAndGet(CoreTest):
    """What is put comes back, bit by bit."""

    def test_doctests(self) -> None:
        self.assertEqual(0, doctest.testmod(core, extraglobs={"torch": torch}).failed)

    def test_dtypes(self) -> None:
        """Every dtype that a file can hold round-trips, NaN payloads included."""
        for name in DTYPES:
            dtype = DTYPES.get(name)
            if dtype is None or dtype.is_complex:
                continue
            with self.subTest(dtype=name):
                vua = self.open(model=name)
                cache = caches_of(layers=2, heads=2, tokens=8, dim=8, dtype=dtype)
                vua.put(TOKENS[:8], cache)

                self.check(vua.get_closest(TOKENS), cache, 8)

    def test_answer_has_the_shape_of_the_question(self) -> None:
        """The tokens of an answer have the dtype and the dimensions of those asked for."""
        self.vua.put(TOKENS[:4], caches_of(layers=1, heads=1, tokens=4, dim=4))
        for tokens in (TOKENS, TOKENS[None], TOKENS.to(torch.uint16)):
            found = self.vua.get_closest(tokens)

            self.assertEqual((tokens.dtype, tokens.ndim), (found.tokens.dtype, found.tokens.ndim))
            self.assertTrue(torch.equal(tokens[..., :4], found.tokens))

    def test_lookup(self) -> None:
        """The length of what is stored of each sequence, by name alone; nothing is read."""
        other = [*TOKENS[:6].tolist(), 1, 2, 3]
        self.assertEqual([0], self.vua.lookup(TOKENS))
        self.vua.put(TOKENS, caches_of(layers=1, heads=1, tokens=12, dim=4))
        for path in self.files():
            path.write_bytes(b"")

        self.assertEqual([12, 4, 0], self.open().lookup([TOKENS, torch.tensor(other), TOKENS[:3]]))
        self.assertEqual(0, self.open().get_closest(TOKENS).num_tokens)

    def test_batches(self) -> None:
        """A batch of N gives what N single calls give, as a tensor and as a list."""
        rows = torch.stack([TOKENS, TOKENS + 50, TOKENS])
        cache = caches_of(layers=2, heads=2, tokens=12, dim=4, rows=3)
        cache[0][0][2], cache[0][1][2] = cache[0][0][0], cache[0][1][0]
        cache[1][0][2], cache[1][1][2] = cache[1][0][0], cache[1][1][0]
        single = [[[t[n : n + 1] for t in pair] for pair in cache] for n in range(3)]

        self.assertGreaterEqual(self.vua.put(rows, cache), 6)
        for question in (rows, list(rows), [row[None] for row in rows]):
            answers = self.vua.get_closest(question)
            self.assertEqual(3, len(answers))
            for n in range(3):
                self.check(answers[n], single[n], 12)
                self.check(self.vua.get_closest(rows[n]), single[n], 12)

    def test_list_of_sequences(self) -> None:
        """Sequences of different lengths go in and come out as lists."""
        tokens = [TOKENS[:4], TOKENS[:8] + 40, TOKENS[:0]]
        caches = [caches_of(layers=2, heads=2, tokens=len(t), dim=4, seed=len(t)) for t in tokens]

        self.assertEqual(3, self.vua.put(tokens, caches))
        found = self.vua.get_closest(tokens)

        self.assertEqual([4, 8, 0], [one.num_tokens for one in found])
        self.check(found[0], caches[0], 4)
        self.check(found[1], caches[1], 8)

    def test_settings_keep_caches_apart(self) -> None:
        """Caches of another model, epoch or chunk length are not found."""
        self.vua.put(TOKENS, caches_of(layers=1, heads=1, tokens=12, dim=4))
        for settings in ({"model": "other"}, {"epoch": "2"}, {"split_factor": 6}):
            with self.subTest(settings):
                self.assertFalse(self.open(**settings).get_closest(TOKENS))
        self.assertTrue(self.open(threads=1, durable=True).get_closest(TOKENS))

    def test_modes(self) -> None:
        """Nobody but the owner may read what is stored, whatever the umask."""
        for umask in (0o000, 0o077, 0o277):
            root = self.root / f"{umask:o}"
            before = os.umask(umask)
            try:
                with VUA(SMALL, root) as vua:
                    vua.put(TOKENS, caches_of(layers=1, heads=1, tokens=12, dim=4))
            finally:
                os.umask(before)
            modes = {(path.is_dir(), stat.S_IMODE(path.stat().st_mode)) for path in root.rglob("*")}

            self.assertEqual({(True, 0o700), (False, 0o600)}, modes)

    def test_threads(self) -> None:
        """Threads that put and get at the same time disturb nobody."""
        prompts = [torch.cat([TOKENS[:4], torch.arange(8) + n % 5]) for n in range(40)]
        caches = [caches_of(layers=2, heads=2, tokens=12, dim=4, seed=n % 5) for n in range(40)]
        for cache in caches:  # the first chunk is the same in all prompts
            for layer, pair in enumerate(cache):
                for array in (0, 1):
                    pair[array][:, :, :4] = caches[0][layer][array][:, :, :4]

        def use(n: int) -> None:
            self.vua.put(prompts[n], caches[n])
            self.check(self.vua.get_closest(prompts[n]), caches[n], 12)

        with ThreadPoolExecutor(8) as pool:
            list(pool.map(use, range(40)))


class TestRequests(CoreTest):
    """What is logged of a program that asks for prompts and stores what it computes."""

    def logged(self) -> list[int]:
        """The lengths of the requests in the log, in chunks."""
        self.vua.close()  # finishes what works in the background
        return [len(request.chunks) for request in UseLog(self.root).records()]

    def test_one_request_counts_once(self) -> None:
        """A prompt that is asked for, and stored with its answer, is one request."""
        tokens = torch.arange(200, 224)
        cache = caches_of(layers=1, heads=1, tokens=24, dim=4)
        first = [[array[:, :, :8] for array in pair] for pair in cache]
        self.vua.put(tokens[:8], first)
        for _ in range(2):
            self.vua.get_closest(tokens[:20])
            self.vua.put(tokens, cache)
        self.assertEqual([2, 5], self.logged())

    def test_stored_without_asking(self) -> None:
        """What is only stored is a request of its own."""
        cache = caches_of(layers=1, heads=1, tokens=8, dim=4)
        for first in range(0, 300, 100):
            self.vua.put(torch.arange(first, first + 8), cache)
        self.assertEqual([2, 2, 2], self.logged())


class TestTensors(CoreTest):
    """Tensors come with any strides; what is stored are their values."""

    def views(self) -> dict[str, torch.Tensor]:
        """Tensors of shape (1, 2, 8, 4) that do not lie plainly in memory."""
        return {
            "heads and tokens exchanged": noise(1, 8, 2, 4).transpose(1, 2),
            "rows with gaps": noise(1, 2, 8, 8)[..., :4],
            "every second element": noise(1, 2, 8, 8)[..., ::2],
            "every second token": noise(1, 2, 16, 4)[:, :, ::2],
            "some heads of more": noise(1, 5, 8, 4)[:, 1:3],
            "some tokens of more": noise(1, 2, 20, 4)[:, :, 5:13],
            "expanded heads": noise(1, 1, 8, 4).expand(1, 2, 8, 4),
            "expanded tokens": noise(1, 2, 1, 4).expand(1, 2, 8, 4),
            "columns first": noise(1, 2, 4, 8).transpose(2, 3),
            "with a gradient": torch.randn(1, 2, 8, 4, requires_grad=True),
            "a negative view": torch._neg_view(noise(1, 2, 8, 4)),
            "one row of a batch": noise(3, 2, 8, 4)[1:2],
        }

    def test_strides(self) -> None:
        """Views of every kind are stored by value."""
        for number, (name, view) in enumerate(self.views().items()):
            with self.subTest(name):
                tokens = TOKENS[:8] + 100 * number
                plain = noise(1, 2, 8, 4, seed=9)
                self.vua.put(tokens, [[view, plain], [plain, view]])

                self.check(self.vua.get_closest(tokens), [[view, plain], [plain, view]], 8)

    def test_latent(self) -> None:
        """K and V may differ in head_dim, and V may have none at all."""
        for v_dim in (0, 2, 16):
            with self.subTest(v_dim=v_dim):
                vua = self.open(model=str(v_dim))
                cache = caches_of(layers=2, heads=1, tokens=8, dim=12, v_dim=v_dim)
                vua.put(TOKENS[:8], cache)
                found = vua.get_closest(TOKENS)

                self.check(found, cache, 8)
                self.assertEqual((1, 1, 8, v_dim), tuple(found.data[0][1].shape))

    def test_no_tokens(self) -> None:
        """Nothing to store stores nothing."""
        self.assertEqual(0, self.vua.put(TOKENS[:0], caches_of(layers=1, heads=1, tokens=0, dim=4)))
        self.assertEqual(["vua.json"], list(self.snapshot()))


class TestUnusableInput(CoreTest):
    """What cannot be stored is refused with words, and nothing stored is touched."""

    def setUp(self) -> None:
        super().setUp()
        self.stored = caches_of(layers=2, heads=2, tokens=8, dim=4)
        self.vua.put(TOKENS[:8], self.stored)
        self.before = self.snapshot()

    def refused(
        self, tokens: Any, cache: Any, words: str, kind: type[Exception] = InputError
    ) -> None:
        """Check that a put raises, in this VUA and in one that has written nothing yet."""
        for vua in (self.vua, self.open()):
            with self.assertRaisesRegex(kind, words):
                vua.put(tokens, cache)

            self.assertEqual(self.before, self.snapshot())
            self.check(vua.get_closest(TOKENS), self.stored, 8)

    def cache(self, **changes: Any) -> list[list[torch.Tensor]]:
        """A KV cache that fits what is stored, but for the changes."""
        return caches_of(**{"layers": 2, "heads": 2, "tokens": 8, "dim": 4, "seed": 7} | changes)

    def test_lengths(self) -> None:
        """Tokens in whole chunks, as many as K and V have, in as many rows; else it is said."""
        one, two = TOKENS[:8], torch.stack([TOKENS[:8]] * 2)
        for tokens, cache, words in (
            (TOKENS[:7], self.cache(tokens=7), "trim_to_split_factor"),
            (one, self.cache(tokens=4), "found 4"),
            (one, self.cache(tokens=12), "found 12"),
            (two, self.cache(rows=3), "tokens have 2"),
            ([one] * 2, [self.cache()], "as many KV caches"),
            ([one] * 2, [self.cache(), self.cache(heads=1)], "differ in shape"),
        ):
            with self.subTest(words):
                self.refused(tokens, cache, words)

    def test_structure(self) -> None:
        """What is no list of layers of pairs of 4-D tensors is refused."""
        k, halves = noise(1, 2, 8, 4), noise(1, 2, 8, 4, dtype=torch.float16)
        others = noise(1, 2, 4, 4), noise(1, 1, 8, 4), halves
        for cache, words in (
            ([], "found none"),
            ([[k]], "layers of \\[1\\] tensors"),
            ([[k, k, k]], "layers of \\[3\\] tensors"),
            ([[k[0], k[0]]], "expected a tensor"),
            ([[k.numpy(), k.numpy()]], "expected a tensor"),
            ([[None, None]], "expected a tensor"),
            ([[k, None]], "V of layer 0"),
            ([[k.expand(2, 2, 8, 4)] * 2], "batch 2, tokens have 1"),
            ([[k[:, :0], k[:, :0]]], "kv_heads must be at least 1"),
            ([[k[..., :0], k]], "k_dim must be at least 1"),
            ([[k.to(torch.complex64)] * 2], "C64"),
            *(([[k, k], [k, other]], "differs between layers") for other in others),
            *(([[other, k], [k, k]], "differ") for other in others),
        ):
            with self.subTest(words):
                self.refused(TOKENS[:8], cache, words)

    def test_tokens(self) -> None:
        """Tokens that are no token ids are refused by put and by get alike."""
        for tokens, words in (
            (-TOKENS[:8], "found -"),
            ([2**32] * 8, "found 4294967296"),
            (TOKENS[:8].float(), "integers"),
            ([0.5] * 8, "found float"),
            (TOKENS[:8][None, None], "shape"),
            (TOKENS[:8].numpy(), "found ndarray"),
            (b"a prompt", "integers|found bytes"),
            (None, "found NoneType"),
            ([np.int64(1)] * 8, "as_tensor"),
            ([[TOKENS[:8]]], "batch inside"),
        ):
            with self.subTest(repr(tokens)[:40]):
                if not isinstance(tokens, bytes):
                    self.refused(tokens, self.cache(), words)
                    with self.assertRaisesRegex(InputError, words):
                        self.vua.get_closest(tokens)


class TestDirectory(CoreTest):
    """The directory may be anything; what cannot be used is said, what is damaged is a miss."""

    def test_path_is_a_file(self) -> None:
        """A file in the directory's place, or above it, is refused and left alone."""
        file = self.root / "file"
        file.write_text("mine")
        for path in (file, file / "below"):
            with self.assertRaisesRegex(ConfigError, "file"):
                VUA(SMALL, path)
        self.assertEqual("mine", file.read_text())

    def test_read_only(self) -> None:
        """In a directory that cannot be written to, puts raise and gets go on."""
        cache = caches_of(layers=1, heads=1, tokens=12, dim=4)
        self.vua.put(TOKENS[:8], cache_of_first(cache, 8))
        with read_only(self.root):
            for vua in (self.vua, self.open()):
                with self.assertRaisesRegex(NotWritableError, "may not write"):
                    vua.put(TOKENS, cache)
                self.assertEqual(0, vua.put(TOKENS[:8], cache_of_first(cache, 8)))
                self.check(vua.get_closest(TOKENS), cache, 8)
            with self.assertRaises(NotWritableError):
                self.open(model="new").put(TOKENS, cache)
            with self.assertRaises(NotWritableError):
                VUA(SMALL, self.root / "new")

        self.assertEqual(1, self.vua.put(TOKENS, cache))
        self.check(self.vua.get_closest(TOKENS), cache, 12)

    def test_read_only_and_damaged(self) -> None:
        """Damage that cannot be taken away stays a miss."""
        cache = caches_of(layers=1, heads=1, tokens=4, dim=4)
        self.vua.put(TOKENS[:4], cache)
        flip(self.files()[0], 4100)
        with self.assertLogs("vua.store.store", "WARNING") as logs, read_only(self.root):
            self.assertFalse(self.vua.get_closest(TOKENS))
            self.assertFalse(self.open().get_closest(TOKENS))

        self.assertIn("could not be removed", logs.output[0])

    def test_damaged_description(self) -> None:
        """What is stored is found by its headers, and the next put describes it anew."""
        cache = caches_of(layers=1, heads=1, tokens=12, dim=4)
        self.vua.put(TOKENS, cache)
        [description] = self.files("namespace.json")
        sound = description.read_bytes()
        other_layout = sound.replace(b"F32", b"F16")
        other_model = sound.replace(b'"default"', b'"other"')
        broken = (b"", b"\0" * 50, b"[]", b"{}", sound[:-9], b"[" * 100_000, b"9" * 100_000)
        for damage in (*broken, other_layout, other_model):
            with self.subTest(damage[:20]):
                description.write_bytes(damage)
                with self.open() as reader:
                    self.check(reader.get_closest(TOKENS), cache, 12)
                with self.open() as writer:
                    self.assertEqual(0, writer.put(TOKENS, cache))
                    self.check(writer.get_closest(TOKENS), cache, 12)
                self.assertEqual(sound, description.read_bytes())
        for replace in (lambda: os.mkfifo(description), lambda: description.symlink_to("x")):
            description.unlink()
            replace()
            self.check(self.open().get_closest(TOKENS), cache, 12)

    def test_deleted(self) -> None:
        """When somebody deletes the directory meanwhile, another layout may move in."""
        self.vua.put(TOKENS, caches_of(layers=2, heads=2, tokens=12, dim=4))
        other = self.open()
        self.assertTrue(other.get_closest(TOKENS))
        remove_tree(self.root)
        self.assertFalse(self.vua.get_closest(TOKENS) or other.get_closest(TOKENS))
        cache = caches_of(layers=1, heads=1, tokens=12, dim=2)

        self.assertEqual(3, self.vua.put(TOKENS, cache))
        for one in (self.vua, other):
            self.check(one.get_closest(TOKENS), cache, 12)


def cache_of_first(cache: list[list[torch.Tensor]], tokens: int) -> list[list[torch.Tensor]]:
    return [[tensor[:, :, :tokens] for tensor in pair] for pair in cache]


class TestConfig(DirectoryTest):
    """Settings are typed, closed and loud."""

    def test_class_instance_subclass(self) -> None:
        """A config may be the class, an instance, a subclass, or an instance of one."""

        class Mine(VUAConfig):
            split_factor = 16

        for config, expected in (
            (VUAConfig, 64),
            (VUAConfig(), 64),
            (VUAConfig(split_factor=8), 8),
            (Mine, 16),
            (Mine(), 16),
            (Mine(split_factor=2), 2),
        ):
            with self.subTest(config), VUA(config, self.root) as vua:
                self.assertEqual(expected, vua.config.split_factor)
                trimmed = config.trim_to_split_factor(torch.arange(100))
                self.assertEqual(100 - 100 % expected, len(trimmed))

    def test_unusable_values(self) -> None:
        for settings in ({"split_factor": 0}, {"split_factor": 1.5}, {"split_factor": True},
                         {"threads": 0}, {"split_factor": 65537}, {"model": 5},
                         {"ttl_s": float("inf")}, {"ttl_s": float("nan")}):  # fmt: skip
            with self.subTest(settings), self.assertRaises(ConfigError):
                VUA(VUAConfig(**settings), self.root)

    def test_too_small(self) -> None:
        """Bounds in which not one chunk fits are refused, with the numbers."""
        with (
            VUA(VUAConfig(split_factor=4, max_bytes="1K"), self.root) as vua,
            self.assertRaisesRegex(ConfigError, r"'1K', 1,024 bytes; one chunk .* takes 4,224"),
        ):
            vua.put(TOKENS, caches_of(layers=1, heads=1, tokens=12, dim=4))

    def test_swapped(self) -> None:
        """Swapped arguments are refused with words, and nothing is made."""
        swapped: Any = (str(self.root / "new"), VUAConfig())
        with self.assertRaisesRegex(ConfigError, "expected a VUAConfig first, found '/"):
            VUA(*swapped)
        nothing: Any = (VUAConfig(), None)
        with self.assertRaisesRegex(ConfigError, "expected a path second, found None"):
            VUA(*nothing)
        self.assertFalse((self.root / "new").exists())


class TestLogging(CoreTest):
    """What is logged helps, and tells nothing of a prompt."""

    def test_debug(self) -> None:
        """At DEBUG every operation is logged, without token ids."""
        tokens = torch.tensor([871234, 871235, 871236, 871237])
        with self.assertLogs("vua", logging.DEBUG) as logs:
            self.vua.put(tokens, caches_of(layers=1, heads=1, tokens=4, dim=4))
            self.vua.get_closest(tokens)
            self.open()
        text = "\n".join(logs.output)

        for words in ("put 4 tokens", "get 4 tokens", "saved chunk", "loaded 1 of 1", "open"):
            self.assertIn(words, text)
        self.assertNotIn("87123", text)

    def test_damage_is_a_warning(self) -> None:
        """Damage is logged once as a warning that names the chunk."""
        self.vua.put(TOKENS[:4], caches_of(layers=1, heads=1, tokens=4, dim=4))
        flip(self.files()[0], 4100)
        with self.assertLogs("vua.store.store", logging.WARNING) as logs:
            self.assertFalse(self.vua.get_closest(TOKENS))
            self.assertFalse(self.vua.get_closest(TOKENS))

        self.assertEqual(1, len(logs.output))
        self.assertIn("checksum", logs.output[0])
