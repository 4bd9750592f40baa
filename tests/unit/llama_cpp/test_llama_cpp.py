"""Mirrors `vua.llama_cpp`: the same tokens with a stored prefix as without, by the real engine."""

from __future__ import annotations

import json
import struct
import unittest
from operator import itemgetter
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from commands import told
from helpers import DirectoryTest, weights_known_later
from llama import BYTES_FROM, CONTEXT_TOKENS, WHERE, completed, has_llama_cpp, load_gguf, make_gguf
from vua.capacity.upkeep import parted_at, saved_at
from vua.connector.log import logger
from vua.core import VUA
from vua.errors import ConfigError, NotWritableError

CHUNK = 16
PROMPT = [1, *(BYTES_FROM + byte for byte in range(40, 140))]
WHOLE = len(PROMPT) // CHUNK * CHUNK


@unittest.skipUnless(has_llama_cpp(), WHERE)
class TestLlamaCpp(DirectoryTest):
    def setUp(self) -> None:
        super().setUp()
        self.model = make_gguf(self.root / "model.gguf")
        self.store = self.root / "kv"

    def llm(self, model: Path | None = None, **settings: Any) -> Any:
        llm = load_gguf(model or self.model, **settings)
        self.addCleanup(llm.close)
        return llm

    def cached(self, model: Path | None = None, **settings: Any) -> tuple[Any, Any]:
        """A fresh engine with a cache in the store that is ready, and the cache."""
        from vua.llama_cpp import VUALlamaCache

        llm = self.llm(model, **settings)
        cache = VUALlamaCache(llm, self.store, chunk_tokens=CHUNK)
        self.addCleanup(cache.close)
        self.assertTrue(cache.ready())
        llm.set_cache(cache)
        return llm, cache

    def name(self, model: Path | None = None, **settings: Any) -> str:
        """The namespace of an engine's states."""
        return str(self.cached(model, **settings)[1].identity.namespace)

    def loaded(self, cache: Any, prompt: list[int]) -> int:
        try:
            return int(cache[prompt].n_tokens)
        except KeyError:
            return 0

    def evaluated(self, llm: Any, prompt: list[int]) -> tuple[list[int], int]:
        """What a completion leaves in the context, and of how many tokens the prompt's rest was."""
        lengths, compute = [], llm.eval

        def noted(tokens: list[int]) -> None:
            lengths.append(len(tokens))
            compute(tokens)

        with mock.patch.object(llm, "eval", noted):
            tokens = completed(llm, prompt)
        return tokens, lengths[0]

    def test_restart(self) -> None:
        """A fresh engine goes on from what another one stored, and gives the same tokens."""
        for flash in (False, True):
            with self.subTest(flash_attn=flash):
                self.store = self.root / f"kv{flash}"
                cold = completed(self.llm(flash_attn=flash), PROMPT)
                first, cache = self.cached(flash_attn=flash)
                self.assertEqual((cold, len(PROMPT)), self.evaluated(first, PROMPT))
                self.assertTrue(PROMPT in cache)
                second, _ = self.cached(flash_attn=flash)

                warm, computed = self.evaluated(second, PROMPT)

                self.assertEqual(cold, warm)
                self.assertEqual(len(PROMPT) - WHOLE, computed)
                self.assertGreater(cache.cache_size, 0)

    def test_state_to_the_bit(self) -> None:
        """What is given back are the bits of K and V that the engine had computed."""
        from vua.llama_cpp.cache import parse

        first, _ = self.cached()
        completed(first, PROMPT)
        was = parse(first.save_state().llama_state)
        second, cache = self.cached(flash_attn=True)  # in which V lies the other way round

        state = cache[PROMPT]
        second.load_state(state)
        found = parse(second.save_state().llama_state)

        self.assertEqual([WHOLE, WHOLE], [state.n_tokens, found.tokens])
        self.assertNotEqual(was.form.v_transposed, found.form.v_transposed)
        for mine, theirs in zip([*was.k, *was.v], [*found.k, *found.v], strict=True):
            self.assertEqual(mine[:WHOLE].tobytes(), theirs.tobytes())
        self.assertEqual(PROMPT[:WHOLE], state.input_ids[:WHOLE].tolist())
        self.assertEqual({-1}, set(state.input_ids[WHOLE:].tolist()))

    def test_longest_prefix(self) -> None:
        """Prompts share what they have in common; a whole prompt, one that is stored entirely."""
        first, _ = self.cached()
        answer = completed(first, PROMPT)
        other = [*PROMPT[: 2 * CHUNK + 3], *reversed(PROMPT[2 * CHUNK + 3 :])]
        expected = completed(self.llm(), other)
        second, cache = self.cached()

        self.assertEqual((expected, len(other) - 2 * CHUNK), self.evaluated(second, other))
        self.assertEqual(len(answer) // CHUNK * CHUNK, self.loaded(cache, answer))
        third, _ = self.cached()
        again, computed = self.evaluated(third, PROMPT[:WHOLE])
        self.assertEqual(completed(self.llm(), PROMPT[:WHOLE]), again)
        self.assertEqual(1, computed)

    def test_where_prompts_part(self) -> None:
        """Each question is noted by what is stored of it; tools and log tell one number."""
        first, computing = self.cached()
        completed(first, PROMPT)  # nothing is stored yet
        computing.close()
        _, cache = self.cached()
        for prompt in (PROMPT, [*PROMPT[: 2 * CHUNK + 3], *PROMPT[:40]], PROMPT[: CHUNK - 1]):
            self.loaded(cache, prompt)
        with self.assertLogs(logger("savings"), "INFO") as logged:
            cache.close()
        self.assertIn("began: unknown time saved", logged.records[-1].getMessage())
        self.assertIn(f" {WHOLE + 2 * CHUNK} tokens loaded", told(self.store))
        ((_, noted),) = parted_at(self.store).items()
        ends = {"16": 1, "whole": 1, "64": 1, "short": 1}
        self.assertEqual({cache.identity.namespace: ends}, noted)

    def test_seconds_saved(self) -> None:
        """Loads have the price of what llama.cpp says that prompts took, here and after a restart.

        The one load of the first engine, after two prompts, has no price before the third.
        """
        from llama_cpp import llama_perf_context

        def of_prompts(llm: Any) -> tuple[int, float]:
            timed = llama_perf_context(llm.ctx)
            return timed.n_p_eval, timed.t_p_eval_ms / 1000

        llm, cache = self.cached()
        measured = []
        for first in range(3):
            llm.reset()
            tokens, seconds = of_prompts(llm)
            completed(llm, [1, BYTES_FROM + first, *PROMPT], tokens=1)
            computed = of_prompts(llm)[0] - tokens
            measured.append((of_prompts(llm)[1] - seconds) / computed)
            llm.reset()
            self.loaded(cache, [1, BYTES_FROM, *PROMPT])
        cache.close()
        _, cache = self.cached()
        self.assertEqual(WHOLE, self.loaded(cache, [1, BYTES_FROM, *PROMPT]))
        with self.assertLogs(logger("savings"), "INFO") as logged:
            cache.close()

        (total,) = saved_at(self.store).values()
        self.assertEqual((4 * WHOLE, 4 * WHOLE), (total.loaded_tokens, total.priced_tokens))
        files = (self.store / ".upkeep" / "saved").iterdir()
        before, after = (json.loads(one.read_bytes())["prefills"] for one in files)
        self.assertEqual(before, after)
        for mine, (tokens_before, its) in zip(
            sorted(measured), sorted(before, key=itemgetter(1)), strict=True
        ):
            self.assertAlmostEqual(len(PROMPT) / 2, tokens_before, delta=3)
            self.assertAlmostEqual(mine, its, delta=mine / 50)
        self.assertIn(" s saved, ", logged.records[-1].getMessage())
        self.assertEqual(str(total), told(self.store))

    def test_not_twice(self) -> None:
        """What the engine has computed itself is not loaded, and not written a second time."""
        llm, cache = self.cached()
        answer = completed(llm, PROMPT)
        written = self.snapshot()

        self.assertEqual(0, self.loaded(cache, [*answer, 7, 7]))
        self.assertEqual(answer, completed(llm, PROMPT))
        self.assertEqual(written, self.snapshot())
        llm.reset()
        self.assertEqual(len(answer) // CHUNK * CHUNK, self.loaded(cache, [*answer, 7, 7]))

    def test_kept_apart(self) -> None:
        """Another model, adapter setting, epoch or dtype of the cache finds nothing."""
        first, cache = self.cached()
        completed(first, PROMPT)
        other = make_gguf(self.root / "other.gguf", seed=1)
        differently: dict[str, Any] = {
            "base": {"rope_freq_base": 5000.0},
            "type": {"type_k": 0, "type_v": 0},
            "override": {"kv_overrides": {"llama.attention.layer_norm_rms_epsilon": 1e-3}},
        }
        found = {"other weights": self.cached(other)[1]}
        found |= {name: self.cached(**given)[1] for name, given in differently.items()}
        for name, one in found.items():
            with self.subTest(name):
                self.assertEqual(0, self.loaded(one, PROMPT))
                self.assertNotIn(PROMPT, one)
        names = [one.identity.namespace for one in (cache, *found.values())]
        with mock.patch("llama_cpp.__version__", "0.3.999"):
            names.append(self.name())
        self.assertEqual(len(names), len({*names}))

    def test_what_does_not_count(self) -> None:
        """Settings that only say how it is computed leave the identity as it is; n_ctx, too."""
        free = {"n_ctx": 128, "n_batch": 32, "flash_attn": True, "n_threads": 2}
        plain = self.name()
        self.assertEqual(plain, self.name(**free))

        scaled = make_gguf(self.root / "scaled.gguf", **{"llama.rope.scaling.attn_factor": 1.0})
        sizes = {self.name(scaled, n_ctx=one) for one in (128, 256)}
        self.assertEqual(2, len(sizes))
        for given in (
            {"kv_overrides": {"llama.rope.scaling.original_context_length": 64}},
            {"rope_freq_scale": 0.5, "n_seq_max": 1},
        ):
            sizes = {self.name(n_ctx=one, **given) for one in (128, 256)}
            self.assertEqual(2, len(sizes), given)
        self.assertNotEqual(plain, self.name(n_ctx=2 * CONTEXT_TOKENS))

    def test_damage(self) -> None:
        """One changed bit costs the chunks from there on, never a token."""
        first, _ = self.cached()
        cold = completed(first, PROMPT)
        damaged = sorted(self.files(), key=lambda path: path.stat().st_mtime_ns)[-3]
        data = bytearray(damaged.read_bytes())
        data[-40] ^= 1
        damaged.write_bytes(data)
        second, cache = self.cached()

        got = self.loaded(cache, PROMPT)
        warm, computed = self.evaluated(second, PROMPT)

        self.assertLess(got, WHOLE)
        self.assertEqual(0, got % CHUNK)
        self.assertEqual(cold, warm)
        self.assertGreater(computed, len(PROMPT) - WHOLE)

    def test_directory_refuses(self) -> None:
        """A directory that cannot be written costs hits; the log says so once."""
        llm, _ = self.cached()
        problem = NotWritableError(30, "read-only")
        with (
            mock.patch.object(VUA, "put", side_effect=problem),
            self.assertLogs("vua.llama_cpp", "WARNING") as logs,
        ):
            cold = completed(self.llm(), PROMPT)
            self.assertEqual(cold, completed(llm, PROMPT))
            llm.reset()
            self.assertEqual(cold, completed(llm, PROMPT))
        self.assertEqual(1, len(logs.output), logs.output)
        self.assertEqual([], self.files())

    def test_state_of_other_tokens(self) -> None:
        """A state that is not of its key's tokens is not stored; nor one of another model."""
        llm, cache = self.cached()
        other = self.llm(type_k=0, type_v=0)
        completed(other, PROMPT)
        llm.set_cache(None)
        completed(llm, PROMPT)
        with self.assertLogs("vua.llama_cpp", "DEBUG") as logs:
            cache[PROMPT[::-1]] = llm.save_state()
            cache[PROMPT] = other.save_state()
        self.assertIn("not of the tokens", logs.output[0])
        self.assertIn("expected StateForm", logs.output[-1])
        self.assertEqual([], self.files())

    def test_another_llama(self) -> None:
        """A cache serves the one `Llama` that it was made for, and stores nothing of another."""
        others: dict[str, dict[str, Any]] = {
            "other weights": {"model": make_gguf(self.root / "other.gguf", seed=1)},
            "another base": {"rope_freq_base": 5000.0},
        }
        for name, given in others.items():
            with self.subTest(name):
                self.store = self.root / name
                expected = completed(self.llm(), PROMPT)
                first, cache = self.cached()
                other = self.llm(**given)
                own = completed(self.llm(**given), PROMPT)
                self.assertNotEqual(expected, own)
                other.set_cache(cache)
                with self.assertLogs("vua.llama_cpp", "WARNING") as logs:
                    self.assertEqual(own, completed(other, PROMPT))
                    self.assertEqual(expected, completed(first, PROMPT))
                    other.reset()
                    self.assertEqual(own, completed(other, PROMPT))
                self.assertEqual(1, len(logs.output), logs.output)
                self.assertIn("made for another Llama; make one for each", logs.output[0])
                with self.assertLogs("vua.llama_cpp", "WARNING") as logs:
                    cache[own] = other.save_state()  # a program's own doing
                self.assertIn("not what the cache's Llama holds now", logs.output[0])
                reader, cache = self.cached()
                self.assertEqual(WHOLE, self.loaded(cache, own))
                self.assertEqual(expected, completed(reader, PROMPT))

    def test_files_that_were_replaced(self) -> None:
        """A file that is another one than was loaded names nothing."""
        from vua.llama_cpp import VUALlamaCache

        llm = self.llm()
        make_gguf(self.root / "other.gguf", seed=1).replace(self.model)
        cache = VUALlamaCache(llm, self.store, chunk_tokens=CHUNK)
        self.addCleanup(cache.close)
        with self.assertRaisesRegex(ConfigError, "model.gguf changed since it was loaded"):
            cache.ready()
        llm.set_cache(cache)
        completed(llm, PROMPT)
        self.assertEqual([], self.files())

    def test_refused(self) -> None:
        """What cannot be stored is refused with a sentence that says why."""
        from vua.llama_cpp import VUALlamaCache

        q8_0 = 8
        refused = {
            "logits_all and draft models": {"logits_all": True},
            "a chat handler may put images": {"chat_handler": object()},
            "ggml's type 8": {"type_k": q8_0, "type_v": q8_0, "flash_attn": True},
            "K and V have different types": {"type_k": 0},
        }
        for expected, given in refused.items():
            with self.subTest(expected), self.assertRaisesRegex(ConfigError, expected):
                VUALlamaCache(self.llm(**given), self.store)
        self.assertFalse(self.store.exists())

    def test_handler_set_later(self) -> None:
        """A chat handler that comes later ends loading and saving."""
        llm, cache = self.cached()
        completed(llm, PROMPT)
        llm.reset()
        self.assertEqual(WHOLE, self.loaded(cache, PROMPT))
        llm.chat_handler = object()
        with self.assertLogs("vua.llama_cpp", "WARNING"):
            self.assertEqual(0, self.loaded(cache, PROMPT))

    def test_trouble_of_each_kind_is_said_once(self) -> None:
        """A disk that is full at first; a prompt without tokens, which is no trouble; a state."""
        from vua.llama_cpp import VUALlamaCache

        llm = self.llm()
        full = mock.patch("vua.io.files.os.mkdir", side_effect=OSError(28, "it is full"))
        with full, self.assertLogs("vua.llama_cpp", "WARNING") as logs:
            cache = VUALlamaCache(llm, self.store, chunk_tokens=CHUNK)
            self.addCleanup(cache.close)
            llm.set_cache(cache)
            cold = completed(llm, PROMPT)
        self.assertIn("no space left", logs.output[0])
        self.assertTrue(cache.ready())
        with self.assertNoLogs("vua.llama_cpp", "WARNING"):
            llm.create_completion("", max_tokens=4)
            self.assertEqual(cold, completed(llm, PROMPT))
        self.assertEqual(len(cold) // CHUNK, len(self.files()))
        for _ in range(2):
            with self.assertLogs("vua.llama_cpp", "DEBUG") as logs:
                cache[PROMPT[::-1]] = llm.save_state()
            self.assertIn("a state is not stored", logs.output[0])

    def test_abandoned_stream(self) -> None:
        """What was computed for a stream that nobody read to its end is stored all the same."""
        for how in ("the next request", "close"):
            with self.subTest(how):
                self.store = self.root / how
                llm, cache = self.cached()
                stream = llm.create_completion(PROMPT, max_tokens=20, stream=True)
                next(stream)
                stream.close()
                self.assertEqual([], [*self.store.rglob("*.safetensors")])
                if how == "close":
                    cache.close()
                else:
                    completed(llm, PROMPT[::-1], tokens=1)
                self.assertGreaterEqual(self.loaded(self.cached()[1], PROMPT), WHOLE)

    def test_images_weights_beside(self) -> None:
        """A file of an image encoder beside the model is none of what the model computes with."""
        before = self.name()
        (self.root / "mmproj-model.gguf").write_bytes(self.model.read_bytes()[:100])
        self.assertEqual(before, self.name())

    def test_not_identified_yet(self) -> None:
        """Until the model's files are read nothing is loaded; what is computed is stored then."""
        from vua.llama_cpp import VUALlamaCache

        llm = self.llm()
        with weights_known_later() as go:
            cache = VUALlamaCache(llm, self.store, chunk_tokens=CHUNK)
            llm.set_cache(cache)
            completed(llm, PROMPT)
            self.assertFalse(cache.ready(0))
            self.assertEqual([], self.files())
            go.set()
            self.assertTrue(cache.ready())
        cache.close()
        self.assertGreaterEqual(self.loaded(self.cached()[1], PROMPT), WHOLE)

    @pytest.mark.thorough
    def test_a_long_chat(self) -> None:
        """Turn by turn, with restarts, until the context is full: always the same tokens."""
        prompt, plain = PROMPT[:20], self.llm()
        while len(prompt) + 30 < CONTEXT_TOKENS:
            llm, cache = self.cached()
            expected = completed(plain, prompt, tokens=12)
            self.assertEqual(expected, completed(llm, prompt, tokens=12))
            cache.close()
            prompt = [*expected, *PROMPT[len(expected) % 40 :][:18]]


TOKENS, LAYERS = 5, 2


def values(dim: int, seed: int) -> list[np.ndarray[tuple[int, ...], np.dtype[np.uint16]]]:
    """Bits of K or V of each layer."""
    random = np.random.default_rng(seed)
    return [random.integers(0, 1 << 16, (TOKENS, dim), dtype=np.uint16) for _ in range(LAYERS)]


K, V = values(4, 0), values(6, 1)


def written(*, transposed: bool, order: tuple[int, ...] = tuple(range(TOKENS))) -> bytes:
    """A state as llama.cpp writes it (llama-kv-cache.cpp), its cells in any order."""
    out = [struct.pack("<I", 5), b"llama", struct.pack("<II", 1, TOKENS)]
    out += [struct.pack("<iIi", position, 1, 0) for position in order]
    out.append(struct.pack("<II", transposed, LAYERS))
    for rows in K:
        out += [struct.pack("<iQ", 1, 8), *(rows[position].tobytes() for position in order)]
    for rows in V:
        if transposed:
            out.append(struct.pack("<iII", 1, 2, 6))
            out += [column[list(order)].tobytes() for column in rows.T]
        else:
            out += [struct.pack("<iQ", 1, 12), *(rows[position].tobytes() for position in order)]
    return b"".join(out)


@unittest.skipUnless(has_llama_cpp(), WHERE)
class TestState(unittest.TestCase):
    def test_cells_in_any_order(self) -> None:
        """Tokens come out by position, wherever their cells lie."""
        from vua.llama_cpp.cache import parse

        for transposed in (False, True):
            with self.subTest(transposed=transposed):
                state = parse(written(transposed=transposed, order=(3, 0, 4, 1, 2)))

                np.testing.assert_array_equal(K, state.k)
                np.testing.assert_array_equal(V, state.v)

    def test_every_end(self) -> None:
        """A state that ends early, or goes on, is refused wherever that is."""
        from vua.llama_cpp.cache import parse

        data = written(transposed=False)
        for length in range(len(data)):
            with self.assertRaisesRegex(ConfigError, "cannot be taken apart"):
                parse(data[:length])
        with self.assertRaisesRegex(ConfigError, "3 bytes that are not K and V"):
            parse(data + b"abc")

    def test_what_is_not_known(self) -> None:
        """Each thing that this module does not know is refused, in words."""
        from vua.llama_cpp.cache import parse

        data = written(transposed=False)
        cell, rows = 17, 17 + 12 * TOKENS  # where the cells begin, where the layers
        broken = {
            "2 streams": (9, 2),
            "0 cells": (13, 0),
            "not one sequence's tokens": (cell, 7),
            "sequence's tokens from position 0": (cell + 4, 2),
            "ggml's type 8": (rows + 8, 8),
            "of different shapes": (rows + 4, 9999),  # layers
            "layers of different": (rows + 12, 9),  # bytes of a row
            "layers of different shapes": (rows + 8 + 12 + 8 * TOKENS + 4, 4),  # of the next layer
        }
        for expected, (at, number) in broken.items():
            with self.subTest(expected), self.assertRaisesRegex(ConfigError, expected):
                parse(data[:at] + struct.pack("<I", number) + data[at + 4 :])
