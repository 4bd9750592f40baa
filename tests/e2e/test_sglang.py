"""SGLang: restarts, other engines, damage, sliding windows, what its namespaces count."""

from __future__ import annotations

import json
import shutil
import tempfile
import unittest
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, ClassVar

import pytest

from e2e.checkpoints import SIZES, copied, generate, scaled
from e2e.damage import CHUNK, chunk_files, flip, stored
from e2e.harness import Batch, Phase, Served, llama, make, models, run, tokens
from e2e.kinds import strong_adapter
from e2e.sglang_server import (
    Schedulers,
    Server,
    extra_config,
    needs_sglang,
    scheduler_arguments,
    wait_until,
)

OURS = "VUAHiCacheStorage"
MORE = 8
CHUNKS = 5
LONG = 7  # chunks
WHOLE = LONG * CHUNK
REST = 30
WINDOW = 2  # chunks
TROUBLED = {
    "module_path": "e2e.sglang_hooks",
    "class_name": "TroubledStorage",
    "timeouts": {"io_s": 2.0, "lookup_s": 60.0},
}


def long_prompt(seed: int) -> list[int]:
    return tokens(WHOLE + REST, seed)


def by_vllm(root: Path, *prompts: list[int]) -> Served:
    """Generate with vLLM, which loads what is stored and stores the prompts."""
    (served,) = run(Phase([Batch(prompts, max_tokens=MORE)], root=root))
    return served


@pytest.mark.vllm
@needs_sglang
class SGLangTest(unittest.TestCase):
    """A server, asked over HTTP."""

    def setUp(self) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="vua-test-"))
        self.addCleanup(shutil.rmtree, self.root, ignore_errors=True)

    def start(self) -> Server:
        words = ("--dtype", "float32", "--enable-metrics")
        server = Server(llama(), *words, backend="dynamic", extra=extra_config(self.root))
        self.addCleanup(server.close)
        return server

    def ask(self, server: Server, ids: list[int], **more: Any) -> tuple[int, list[int]]:
        """How many tokens came from VUA, and what the server says; nothing is in its memory."""
        server.forget()
        answer = server.ask(ids, new=MORE, **more)
        self.assertEqual(OURS if answer.stored else "", answer.backend)
        return answer.stored, answer.tokens

    def test_restart(self) -> None:
        """What one server stored another one loads, for the same salt; both metrics count it."""
        server, ids = self.start(), long_prompt(1)
        (stored, said), (salted, _) = self.ask(server, ids), self.ask(server, ids, cache_salt="one")
        self.assertEqual((0, 0), (stored, salted))
        self.assertEqual((WHOLE, said), self.ask(server, ids))
        own = server.ask(ids, new=MORE)  # in its own memory now
        self.assertEqual((WHOLE, 0), (own.cached, own.stored))
        server.close()

        server = self.start()
        for salt, found in ((None, WHOLE), ("one", WHOLE), ("other", 0)):
            self.assertEqual((found, said), self.ask(server, ids, cache_salt=salt))
        for name in ("sglang:prefetched_tokens_total", "vua_loaded_tokens_total"):
            wait_until(name, lambda name=name: self.metric(server, name) >= 2 * WHOLE)

    def metric(self, server: Server, name: str) -> float:
        lines = server.call("GET", "/metrics").splitlines()
        found = [line for line in lines if line.startswith((f"{name} ", f"{name}{{"))]
        return sum(float(line.rpartition(" ")[2]) for line in found)


@cache
def mellum() -> Path:
    """A random model with two layers that have a sliding window, and one that has none."""
    settings = {
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        "mlp_layer_types": ["dense"] * 3,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "sliding_window": WINDOW * CHUNK,
    }
    return make(models() / "mellum", "mellum", **SIZES | settings)


@needs_sglang
class SchedulersTest(unittest.TestCase):
    """One directory for all tests of a class, and a process whose forks run schedulers."""

    sglang: ClassVar[Schedulers]
    root: ClassVar[Path]

    @classmethod
    def setUpClass(cls) -> None:
        cls.root = Path(tempfile.mkdtemp(prefix="vua-test-")) / "kv"
        cls.addClassCleanup(shutil.rmtree, cls.root.parent, ignore_errors=True)
        cls.sglang = Schedulers()
        cls.addClassCleanup(cls.sglang.close)


class Events:
    """What prompts meet, under two models; mixed into tests, each of which has its own prompts."""

    model: ClassVar[Callable[[], Path]]
    kind: ClassVar[str]
    """How the names of files begin without which nothing behind them is loaded."""

    def ask(self, *prompts: Any, **server: Any) -> list[Any]:
        """What a fresh server answers to prompts; what it computes is stored before the next."""
        steps = [{"ask": one, "new": MORE} if isinstance(one, list) else one for one in prompts]
        model = type(self).model()
        said = self.sglang.run(scheduler_arguments(model, self.root, **server), *steps)
        return [(one["stored"], one["tokens"]) for one in said if one]

    def files(self, ids: list[int], at: int) -> list[Path]:
        found = chunk_files(self.root, ids, at)
        return [file for file in found if file.name.startswith(self.kind)]

    def test_loaded(self) -> None:
        """A prompt comes back; its end behind another one goes on otherwise."""
        ids = long_prompt(1)
        (cold, said), warm = self.ask(ids, ids)
        self.assertEqual((0, (WHOLE, said)), (cold, warm))
        there = [bool(self.files(ids, at)) for at in range(LONG)]
        self.assertTrue(all(there[-WINDOW:]), there)
        again, (other, otherwise) = self.ask(ids, [*long_prompt(2)[:-REST], *ids[-REST:]])
        self.assertEqual(((WHOLE, said), 0), (again, other))
        self.assertNotEqual(said, otherwise)

    def test_longer(self) -> None:
        """A prompt that goes on behind another one loads it; both ends are there from then on."""
        ids = long_prompt(3)
        longer = [*ids[:-REST], *long_prompt(4)]
        first, second, again, short = self.ask(ids, longer, longer, ids)
        self.assertEqual((0, WHOLE), (first[0], second[0]))
        self.assertEqual([(2 * WHOLE, second[1]), (WHOLE, first[1])], [again, short])

    def test_transformers(self) -> None:
        """Transformers loads what SGLang stored.

        It compares the last chunk, for which it needs the window before that one.
        """
        ids = long_prompt(6)
        (_, said), _ = self.ask(ids, ids[:-CHUNK])
        self.assertEqual((WHOLE, said), generate(type(self).model(), self.root, ids, new=MORE))

    def test_damage(self) -> None:
        """Damaged and deleted chunks are computed again, with the same tokens, and healed."""
        ids = long_prompt(7)
        [(_, said)] = self.ask(ids)
        for harm in (flip, Path.unlink):
            with self.subTest(harm.__name__):
                for at in range(LONG):
                    for file in self.files(ids, at):
                        harm(file)
                self.assertEqual([(0, said), (WHOLE, said)], self.ask(ids, ids))


@pytest.mark.thorough
class WindowsTest(Events, SchedulersTest):
    model, kind = mellum, f"w{WINDOW * CHUNK}."


@pytest.mark.vllm
class PlainTest(Events, SchedulersTest):
    model, kind = llama, "l"

    def test_vllm(self) -> None:
        """SGLang loads what vLLM stored after one comparison; vLLM nothing of SGLang's."""
        one, other, own = map(long_prompt, (8, 9, 10))
        first, second = by_vllm(self.root, one, other).tokens
        self.assertEqual([(0, first), (WHOLE, second)], self.ask(one, other))
        [(_, said)] = self.ask(own)
        served = by_vllm(self.root, own)
        self.assertEqual(([0], [said]), (served.cached, served.tokens))

    def test_control(self) -> None:
        """SGLang's own ``file`` backend gives the same tokens."""
        ids = long_prompt(11)
        [(_, said)] = self.ask(ids)
        extra = {"prefetch_threshold": CHUNK, "file_storage_path": str(self.root.parent / "file")}
        given = {"hicache_storage_backend": "file"}
        given["hicache_storage_backend_extra_config"] = json.dumps(extra)
        self.assertEqual([(0, said), (WHOLE, said)], self.ask(ids, ids, **given))

    def test_trouble(self) -> None:
        """With a full disk and with storage that hangs requests are served, and it goes on."""
        ids, others = long_prompt(12), [long_prompt(13), long_prompt(14)]
        extra = {"hicache_storage_backend_extra_config": extra_config(self.root, **TROUBLED)}
        expected = [said for _, said in self.ask(ids, *others)]
        shutil.rmtree(self.root)
        self.root.mkdir()
        steps: list[Any] = [ids]
        for trouble, other in zip(("full", "hang"), others, strict=True):
            begin, end = (partial(one, self.root / trouble) for one in (Path.touch, Path.unlink))
            steps += [begin, other, other, ids, end, {"ask": ids, "new": MORE, "until": WHOLE}]
        found = self.ask(*steps, **extra)
        first, second = others
        asked = [ids, first, first, ids, ids, second, second, ids, ids]
        answers = dict(zip(map(tuple, (ids, *others)), expected, strict=True))
        self.assertEqual([answers[tuple(one)] for one in asked], [said for _, said in found])
        self.assertEqual([WHOLE, WHOLE, 0, WHOLE], [found[at][0] for at in (3, 4, 7, 8)])


PROMPT = tokens(CHUNKS * CHUNK + 5, seed=1)
ASK = {"ask": PROMPT, "new": MORE}


def hooks(factor: float) -> list[dict[str, Any]]:
    """The argument of a server whose first layer's MLP returns other values."""
    return [
        {
            "name": "scaled",
            "target_modules": ["model.layers.0.mlp"],
            "hook_factory": "e2e.sglang_hooks:scaled",
            "config": {"factor": factor},
        }
    ]


@pytest.mark.thorough
class IdentityTest(SchedulersTest):
    tokens: ClassVar[list[int]]
    """What a plain server says to the prompt."""
    namespace: ClassVar[str]
    """Where it has stored it."""

    @classmethod
    def setUpClass(cls) -> None:
        """A plain server stores the prompt in the directory for all."""
        super().setUpClass()
        [answer] = cls.serve(ASK)
        cls.tokens = answer["tokens"]
        cls.namespace = stored(cls.root)[0].relative_to(cls.root).parts[0]

    @classmethod
    def serve(
        cls,
        *steps: dict[str, Any],
        model: Path | None = None,
        variables: dict[str, str] | None = None,
        root: Path | None = None,
        change: str = "",
        **arguments: Any,
    ) -> list[dict[str, Any]]:
        """What a server on a directory, by default that for all, answers."""
        given = scheduler_arguments(model or llama(), root or cls.root, **arguments)
        return cls.sglang.run(given, *steps, change=change, **(variables or {}))

    def files(self) -> list[Path]:
        """What is stored where the plain server stores."""
        return [one for one in stored(self.root) if self.namespace in one.parts]

    def assert_own(self, **server: Any) -> list[int]:
        """A server that computes something else: nothing is loaded, nothing stored as plain."""
        before = self.files()
        first, again = self.serve(ASK, ASK, **server)
        self.assertEqual(0, first["stored"])
        self.assertNotEqual(self.tokens, first["tokens"])
        self.assertEqual(before, self.files())
        self.assertEqual((CHUNKS * CHUNK, first["tokens"]), (again["stored"], again["tokens"]))
        return list(first["tokens"])

    def test_restart(self) -> None:
        """A server like the one before loads from its first request on, whatever it logs."""
        [answer] = self.serve(
            ASK,
            variables={"SGLANG_LOG_MS": "1"},
            log_level="warning",
            random_seed=7,
        )
        self.assertEqual((CHUNKS * CHUNK, self.tokens), (answer["stored"], answer["tokens"]))

    def test_another_setup(self) -> None:
        """What another setup stored is loaded once one prompt was compared; a restart knows it."""
        for expected in ((0, CHUNKS * CHUNK), (CHUNKS * CHUNK,) * 2):
            said = self.serve(ASK, ASK, chunked_prefill_size=128)
            self.assertEqual(expected, tuple(answer["stored"] for answer in said))
            self.assertEqual([self.tokens] * 2, [answer["tokens"] for answer in said])

    def test_changes(self) -> None:
        """No change of an engine's code gets into a clean server's answers, nor the other way."""
        for change in ("attention", "pool", "linear", "registered", "edited"):
            with self.subTest(change), tempfile.TemporaryDirectory(prefix="vua-test-") as root:
                [alone] = self.serve(ASK, root=Path(root), change=change)
                self.assertNotEqual(self.tokens, alone["tokens"])
                clean = self.serve(ASK, ASK, root=Path(root))
                self.assertEqual([self.tokens] * 2, [answer["tokens"] for answer in clean])
                changed = self.serve(ASK, ASK, change=change)
                self.assertEqual([alone["tokens"]] * 2, [answer["tokens"] for answer in changed])
        self.test_restart()

    def test_hooks(self) -> None:
        """A server with a hook has a namespace of its own, and one with another hook another."""
        one, other = (self.assert_own(forward_hooks=hooks(factor)) for factor in (0.5, 0.3))
        self.assertNotEqual(one, other)

    def test_package(self) -> None:
        """So does one whose model class is somebody's."""
        self.assert_own(variables={"SGLANG_EXTERNAL_MODEL_PACKAGE": "e2e.sglang_models"})

    def test_updates(self) -> None:
        """After an update nothing is loaded or stored, not even when the weights are back."""
        other = copied(llama(), self.root.parent / "other")
        scaled(llama(), other, "layers.0.mlp.up_proj.weight")
        before = stored(self.root)
        steps = [{"update": str(other)}, ASK, ASK, {"update": str(llama())}, ASK, ASK]
        said = self.serve(*steps)
        self.assertEqual([True] * 2, [answer["done"] for answer in said[::3]])
        answers = [answer for answer in said if "tokens" in answer]
        self.assertEqual([0] * 4, [answer["stored"] for answer in answers])
        self.assertNotEqual(self.tokens, answers[0]["tokens"])
        self.assertEqual(self.tokens, answers[-1]["tokens"])
        self.assertEqual(before, stored(self.root))

    def test_adapters(self) -> None:
        """A server with adapters stores nothing: SGLang names their pages by ids."""
        place, before = strong_adapter(self.root.parent / "adapter", seed=1), stored(self.root)
        given = {"lora_paths": [f"one={place}"], "lora_backend": "torch_native"}
        plain, adapted = self.serve(ASK, {**ASK, "lora": "one"}, **given)
        self.assertEqual((0, self.tokens), (plain["stored"], plain["tokens"]))
        self.assertNotEqual(self.tokens, adapted["tokens"])
        self.assertEqual(before, stored(self.root))
