"""What an SGLang engine computes with is in its namespace: hooks, packages, updates, adapters."""

from __future__ import annotations

import shutil
import tempfile
import unittest
from pathlib import Path
from typing import Any, ClassVar
from uuid import NAMESPACE_URL, uuid5

import pytest

from e2e.adapters import strong_adapter
from e2e.checkpoints import copied, edit, scaled
from e2e.damage import CHUNK, stored
from e2e.harness import llama, tokens
from e2e.sglang_hooks import hooks
from e2e.sglang_server import Schedulers, needs_sglang, scheduler_arguments

pytestmark = [pytest.mark.thorough]

CHUNKS = 5
PROMPT = tokens(CHUNKS * CHUNK + 5, seed=1)
NEW = 8
ASK = {"ask": PROMPT, "new": NEW}


@needs_sglang
class IdentityTest(unittest.TestCase):
    sglang: ClassVar[Schedulers]
    root: ClassVar[Path]
    tokens: ClassVar[list[int]]
    """What a plain server says to the prompt."""
    namespace: ClassVar[str]
    """Where it has stored it."""

    @classmethod
    def setUpClass(cls) -> None:
        """A plain server stores the prompt in the directory for all."""
        cls.root = Path(tempfile.mkdtemp(prefix="vua-test-")) / "kv"
        cls.addClassCleanup(shutil.rmtree, cls.root.parent, ignore_errors=True)
        cls.sglang = Schedulers()
        cls.addClassCleanup(cls.sglang.close)
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

    def test_config_file(self) -> None:
        """So does one with its configuration in another file, by that file's content."""
        model = copied(llama(), self.root.parent / "decrypted")
        other = model / "decrypted.json"
        seen = []
        for epsilon in (0.5, 0.9):
            shutil.copy(model / "config.json", other)
            edit(other, rms_norm_eps=epsilon)
            seen.append(self.assert_own(decrypted_config_file=other.name, model=model))
        self.assertNotEqual(*seen)

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
        """An adapter's pages come back to it after a restart, not to another one at its place."""
        place, root, said = self.root.parent / "one", self.root.parent / "adapters", []
        for seed in (1, 1, 2):
            lora = {"lora_paths": [f"one={strong_adapter(place, seed)}"]}
            lora["lora_backend"] = "torch_native"
            said.append(self.serve(ASK, {**ASK, "lora": "one"}, root=root, **lora))
        plain, adapted = (list(answers) for answers in zip(*said, strict=True))
        for answers in (plain, adapted):
            self.assertEqual([0, CHUNKS * CHUNK, 0], [answer["stored"] for answer in answers])
        self.assertEqual([self.tokens] * 3, [answer["tokens"] for answer in plain])
        first, again, other = (answer["tokens"] for answer in adapted)
        self.assertEqual(first, again)
        self.assertNotIn(first, (self.tokens, other))

    def test_an_adapters_id(self) -> None:
        """A prompt whose extra key is an adapter's id is computed by the model itself."""
        place = strong_adapter(self.root.parent / "adapter", seed=1)
        guess = uuid5(NAMESPACE_URL, f"one\0{place}").hex
        adapted, guessed, found, own = self.serve(
            {**ASK, "lora": "one"},
            {**ASK, "extra_key": guess},
            {**ASK, "lora": "one"},
            ASK,
            lora_paths=[f"one={place}"],
            lora_backend="torch_native",
        )
        self.assertNotEqual(self.tokens, adapted["tokens"])
        self.assertEqual((0, self.tokens), (guessed["stored"], guessed["tokens"]))
        self.assertEqual((0, self.tokens), (own["stored"], own["tokens"]))
        self.assertEqual(CHUNKS * CHUNK, found["stored"])
        self.assertEqual(adapted["tokens"], found["tokens"])
