"""Mirrors `vua.format.keys`: the same prefix has the same name everywhere, another one another."""

from __future__ import annotations

import hashlib
import itertools
import pickle
import struct
import unittest
from typing import Any
from unittest import mock

import numpy as np
import torch
from hypothesis import strategies as st

from helpers import native_code
from properties import given
from vua.errors import InputError
from vua.format import keys as naming
from vua.format.keys import ChunkKey, KeyChain, extras_parent, token_ids

IDS = [0, 1, 255, 32000, 65535, 151643]
Extras = list[tuple[str, bytes]]
EXTRAS = st.lists(st.tuples(st.text(max_size=3), st.binary(max_size=3)), max_size=3)


def sglang_page_hashes(tokens: list[int], page: int) -> list[str]:
    """SGLang's rule for HiCache pages, written anew: SHA-256 over parent digest and u32 ids."""
    hashes, parent = [], b""
    for start in range(0, len(tokens) - len(tokens) % page, page):
        ids = b"".join(token.to_bytes(4, "little") for token in tokens[start : start + page])
        parent = hashlib.sha256(parent + ids).digest()
        hashes.append(parent.hex())
    return hashes


class TestTokenIds(unittest.TestCase):
    """Token ids as bytes."""

    def test_containers_and_dtypes(self) -> None:
        """Container, dtype, strides and byte order make no difference."""
        small = IDS[:4]
        expected = struct.pack("<4I", *small)
        strided = torch.tensor([n for token in small for n in (token, 7)])[::2]
        for tokens in (
            small,
            tuple(small),
            np.array(small, dtype="<u2"),
            np.array(small, dtype=">u4"),
            np.array(small, dtype=">i8"),
            np.array([small], dtype=np.int32),
            np.array(small, dtype=np.uint64),
            torch.tensor(small, dtype=torch.uint16),
            torch.tensor(small, dtype=torch.uint32),
            torch.tensor([small], dtype=torch.int32),
            torch.tensor(small),
            strided,
        ):
            with self.subTest(type=type(tokens), dtype=getattr(tokens, "dtype", "")):
                self.assertEqual(expected, token_ids(tokens))
        self.assertEqual(struct.pack("<6I", *IDS), token_ids(IDS))
        self.assertEqual(struct.pack("<3I", 5, 6, 7), token_ids(range(5, 8)))

    def test_largest(self) -> None:
        """The largest token id is taken as it is, by the native code and without it."""
        for mode in ("auto", "off"):
            for dtype in (np.uint32, np.int64, np.uint64):
                with (
                    self.subTest(native=mode, dtype=dtype),
                    native_code(mode),
                ):
                    self.assertEqual(b"\xff" * 4, token_ids(np.array([2**32 - 1], dtype)))

    def test_nothing(self) -> None:
        """No tokens are no bytes."""
        for tokens in ([], (), np.zeros(0), torch.zeros(0), torch.zeros(1, 0, dtype=torch.long)):
            self.assertEqual(b"", token_ids(tokens))

    def test_refused(self) -> None:
        """What is no sequence of token ids raises and says what was found."""
        cases: list[tuple[Any, str]] = [
            ([-1], "found -1"),
            (np.array([3, -2], np.int8), "found -2"),
            (torch.tensor([-5], dtype=torch.int16), "found -5"),
            ([2**32], "found 4294967296"),
            (torch.tensor([2**40]), "found 1099511627776"),
            *((np.where(np.arange(100) == 50, bad, 7), f"found {bad}") for bad in (-1, 1 << 32)),
            ([2**70], "integers"),
            ([1.0], "float64"),
            (torch.tensor([1.0]), "float32"),
            (torch.tensor([1.0], dtype=torch.bfloat16), "plain integers"),
            ([True, False], "bool"),
            (torch.tensor([True]), "bool"),
            (["a"], "integers"),
            ("abc", "not one sequence"),
            ([None], "integers"),
            ([[1, 2], [3]], "list"),
            ([[1, 2], [3, 4]], r"\(2, 2\)"),
            (torch.zeros(1, 1, 2, dtype=torch.long), r"\(1, 1, 2\)"),
            (torch.tensor(1), "not one sequence"),
            (torch.tensor([1, 2]).to_sparse(), "plain integers"),
            (None, "NoneType"),
            (7, "int"),
            (iter([1]), "iterator"),
        ]
        for tokens, words in cases:
            with self.subTest(repr(tokens)[:40]), self.assertRaisesRegex(InputError, words):
                token_ids(tokens)


class TestKeyChain(unittest.TestCase):
    """The names of a prompt's chunks."""

    def test_sglang(self) -> None:
        """Without extras the names are SGLang's page hashes."""
        tokens = [(7919 * n) % 151_936 for n in range(300)]
        for page in (1, 16, 64, 300):
            chain = KeyChain(token_ids(tokens), page)

            self.assertEqual(
                sglang_page_hashes(tokens, page), [key.name for key in chain.first(len(chain))]
            )

    def test_before(self) -> None:
        """A key knows the chunk before it, also where extras hide that in its parent."""
        chain = KeyChain(token_ids(range(16)), 4, {0: [("salt", b"s")], 2: [("image", b"i")]})

        befores = [chain[place].before for place in range(4)]
        self.assertEqual([b"", *(chain[place].prefix_hash for place in range(3))], befores)
        self.assertNotEqual(chain[2].parent, chain[2].before)

    @given(st.lists(st.integers(0, 2), max_size=12), st.lists(st.integers(0, 2), max_size=12))
    def test_equal_names_mean_equal_prefixes(self, one: list[int], other: list[int]) -> None:
        """Two prompts share the name of chunk n exactly if they agree up to its end."""
        for size in (1, 3):
            chains = [KeyChain(token_ids(tokens), size) for tokens in (one, other)]
            for n in range(min(map(len, chains))):
                same = one[: (n + 1) * size] == other[: (n + 1) * size]
                self.assertEqual(same, chains[0][n].name == chains[1][n].name)

    def test_hashed_as_far_as_asked(self) -> None:
        """A prompt of which nothing is stored costs one hash; keys one by one cost each its own."""
        for keys, hashed in (([0], 1), ([99, 7], 100), (range(100), 100)):
            with mock.patch.object(naming, "hash_chain", wraps=naming.hash_chain) as hashing:
                chain = KeyChain(token_ids(range(400)), 4)
                for key in keys:
                    chain[key]
            self.assertEqual(16 * hashed, sum(len(one.args[1]) for one in hashing.mock_calls))
            self.assertLess(len(hashing.mock_calls), 10)


class TestExtras(unittest.TestCase):
    """What changes K/V without being a token."""

    def chain(self, extras: dict[int, Extras]) -> list[ChunkKey]:
        return KeyChain(token_ids(range(12)), 4, extras).first(3)

    def test_from_its_chunk_on(self) -> None:
        """Extras change the name of their chunk and all later ones, and no earlier one."""
        plain, salted = self.chain({}), self.chain({1: [("salt", b"x")]})

        self.assertEqual(plain[0], salted[0])
        self.assertNotEqual(plain[1].name, salted[1].name)
        self.assertNotEqual(plain[2].name, salted[2].name)
        self.assertEqual(extras_parent(plain[0].prefix_hash, [("salt", b"x")]), salted[1].parent)
        self.assertEqual(salted[1].prefix_hash, salted[2].parent)

    @given(EXTRAS, EXTRAS, st.sampled_from([b"", b"p" * 32, b"q" * 32]))
    def test_injective(self, one: Extras, other: Extras, parent: bytes) -> None:
        """Equal stand-ins mean equal extras and equal parents."""
        same = one == other
        self.assertEqual(same, extras_parent(parent, one) == extras_parent(parent, other))
        self.assertNotEqual(parent, extras_parent(parent, one))
        for first, second in itertools.permutations([b"", b"p" * 32, b"q" * 32], 2):
            self.assertNotEqual(extras_parent(first, one), extras_parent(second, one))


class TestKeyRun(unittest.TestCase):
    """Keys in their compact form are the same keys."""

    def test_same_keys(self) -> None:
        """Every run and every slice of it, with extras in between, pickled and not."""
        extras = {0: [("salt", b"s")], 3: [("multimodal", b"m")], 6: [("multimodal", b"n")]}
        for some in ({}, extras):
            chain = KeyChain(token_ids(list(range(100))), 12, some)
            keys = chain.first(8)
            for first, stop in itertools.combinations(range(9), 2):
                run = KeyChain(token_ids(list(range(100))), 12, some).run(first, stop)
                self.assertEqual(keys[first:stop], list(run))
                self.assertEqual(keys[first:stop], list(pickle.loads(pickle.dumps(run))))
                self.assertEqual(keys[stop - 1], run[-1])
                for a, b in itertools.combinations_with_replacement(range(len(run) + 1), 2):
                    self.assertEqual(keys[first:stop][a:b], list(run[a:b]))
                with self.assertRaises(IndexError):
                    run[stop - first]
            with self.assertRaisesRegex(ValueError, "step"):
                chain.run(0, 4)[::2]

    def test_longer(self) -> None:
        """A chain that goes on has the same keys as one of the whole, and the first stays."""
        ids = list(range(200))
        extras = {1: [("salt", b"s")]}
        short = KeyChain(token_ids(ids[:70]), 16, extras)
        short.first(2)
        longer = short.longer(token_ids(ids))
        whole = KeyChain(token_ids(ids), 16, extras)
        self.assertEqual(whole.first(12), longer.first(12))
        self.assertEqual((4, 12), (len(short), len(longer)))
        self.assertEqual(whole.first(4), short.first(4))
