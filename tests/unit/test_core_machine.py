"""Any order of puts, gets and damage: an answer is a true prefix, as long as what is undamaged."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from pathlib import Path

import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from helpers import bits, flip, noise, remove_tree, swap
from properties import HealthCheck, settings
from vua.core import VUA, VUAConfig
from vua.format.keys import KeyChain, token_ids

CHUNK, LAYERS, HEADS, DIM = 4, 2, 2, 4
PAYLOAD = LAYERS * HEADS * DIM * CHUNK * 4 * 2
NBYTES = 4096 + PAYLOAD
CONFIG = VUAConfig(split_factor=CHUNK, threads=1)

# Few tokens and short prompts, so that prefixes are shared often.
PROMPTS = st.lists(st.integers(0, 1), max_size=5).map(
    lambda ids: [n for n in ids for _ in range(4)]
)
PICKS = st.integers(0, 1 << 30)


def names_of(tokens: list[int]) -> list[str]:
    chain = KeyChain(token_ids(tokens), CHUNK)
    return [key.name for key in chain.first(len(chain))]


def cache_of(tokens: list[int]) -> list[list[torch.Tensor]]:
    """The KV cache of a prompt: as a real one it depends on nothing but the tokens before."""
    seeds = [
        int.from_bytes(hashlib.sha256(bytes(tokens[: n + CHUNK])).digest()[:4], "little")
        for n in range(0, len(tokens), CHUNK)
    ]
    return [
        [
            torch.cat(
                [noise(1, HEADS, CHUNK, DIM, seed=seed + 2 * layer + array) for seed in seeds]
                or [torch.empty(1, HEADS, 0, DIM)],
                dim=2,
            )
            for array in (0, 1)
        ]
        for layer in range(LAYERS)
    ]


class CacheMachine(RuleBasedStateMachine):
    """A cache beside a set of the chunks that must be in it."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="vua-test-"))
        self.vua = VUA(CONFIG, self.root)
        self.sound: set[str] = set()
        """Names of chunks that were stored and not damaged since."""

    def teardown(self) -> None:
        self.vua.close()
        remove_tree(self.root)

    def files(self) -> list[Path]:
        return sorted(self.root.glob("*/??/*/*.safetensors"))

    def pick(self, number: int) -> Path | None:
        """One of the entries; damage done to it is noted."""
        files = self.files()
        if not files:
            return None
        path = files[number % len(files)]
        self.sound.discard(path.parent.name)
        return path

    @rule(tokens=PROMPTS)
    def put(self, tokens: list[int]) -> None:
        """Store a prompt: what is missing or of the wrong size is written, the rest stays.

        But for the last stored chunk, which is compared with what is given: damage shows then.
        """
        sizes = {path.parent.name: path.stat().st_size for path in self.files()}
        names = names_of(tokens)
        lacking = [name for name in names if sizes.get(name) != NBYTES]
        written = self.vua.put(torch.tensor(tokens, dtype=torch.long), cache_of(tokens))
        assert len(lacking) <= written <= len(lacking) + (not self.sound.issuperset(names))
        self.sound |= set(lacking)

    @rule(tokens=PROMPTS, more=st.integers(0, 7))
    def get(self, tokens: list[int], more: int) -> None:
        """Ask for a prompt that may be longer than any that is stored."""
        asked = tokens + list(range(1, more + 1))
        names = names_of(asked)
        found = self.vua.get_closest(torch.tensor(asked, dtype=torch.long))
        certain = next((n for n, name in enumerate(names) if name not in self.sound), len(names))
        assert found.num_tokens % CHUNK == 0
        assert certain * CHUNK <= found.num_tokens <= len(asked)
        assert found.tokens.tolist() == asked[: found.num_tokens]
        expected = cache_of(asked[: found.num_tokens]) if found else []
        assert [[bits(t) for t in pair] for pair in expected] == [
            [bits(t) for t in pair] for pair in found.data
        ]

    @rule()
    def reopen(self) -> None:
        self.vua.close()
        self.vua = VUA(CONFIG, self.root)

    @rule(number=PICKS, at=PICKS, mask=st.integers(1, 255))
    def flip(self, number: int, at: int, mask: int) -> None:
        path = self.pick(number)
        if path is not None and path.stat().st_size:
            flip(path, at % path.stat().st_size, mask)

    @rule(number=PICKS, nbytes=st.integers(0, NBYTES + 9) | st.sampled_from([4096, NBYTES - 1]))
    def resize(self, number: int, nbytes: int) -> None:
        """Cut a file short, or extend it by zeros."""
        path = self.pick(number)
        if path is not None:
            os.truncate(path, nbytes)

    @rule(number=PICKS)
    def delete(self, number: int) -> None:
        path = self.pick(number)
        if path is not None:
            path.unlink()

    @rule(number=PICKS)
    def delete_chunk(self, number: int) -> None:
        path = self.pick(number)
        if path is not None:
            shutil.rmtree(path.parent)

    @rule(one=PICKS, other=PICKS)
    def swap(self, one: int, other: int) -> None:
        first, second = self.pick(one), self.pick(other)
        if first is not None and second is not None and first != second:
            swap(first, second)

    @rule(one=PICKS, other=PICKS)
    def copy(self, one: int, other: int) -> None:
        files, path = self.files(), self.pick(one)
        if path is not None:
            path.write_bytes(files[other % len(files)].read_bytes())


TestCache = CacheMachine.TestCase
TestCache.settings = settings(
    max_examples=60,
    stateful_step_count=30,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
