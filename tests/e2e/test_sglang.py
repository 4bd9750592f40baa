"""SGLang: restarts, other engines, damage, sliding windows, what its namespaces count."""

from __future__ import annotations

import json
import shutil
import tempfile
import unittest
from pathlib import Path
from typing import Any, ClassVar

import pytest

from e2e.checkpoints import SIZES, copied, generate, scaled
from e2e.damage import CHUNK, chunk_files, flip, stored, vanish
from e2e.harness import Batch, Phase, Served, llama, make, models, run, tokens
from e2e.kinds import strong_adapter
from e2e.sglang_server import (
    Answer,
    Schedulers,
    Server,
    extra_config,
    needs_sglang,
    scheduler_arguments,
    wait_until,
)

OURS = "VUAHiCacheStorage"
NEW = 6
CHUNKS = 5


def prompt(seed: int) -> list[int]:
    """Five chunks, and a few tokens of a sixth."""
    return tokens(CHUNKS * CHUNK + 15, seed)


def by_vllm(root: Path, prompts: list[list[int]], new: int) -> Served:
    """Generate with vLLM, which loads what is stored and stores the prompts."""
    (served,) = run(Phase([Batch(prompts, max_tokens=new)], root=root))
    return served


@pytest.mark.vllm
@needs_sglang
class SGLangTest(unittest.TestCase):
    server: ClassVar[Server]
    root: ClassVar[Path]

    @classmethod
    def setUpClass(cls) -> None:
        """One server for all tests, each with prompts of its own."""
        cls.root = Path(tempfile.mkdtemp(prefix="vua-test-"))
        cls.addClassCleanup(shutil.rmtree, cls.root, ignore_errors=True)
        cls._start()
        cls.addClassCleanup(cls._close)

    @classmethod
    def _close(cls) -> None:
        cls.server.close()  # the latest one

    @classmethod
    def _start(cls) -> None:
        words, extra = ("--dtype", "float32", "--enable-metrics"), extra_config(cls.root)
        cls.server = Server(llama(), *words, backend="dynamic", extra=extra)

    def _restart(self) -> None:
        self.server.close()
        self._start()

    def setUp(self) -> None:
        """Nothing of other tests is in the server's memory."""
        self.server.forget()

    def fill(self, ids: list[int], root: Path | None = None, **more: Any) -> Answer:
        """Have a prompt computed and stored; its tokens are what every other way has to give."""
        root = root or self.root
        before = len(stored(root))
        answer = self.server.ask(ids, new=NEW, **more)
        self.assertEqual(0, answer.cached)
        wait_until("the prompt's chunks", lambda: len(stored(root)) >= before + CHUNKS)
        self.server.forget()
        return answer

    def assert_loaded(self, answer: Answer, tokens: list[int], chunks: int = CHUNKS) -> None:
        """Assert that so many chunks came from VUA and the tokens are these."""
        self.assertEqual((chunks * CHUNK, tokens), (answer.stored, answer.tokens))
        if chunks:
            self.assertEqual(OURS, answer.backend)

    def test_restart(self) -> None:
        """What one server stored another one loads; each says how much came from the storage."""
        self.fill(prompt(12))
        self.server.attach("dynamic", extra_config(self.root))  # no other setup than at its start
        ids = prompt(1)
        cold = self.fill(ids)
        again = self.server.ask(ids, new=NEW)
        self.assert_loaded(again, cold.tokens)
        own = self.server.ask(ids, new=NEW)  # in its own memory now
        self.assertEqual((CHUNKS * CHUNK, 0), (own.cached, own.stored))

        self._restart()

        self.assert_loaded(self.server.ask(ids, new=NEW), cold.tokens)

    def test_salt(self) -> None:
        """A prompt with a salt is stored for that salt alone."""
        ids = prompt(2)
        cold = self.fill(ids, cache_salt="one")
        for salt, chunks in (("one", CHUNKS), ("other", 0)):
            answer = self.server.ask(ids, new=NEW, cache_salt=salt)
            self.assert_loaded(answer, cold.tokens, chunks)
        self.server.forget()
        self.assert_loaded(self.server.ask(ids, new=NEW), cold.tokens, 0)

    def test_vllm(self) -> None:
        """SGLang loads what vLLM stored after one comparison; vLLM nothing of SGLang's."""
        one, other = prompt(5), prompt(15)
        served = by_vllm(self.root, [one, other], NEW)
        for ids, said, chunks in zip((one, other), served.tokens, (0, CHUNKS), strict=True):
            self.assert_loaded(self.server.ask(ids, new=NEW), said, chunks)
            self.server.forget()
        ids = prompt(6)
        cold = self.fill(ids)
        served = by_vllm(self.root, [ids], NEW)
        loaded = served.counts.get("tokens_loaded", 0)
        self.assertEqual((0, cold.tokens), (loaded, served.tokens[0]))

    def test_damage(self) -> None:
        """Damaged and deleted chunks are computed again, with the same tokens, and healed."""
        ids = prompt(7)
        cold = self.fill(ids)
        for harm in (flip, vanish):
            with self.subTest(harm.__name__):
                for at in (2, 4):
                    (file,) = chunk_files(self.root, ids, at)
                    harm(file)
                self.assert_loaded(self.server.ask(ids, new=NEW), cold.tokens, 2)
                wait_until("healing", lambda: self._sound(ids))
                self.server.forget()
                self.assert_loaded(self.server.ask(ids, new=NEW), cold.tokens)
                self.server.forget()

    def _sound(self, ids: list[int]) -> bool:
        return all(chunk_files(self.root, ids, at) for at in range(CHUNKS))

    def test_trouble(self) -> None:
        """With a full disk and with storage that hangs requests are served, and it goes on."""
        root = self.root.with_name(f"{self.root.name}-trouble")
        self.addCleanup(shutil.rmtree, root, ignore_errors=True)
        extra = extra_config(
            root,
            module_path="e2e.sglang_hooks",
            class_name="TroubledStorage",
            timeouts={"io_s": 2.0, "lookup_s": 60.0},
        )
        self.server.attach("dynamic", extra)
        self.addCleanup(self.server.attach, "dynamic", extra_config(self.root))
        ids = prompt(8)
        cold = self.fill(ids, root)
        for trouble in ("full", "hang"):
            with self.subTest(trouble):
                (root / trouble).touch()
                other = prompt(80 + len(trouble))
                first = self.server.ask(other, new=NEW)
                self.server.forget()
                self.assertEqual(first.tokens, self.server.ask(other, new=NEW).tokens)
                answer = self.server.ask(ids, new=NEW)
                self.assertEqual(cold.tokens, answer.tokens)
                self.assertEqual(0 if trouble == "hang" else CHUNKS * CHUNK, answer.stored)
                self.server.forget()
                (root / trouble).unlink()
                wait_until("the storage's use", lambda: self._uses_storage(ids))

    def _uses_storage(self, ids: list[int]) -> bool:
        found = self.server.ask(ids, new=1).stored
        self.server.forget()
        return found == CHUNKS * CHUNK

    def test_control(self) -> None:
        """SGLang's own ``file`` backend gives the same tokens; it says by its name that it did."""
        folder = Path(tempfile.mkdtemp(prefix="vua-test-"))
        self.addCleanup(shutil.rmtree, folder, ignore_errors=True)
        ids = prompt(9)
        cold = self.fill(ids)
        extra = {"prefetch_threshold": CHUNK, "file_storage_path": str(folder)}
        self.server.attach("file", json.dumps(extra))
        self.addCleanup(self.server.attach, "dynamic", extra_config(self.root))
        self.assertEqual(cold.tokens, self.server.ask(ids, new=NEW).tokens)
        self.server.forget()
        answer = self.server.ask(ids, new=NEW)
        self.assertEqual(
            (CHUNKS * CHUNK, "HiCacheFile", cold.tokens),
            (answer.stored, answer.backend, answer.tokens),
        )

    def test_metrics(self) -> None:
        """The server's metrics count what came from the storage, SGLang's own and VUA's."""
        ids = prompt(11)
        self.fill(ids)
        self.server.ask(ids, new=NEW)
        for name in ("sglang:prefetched_tokens_total", "vua_loaded_tokens_total"):
            wait_until(name, lambda name=name: self._metric(name) >= CHUNKS * CHUNK)

    def _metric(self, name: str) -> float:
        lines = self.server.call("GET", "/metrics").splitlines()
        found = [line for line in lines if line.startswith((f"{name} ", f"{name}{{"))]
        return sum(float(line.rpartition(" ")[2]) for line in found)


WINDOW = 2  # chunks
LONG = 7
WHOLE = LONG * CHUNK
REST = 30
MORE = 8


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


def long_prompt(seed: int) -> list[int]:
    return tokens(WHOLE + REST, seed)


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


@pytest.mark.thorough
class WindowsTest(SchedulersTest):
    """A model with windows; each test has prompts of its own."""

    model: ClassVar[Path]

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        cls.model = mellum()

    def ask(self, *prompts: list[int]) -> list[dict[str, Any]]:
        """What a fresh server answers to prompts; what it computes is stored before the next."""
        steps = [{"ask": ids, "new": MORE} for ids in prompts]
        return self.sglang.run(scheduler_arguments(self.model, self.root), *steps)

    def window(self, ids: list[int], at: int) -> list[Path]:
        """The files of a chunk's layers with a sliding window."""
        name = f"w{WINDOW * CHUNK}."
        return [file for file in chunk_files(self.root, ids, at) if file.name.startswith(name)]

    def test_loaded(self) -> None:
        """A prompt comes back with its window; its end behind another one goes on otherwise."""
        ids = long_prompt(1)
        cold, warm = self.ask(ids, ids)
        self.assertEqual([0, WHOLE], [cold["stored"], warm["stored"]])
        windows = [bool(self.window(ids, at)) for at in range(LONG)]
        self.assertTrue(all(windows[-WINDOW:]), windows)
        again, other = self.ask(ids, [*long_prompt(2)[:-REST], *ids[-REST:]])
        self.assertEqual([WHOLE, 0], [again["stored"], other["stored"]])
        self.assertEqual([cold["tokens"]] * 2, [warm["tokens"], again["tokens"]])
        self.assertNotEqual(cold["tokens"], other["tokens"])

    def test_longer(self) -> None:
        """A prompt that goes on behind another one loads it; both ends are there from then on."""
        ids = long_prompt(3)
        longer = [*ids[:-REST], *long_prompt(4)]
        answers = self.ask(ids, longer, longer, ids)
        self.assertEqual([0, WHOLE, 2 * WHOLE, WHOLE], [one["stored"] for one in answers])
        self.assertEqual(answers[1]["tokens"], answers[2]["tokens"])
        self.assertEqual(answers[0]["tokens"], answers[3]["tokens"])

    def test_transformers(self) -> None:
        """Transformers loads what SGLang stored.

        It compares the last chunk, for which it needs the window before that one.
        """
        ids = long_prompt(6)
        cold, _ = self.ask(ids, ids[:-CHUNK])
        loaded, tokens = generate(self.model, self.root, ids, new=MORE)
        self.assertEqual((WHOLE, cold["tokens"]), (loaded, tokens))

    def test_harm(self) -> None:
        """Without a whole window nothing behind it is loaded; it is stored again."""
        ids = long_prompt(7)
        [cold] = self.ask(ids)
        for harm in (flip, Path.unlink):
            with self.subTest(harm.__name__):
                for at in range(LONG):
                    for file in self.window(ids, at):
                        harm(file)
                answers = self.ask(ids, ids)
                self.assertEqual([0, WHOLE], [one["stored"] for one in answers])
                self.assertEqual([cold["tokens"]] * 2, [one["tokens"] for one in answers])


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
