"""The witness in real engines: confusions that the identity does not see are found at once.

Each confusion gives two engines that compute different things one identity
(`trouble.one_identity`); what the first has stored the second must not load, not even for its first
prompt.
"""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from e2e.checkpoints import make_adapter, remade
from e2e.harness import (
    PROMPT,
    SETTLE,
    Batch,
    EngineTest,
    Served,
    run,
    tokens,
)
from e2e.trouble import halves, one_identity
from small_models import make_model
from vua.weights.fingerprint import write_note

pytestmark = pytest.mark.vllm

OTHER = tokens(700, seed=9)
EVERY = {
    "witness_every": 1000,
    "timeouts": {"lookup_s": 30.0},
}  # whatever a busy machine makes of it
SAMPLE = "vua.weights.content._SAMPLE_NBYTES"
REPLACED = "vllm.model_executor.layers.linear.UnquantizedLinearMethod.apply"
SCALED = ("k_proj", "v_proj")
"""By 1.05; `benchmarks/witness.py` measures more kinds of changes."""
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10100.0}}


class WitnessTest(EngineTest):
    def setUp(self) -> None:
        super().setUp()
        self.folder = self.root.parent

    def engine(self, *prompts: list[int], lora: str | None = None, **settings: Any) -> Served:
        """One engine that is asked one prompt after the other."""
        batches: list[Batch] = []
        for prompt in prompts:  # a step more each: what was compared is known by then
            batches += [Batch([prompt], loras=[lora] if lora else ()), SETTLE]
        settings = {"extra": EVERY, **settings}
        (served,) = run(self.phase(*batches, **settings))
        self.assertIsNone(served.problem)
        return served

    @pytest.mark.thorough
    def test_restart_and_another_setup(self) -> None:
        """An engine that is only started again loads at once, another one after its first prompt.

        So it is for the negative control of all other tests here, too.
        """
        cold = self.engine(PROMPT, OTHER)
        again = self.engine(PROMPT, OTHER)
        other = {"engine": {"block_size": 64}}
        first, second = self.engine(PROMPT, OTHER, **other), self.engine(PROMPT, **other)

        self.assertEqual([cold.tokens] * 2, [again.tokens, first.tokens])
        self.assertEqual([[0, 0], [640, 640]], [cold.cached, again.cached])
        self.assertEqual([[0, 640], [640]], [first.cached, second.cached])
        self.assertIn("equals what this engine computes", first.log)
        self.assertNotIn("equals what this engine computes", again.log)

    @pytest.mark.thorough
    @pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler")
    def test_compiled(self) -> None:
        """What `torch.compile` made, anew or out of its cache, is no part of the setup."""
        made = self.folder / "vllm"
        compiled: dict[str, Any] = {"engine": {"enforce_eager": False}}
        # as for its users: vLLM's own CI leaves out the compiler
        compiled["environment"] = {"VLLM_CACHE_ROOT": str(made), "VLLM_CPU_CI_ENV": "0"}
        cold, again = (self.engine(PROMPT, OTHER, **compiled) for _ in range(2))
        self.assertEqual(cold.tokens, again.tokens)
        self.assertEqual([[0, 0], [640, 640]], [cold.cached, again.cached])
        self.assertTrue([*made.rglob("*.cpp")])  # control: it was compiled

    @pytest.mark.thorough
    def test_replaced_functions(self) -> None:
        """What an engine with replaced functions stored, an engine without them does not load."""
        expected = self.baseline(Batch([PROMPT]), Batch([OTHER]))
        for at, name in enumerate((REPLACED, "")):
            with self.subTest(name):
                root = self.folder / f"{at}"
                trouble = [partial(halves, name)] if name else []
                self.engine(PROMPT, OTHER, root=root, trouble=trouble)
                clean = self.engine(PROMPT, OTHER, root=root)
                again = self.engine(PROMPT, OTHER, root=root, trouble=trouble)

                self.assertEqual(expected, clean.tokens)
                self.assertEqual([0, 0] if name else [640, 640], clean.cached)
                self.assertEqual(name != "", "not what this engine computes" in clean.log)
                self.assertEqual([640, 640], again.cached)  # it knows its own

    @pytest.mark.thorough
    def test_pods(self) -> None:
        """A conversation goes on in another pod each turn: all but its last turn is loaded.

        Each of the six pods has an empty home, a copy of the model with its note, and the cache on
        another file system, with other inodes. The weights are read once in all, for the note.
        """
        model, said = make_model(self.folder / "model", seed=1), tokens(512, seed=7)
        (_, noted), root = write_note(model), self.root
        shared = Path(self.enterContext(tempfile.TemporaryDirectory(dir="/dev/shm")))
        read_mb = 0.0
        for pod in range(6):
            here = (self.folder, shared)[pod % 2] / f"pod{pod}"
            shutil.copytree(model, here / "model")
            if pod:
                shutil.copytree(root, here / "kv")
                shutil.rmtree(root)
                root = here / "kv"
            (served,) = run(
                self.phase(
                    *(Batch([said]), SETTLE),
                    root=root,
                    engine={"model": str(here / "model")},
                    extra={"timeouts": {"lookup_s": 30.0}, "witness_every": 350},
                    environment={
                        "XDG_CACHE_HOME": str(self.folder / f"home{pod}"),
                        "HOSTNAME": f"pod{pod}",
                    },
                    trouble=[
                        partial(mock.patch, SAMPLE, 1 << 10)
                    ],  # 64 MiB of a model that is not tiny
                )
            )
            self.assertIsNone(served.problem)
            told = re.search(r"identified in .* \((.*) of (.*) MB read", served.log)
            assert told is not None
            self.assertEqual(f"{noted.nbytes / 1e6:.1f}", told[2])
            read_mb = max(read_mb, float(told[1]))
            if pod:
                self.assertGreaterEqual(served.cached[0], 0.9 * (512 + 128 * (pod - 1)))
            said = [*said, *tokens(128, seed=20 + pod)]
        self.assertEqual(noted.nbytes, noted.read_nbytes)
        self.assertLess(read_mb, 0.5 * noted.nbytes / 1e6)  # a tensor that is drawn

    @pytest.mark.thorough
    def test_confusions(self) -> None:
        """Engines that compute something else load nothing, say so, and leave."""
        model = {"layers": 4, "dtype": "bfloat16"}
        base = make_model(self.folder / "base", seed=1, **model)
        adapter = str(make_adapter(self.folder / "adapter", base))
        adapted = self.folder / "adapted"
        self.confused(base)
        self.confused(base, lora=adapter, root=adapted)

        found: dict[str, str] = {}
        self.ask(found, "block size", lambda: self.confused(base, engine={"block_size": 64}))
        self.assertEqual({"block size": "loaded"}, found)  # the negative control
        for part in SCALED:
            other = remade(
                base,
                self.folder / "variant",
                lambda name, weight, part=part: weight * 1.05 if part in name else weight,
            )
            self.ask(found, part, lambda other=other: self.confused(other))  # type: ignore[misc]
        self.ask(found, "rope", lambda: self.confused(base, engine={"hf_overrides": ROPE}))
        self.ask(found, "adapter on", lambda: self.confused(base, lora=adapter))
        self.ask(found, "adapter off", lambda: self.confused(base, root=adapted))
        alpha = str(make_adapter(self.folder / "alpha", base, alpha=16))
        self.ask(found, "other alpha", lambda: self.confused(base, lora=alpha, root=adapted))

        self.assertEqual(7, len(found))
        missed = {name: said for name, said in found.items() if "explains" not in said}
        self.assertEqual({"block size": "loaded"}, missed)

    def confused(self, model: Path, **settings: Any) -> Served:
        engine = {"model": str(model), "dtype": "bfloat16", **settings.pop("engine", {})}
        if settings.get("lora"):
            engine |= {"enable_lora": True, "max_lora_rank": 16}
        return self.engine(PROMPT, OTHER, engine=engine, trouble=[one_identity], **settings)

    def ask(self, found: dict[str, str], name: str, what: Callable[[], Served]) -> None:
        """Note what an engine made of what it found."""
        served = what()
        said = re.search(
            r"is not what this engine computes: .*?([KV] of layer .*?explains)", served.log
        )
        if served.cached[0] or (served.counts.get("tokens_loaded", 0) and said):
            found[name] = f"LOADED {served.cached}"
        elif said:
            found[name] = said[1]
        else:
            found[name] = "loaded" if served.cached[1] > 0 else f"{served.cached}"
