"""Random changes of models in transformers: does anything loaded come from another model?

    dev.py transformers-campaign [--changes 60] [--seed 0] [--kinds 6] [--vllm] [--json FILE]

Each kind of tiny model has one directory for all of its changes. A change is one or two ways to
alter a model, or a place where a function or a value may live (`model_changes`), made before the
block, between two calls, within one, or made between two calls and undone. The tokens of each call
are compared with those of the same model without VUA. Then an unchanged model of the files asks for
the same prompts: its tokens must be those of the plain model, and a second one must find each whole
chunk that the first one stored.

With ``--vllm`` a real engine stores some prompts of each kind before the changes, of which later
ones are about a third; half of the models that are changed after the block has begun store for vLLM
(``share=True``); and at the end the engine asks for all prompts of that kind.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from e2e.checkpoints import SIZES
from e2e.damage import CHUNK
from model_changes import CHANGES, ONLY_BEFORE, PLACES
from vua.transformers import reuse_prefixes

NEW: Final = 6
LEAST_HITS: Final = 0.99
"""Of the whole chunks that an unchanged model stored, that another one loads."""
_TIED: Final[dict[str, Any]] = {"tie_word_embeddings": True, "initializer_range": 0.03}
_WINDOWS: Final = ["sliding_attention", "full_attention"]
KINDS: Final[dict[str, dict[str, Any]]] = {
    "LlamaConfig": {},
    "Qwen3Config": {},
    "MistralConfig": {"sliding_window": 96},
    "Gemma2Config": {
        "query_pre_attn_scalar": 32,
        "sliding_window": 96,
        "layer_types": _WINDOWS,
        "attn_logit_softcapping": 2.0,
        **_TIED,
    },
    "Qwen2Config": {"head_dim": None},
    "CohereConfig": {"head_dim": None, "logit_scale": 1.0, **_TIED},
}
"""Of the tiny models, by their configurations in transformers."""
WAYS: Final = ("before", "between", "within", "undone")
_UNLIKE_EACH_TIME: Final = frozenset({"bfloat16"})
"""Its tokens depend on the order of sums, which a loaded prefix changes."""
_WEIGHTS: Final = frozenset(
    {"rows of a parameter", "rows of the embedding", ".data in place", "load_state_dict"}
)
"""What a load of the old weights undoes."""


@dataclass
class Found:
    """What the campaign saw."""

    wrong: list[list[Any]]
    counts: Counter[str]

    @property
    def hits(self) -> float | None:
        """The share of its chunks that an unchanged model finds."""
        whole = self.counts["chunks of unchanged models"]
        return self.counts["chunks found by unchanged models"] / whole if whole else None


class Kind:
    """A checkpoint, its directory, and the prompts that were asked of it."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.path, self.store = name, folder / "model", folder / "kv"
        import transformers

        torch.manual_seed(len(name))
        sizes = {**SIZES, "num_key_value_heads": 2, "head_dim": 32, **KINDS[name]}
        sizes = {key: value for key, value in sizes.items() if value is not None}
        config = getattr(transformers, name)(**sizes)
        made = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        if name == "Gemma2Config":  # sharp enough for its soft cap to matter
            with torch.no_grad():
                for layer in made.model.layers:
                    layer.self_attn.q_proj.weight *= 10
                    layer.self_attn.k_proj.weight *= 10
        made.save_pretrained(self.path)
        self.asked: list[torch.Tensor] = []
        self.by_vllm: list[torch.Tensor] = []
        """Prompts that vLLM has stored before."""

    def load(self, attention: str) -> Any:
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(self.path, attn_implementation=attention)
        model.generation_config.eos_token_id = None
        return model.eval()


def say(model: Any, prompt: torch.Tensor, **more: Any) -> list[int]:
    torch.manual_seed(7)
    mask = torch.ones_like(prompt)
    out = model.generate(
        prompt, attention_mask=mask, max_new_tokens=NEW, do_sample=False, pad_token_id=3, **more
    )
    answer: list[int] = out[0, prompt.shape[1] :].tolist()
    return answer


def prompt_of(rng: random.Random) -> torch.Tensor:
    """Two or three whole chunks, and a part of one."""
    count = CHUNK * rng.choice((2, 3)) + rng.randrange(5, CHUNK)
    return torch.tensor([rng.choices(range(5, 500), k=count)])


class Trial:
    def __init__(self, rng: random.Random, kind: Kind, found: Found) -> None:
        self.kind, self.found = kind, found
        self.way = rng.choice(WAYS)
        names = sorted(
            {"undone": _WEIGHTS, "before": {*CHANGES, *ONLY_BEFORE, *PLACES}}.get(
                self.way, {*CHANGES, *PLACES}
            )
        )
        self.stack = ExitStack()
        """Leaves the places that are changed in the whole process."""
        if self.way == "before":
            names = [name for name in names if name not in _UNLIKE_EACH_TIME]
        self.names = [rng.choice(names)]
        if rng.random() < 0.3 and self.way != "undone":
            self.names.append(rng.choice([name for name in names if name in CHANGES]))
        if "quantised" in self.names:
            self.names = ["quantised"]
        self.attention = rng.choice(("eager", "sdpa"))
        self.seed = rng.randrange(1 << 30)
        self.first, self.second = (
            rng.choice(kind.by_vllm) if kind.by_vllm and rng.random() < 0.33 else prompt_of(rng)
            for _ in range(2)
        )
        # of a model that was changed before the block, or computes otherwise than vLLM, as Gemma 2
        # does with sdpa, its user must not ask for it
        may = self.way != "before" and (kind.name, self.attention) != ("Gemma2Config", "sdpa")
        self.share = bool(kind.by_vllm) and may and rng.random() < 0.5

    def __str__(self) -> str:
        return f"{self.kind.name} {self.attention}, {self.way}: {' + '.join(self.names)}"

    def change(self, model: Any) -> Any:
        """Change a model; the same each time."""
        noise = torch.Generator().manual_seed(self.seed)
        for name in self.names:
            if name in PLACES:
                self.stack.enter_context(PLACES[name](model))
            else:
                model = {**CHANGES, **ONLY_BEFORE}[name](model, noise) or model
        return model

    def answer(self, prompt: torch.Tensor) -> list[int]:
        with self.stack:
            return say(self.change(self.load()), prompt)

    def load(self) -> Any:
        return self.kind.load(self.attention)

    def reused(self, model: Any) -> Any:
        """The block in which a model changes."""
        return reuse_prefixes(model, self.kind.store, chunk_tokens=CHUNK, share=self.share)

    def expect(self, what: str, expected: list[int], answer: list[int]) -> None:
        """Count a comparison; remember it where it fails."""
        self.found.counts["answers compared"] += 1
        if expected != answer:
            self.found.wrong.append([str(self), what, expected, answer])

    def run(self) -> None:
        prompts = self.first, self.second  # possibly the same one
        plain = [say(self.load(), prompt) for prompt in prompts]
        self.found.counts["models that store for vLLM"] += self.share
        try:
            changed = [self.answer(prompt) for prompt in prompts]
        except Exception:  # noqa: BLE001 - a model that computes nothing is no trial
            self.found.counts["changes that transformers refuses"] += 1
            return
        self.found.counts["changes"] += 1
        self.found.counts["changes that matter"] += changed != plain
        with self.stack:
            getattr(self, f"_{self.way}")(changed, plain)
        for prompt, expected in zip(prompts, plain, strict=True):
            self.kind.asked.append(prompt)
            for attempt in ("first", "second"):
                model = self.load()
                with reuse_prefixes(model, self.kind.store, chunk_tokens=CHUNK) as prefixes:
                    prefixes.ready()
                    if attempt == "second":
                        whole = (prompt.shape[1] - 1) // CHUNK
                        held = prefixes.load(prompt).num_tokens // CHUNK
                        self.found.counts["chunks of unchanged models"] += whole
                        self.found.counts["chunks found by unchanged models"] += held
                    answer = say(model, prompt)
                self.expect(f"{attempt} unchanged model", expected, answer)

    def _before(self, changed: list[list[int]], plain: list[list[int]]) -> None:
        model = self.change(self.load())
        with (
            suppress(ValueError),
            reuse_prefixes(  # ConfigError: refused, which is right
                model, self.kind.store, chunk_tokens=CHUNK
            ) as prefixes,
        ):
            prefixes.ready()
            for expected, prompt in zip(changed * 2, [self.first, self.second] * 2, strict=True):
                self.expect("the changed model", expected, say(model, prompt))

    def _between(self, changed: list[list[int]], plain: list[list[int]]) -> None:
        model = self.load()
        with self.reused(model) as prefixes:
            prefixes.ready()
            self.expect("before the change", plain[0], say(model, self.first))
            self.change(model)
            for expected, prompt in zip(changed, (self.first, self.second), strict=True):
                self.expect("after the change", expected, say(model, prompt))

    def _undone(self, changed: list[list[int]], plain: list[list[int]]) -> None:
        model = self.load()
        state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        with self.reused(model) as prefixes:
            prefixes.ready()
            self.expect("before the change", plain[0], say(model, self.first))
            self.change(model)
            self.expect("after the change", changed[1], say(model, self.second))
            model.load_state_dict(state)
            for expected, prompt in zip(plain, (self.first, self.second), strict=True):
                self.expect("after it was undone", expected, say(model, prompt))

    def _within(self, changed: list[list[int]], plain: list[list[int]]) -> None:
        with self.stack:
            expected = self._changing(self.load())
        if expected is None:
            self.found.counts["changes that end a call"] += 1
            return
        model = self.load()
        with self.reused(model) as prefixes:
            prefixes.ready()
            self.expect("changed within", expected, self._changing(model) or [])
            self.expect("after that call", changed[1], say(model, self.second))

    def _changing(self, model: Any) -> list[int] | None:
        """What a model answers that changes at the second token; None: it raises."""
        from transformers import LogitsProcessor

        seen = Counter[str]()

        def call(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            seen["calls"] += 1
            if seen["calls"] == 2:
                self.change(model)
            return scores

        class Changing(LogitsProcessor):
            def __call__(self, input_ids: Any, scores: Any) -> Any:
                return call(input_ids, scores)

        try:
            return say(model, self.first, logits_processor=[Changing()])
        except Exception:  # noqa: BLE001 - K and V of two dtypes or numbers of layers
            return None


def campaign(
    changes: int,
    seed: int,
    *,
    kinds: int = len(KINDS),
    vllm: bool = False,
    say_it: Callable[[str], None] = print,
) -> Found:
    """Run it; return what was found."""
    rng = random.Random(seed)
    found = Found([], Counter())
    with tempfile.TemporaryDirectory(prefix="vua-campaign-") as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers' and torch's own
        made = [Kind(name, Path(folder, name)) for name in [*KINDS][:kinds]]
        for kind in made if vllm else ():
            kind.by_vllm = [prompt_of(rng) for _ in range(8)]
            kind.asked += kind.by_vllm
            _by_vllm(kind, found)
        while found.counts["changes"] < changes:
            trial = Trial(rng, made[found.counts["changes"] % kinds], found)
            before = len(found.wrong)
            trial.run()
            wrong = len(found.wrong) - before
            say_it(f"{found.counts['changes']:4} {trial}: {f'{wrong} WRONG' if wrong else 'right'}")
        for kind in made if vllm else ():
            _by_vllm(kind, found)
    return found


def _by_vllm(kind: Kind, found: Found) -> None:
    """Let vLLM serve all prompts of a kind, without the directory and with it."""
    from e2e.harness import SETTLE, Batch, Phase, run

    batches = [Batch([prompt[0].tolist()], max_tokens=NEW) for prompt in kind.asked]
    engine, extra = {"model": str(kind.path)}, {"witness_every": 1000}  # as by default
    (plain,) = run(Phase(batches, engine=engine))
    steps = [step for batch in batches for step in (batch, SETTLE)]
    (warm,) = run(Phase(steps, engine=engine, root=kind.store, extra=extra))
    for number, (expected, answer) in enumerate(zip(plain.tokens, warm.tokens, strict=True)):
        found.counts["answers of vLLM"] += 1
        if expected != answer:
            found.wrong.append([kind.name, f"vLLM, prompt {number}", expected, answer])
    found.counts["tokens loaded by vLLM"] += sum(warm.cached)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the campaign; return 1 where something was wrong, or an unchanged model found less."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--changes", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", type=int, default=len(KINDS), choices=range(1, len(KINDS) + 1))
    parser.add_argument("--vllm", action="store_true")
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args(arguments)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    found = campaign(chosen.changes, chosen.seed, kinds=chosen.kinds, vllm=chosen.vllm)
    report = {"wrong": found.wrong, "counts": dict(found.counts), "hits": found.hits}
    if chosen.json:
        chosen.json.write_text(json.dumps(report, indent=1))
    print(json.dumps(report, indent=1))
    return int(bool(found.wrong) or (found.hits or 0) < LEAST_HITS)


if __name__ == "__main__":
    sys.exit(main())
