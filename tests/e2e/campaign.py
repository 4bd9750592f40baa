"""Random engines on one directory: who loads from whom, against the K and V that each computes.

    dev.py identity-campaign [--setups 60] [--seed 0] [--json FILE]

A setup is a model, settings of the engine and a request, changed at random in up to three ways.
Each runs three times: without VUA, which gives its tokens; in a directory of its own, which gives
its K and V; and, in random order, in one directory for all, where it may load what others stored.

Two setups may share a chunk of their prompts if they compute the same K and V for it, and must not
if they do not. The keys of all pairs are compared; so are the tokens of the third run with those of
the first.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from e2e.adapters import strong_adapter
from e2e.checkpoints import copied, edit, rewritten, scaled
from e2e.damage import CHUNK, stored
from e2e.harness import Batch, Phase, Served, llama, make_llava, models, run, tokens
from e2e.pictures import IMAGE_TOKEN
from small_models import make_model

TEXT = tokens(330, seed=1)
PICTURE = [*tokens(64, seed=2), IMAGE_TOKEN, *tokens(200, seed=3)]
SAME = 1e-3
"""The largest distance of equal K and V relative to their length: float32 gives 1e-6. Between this
and `OTHER` lies what another kernel or bfloat16 makes of the same values: counted as neither."""
OTHER = 0.03
"""From here on they are different."""
LEAST_SHARED = 0.95
"""Of the chunks with equal K and V."""


@dataclass(frozen=True)
class Setup:
    """What is asked of which engine."""

    changes: tuple[str, ...] = ()
    model: str = ""
    engine: dict[str, Any] = field(default_factory=dict)
    prompt: tuple[int, ...] = tuple(TEXT)
    salt: str | None = None
    adapter: str | None = None
    image: int | None = None
    processor: dict[str, Any] = field(default_factory=dict)

    def set(self, **settings: Any) -> Setup:
        """The same one with other settings of its engine."""
        return replace(self, engine={**self.engine, **settings})

    def override(self, **settings: Any) -> Setup:
        """The same one with other values in its model's configuration."""
        return self.set(hf_overrides={**self.engine.get("hf_overrides", {}), **settings})

    def at(self, model: Path) -> Setup:
        return replace(self, model=str(model))

    def phase(self, root: Path | None) -> Phase:
        """Its engine on a directory; None: without VUA."""
        batch = Batch(
            [self.prompt],
            salt=self.salt,
            loras=[self.adapter] if self.adapter else (),
            images=[self.image] if self.image is not None else (),
            processor=self.processor,
        )
        settings = {"model": self.model, **self.engine}
        if self.image is not None:
            settings["skip_tokenizer_init"] = False
        return Phase([batch], engine=settings, root=root)


Change = Callable[[Setup, Path], Setup]


def _model_changes() -> dict[str, Change]:
    """Other models, or the same one in other files."""
    return {
        "ten rows": lambda s, at: s.at(rewritten(Path(s.model), at, rows=10)),
        "one tensor": lambda s, at: s.at(scaled(Path(s.model), at, "layers.0.mlp.up_proj.weight")),
        "one element": lambda s, at: s.at(scaled(Path(s.model), at, "layers.0.input_layernorm")),
        "sharded": lambda s, at: s.at(rewritten(Path(s.model), at, shards=3)),
        "metadata": lambda s, at: s.at(rewritten(Path(s.model), at, note="saved again")),
        "copied": lambda s, at: s.at(copied(Path(s.model), at)),
        "beside": _beside,
        "config edited": lambda s, at: s.at(_edited(Path(s.model), at)),
    }


def _beside(setup: Setup, at: Path) -> Setup:
    target = copied(Path(setup.model), at)
    torch.save({"learning_rate": 0.1}, target / "training_args.bin")
    (target / "README.md").write_text("another file")
    return setup.at(target)


def _edited(model: Path, at: Path) -> Path:
    target = copied(model, at)
    inner = (
        "text_config__" if "text_config" in json.loads((target / "config.json").read_text()) else ""
    )
    edit(target / "config.json", **{f"{inner}rms_norm_eps": 0.1})
    return target


def _engine_changes() -> dict[str, Change]:
    """Settings that change nothing in K and V."""
    return {
        "block 64": lambda s, _: s.set(block_size=64),
        "block 128": lambda s, _: s.set(block_size=128),
        "chunked prefill": lambda s, _: s.set(max_num_batched_tokens=128, max_num_seqs=4),
        "one at a time": lambda s, _: s.set(max_num_seqs=1),
        "shorter": lambda s, _: s.set(max_model_len=1024),
        "own cache": lambda s, _: s.set(enable_prefix_caching=True),
        "memory": lambda s, _: s.set(kv_cache_memory_bytes=48 << 20),
        "name": lambda s, _: s.set(served_model_name="another"),
        "generation": lambda s, _: s.set(generation_config="vllm"),
        "priority": lambda s, _: s.set(scheduling_policy="priority"),
        "engine seed": lambda s, _: s.set(seed=7),
        "load format": lambda s, _: s.set(load_format="safetensors"),
        "trust": lambda s, _: s.set(trust_remote_code=True),
        "logprobs": lambda s, _: s.set(max_logprobs=5),
        "synchronous": lambda s, _: s.set(async_scheduling=False),
        "two workers": lambda s, _: s.set(tensor_parallel_size=2),
    }


def _meaning_changes() -> dict[str, Change]:
    """Settings that change K and V, or whose owner is another one."""

    def text(setup: Setup, **settings: Any) -> Setup:
        inner = {"text_config": settings} if setup.image is not None else settings
        return setup.override(**inner)

    return {
        "theta": lambda s, _: text(
            s, rope_parameters={"rope_type": "default", "rope_theta": 500.0}
        ),
        "linear rope": lambda s, _: text(
            s, rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
        ),
        "epsilon": lambda s, _: text(s, rms_norm_eps=0.5),
        "gelu": lambda s, _: text(s, hidden_act="gelu"),
        "bfloat16": lambda s, _: s.set(dtype="bfloat16"),
        "bfloat16 cache": lambda s, _: s.set(kv_cache_dtype="bfloat16"),
        "noise": lambda s, _: s.set(load_format="dummy"),
        "other noise": lambda s, _: s.set(load_format="dummy", seed=3),
        "salt": lambda s, _: replace(s, salt="alice"),
    }


def _adapter_changes() -> dict[str, Change]:
    def adapted(seed: int, **more: Any) -> Change:
        def change(setup: Setup, at: Path) -> Setup:
            engine = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 2, **more}
            return replace(setup.set(**engine), adapter=str(strong_adapter(at, seed=seed)))

        return change

    return {
        "adapter 1": adapted(1),
        "adapter 2": adapted(2),
        "adapter 1 again": adapted(1, max_loras=1),
        "adapter 1, larger ranks": adapted(1, max_lora_rank=16),
        "adapter 1, queries and values": adapted(1, lora_target_modules=["q_proj", "v_proj"]),
        "adapter 1, values": adapted(1, lora_target_modules=["v_proj"]),
        "adapters allowed": lambda s, _: s.set(enable_lora=True, max_lora_rank=8, max_loras=2),
    }


def _picture_changes() -> dict[str, Change]:
    def processor(setup: Setup, at: Path) -> Setup:
        target = copied(Path(setup.model), at)
        edit(target / "processor_config.json", image_processor__image_mean=[0.1, 0.9, 0.5])
        return setup.at(target)

    return {
        "picture 2": lambda s, _: replace(s, image=2),
        "not normalised": lambda s, _: s.set(mm_processor_kwargs={"do_normalize": False}),
        "request not normalised": lambda s, _: replace(s, processor={"do_normalize": False}),
        "tower's last layer": lambda s, _: s.override(vision_feature_layer=-1),
        "tower's relu": lambda s, _: s.override(vision_config={"hidden_act": "relu"}),
        "numbered": lambda s, _: s.set(mm_processor_cache_gb=0),
        "processor edited": processor,
    }


def draw(rng: random.Random, number: int, at: Path) -> Setup:
    """Draw a setup: a family, and up to three changes of any kind."""
    family = rng.choice(("llama", "llama", "llava", "qwen3"))
    if family == "llava":
        place = models() / "campaign-llava"
        start = Setup(image=1, prompt=tuple(PICTURE))
        start = start.at(place if place.exists() else make_llava(place))
        kinds = [_picture_changes(), _picture_changes(), _meaning_changes()]
    else:
        place = models() / f"campaign-{family}"
        start = Setup().at(llama() if family == "llama" else make_model(place, family=family))  # type: ignore[arg-type]
        kinds = [_adapter_changes(), _meaning_changes(), _model_changes()]
    kinds += [_engine_changes(), _engine_changes(), _model_changes()]
    setup = replace(start, changes=(family,))
    for step in range(rng.choice((0, 1, 1, 1, 2, 2, 3))):
        changes = rng.choice(kinds)
        name = rng.choice(sorted(changes))
        setup = changes[name](setup, at / f"{number}-{step}")
        setup = replace(setup, changes=(*setup.changes, name))
    return setup


@dataclass
class Result:
    """What one setup gave."""

    setup: Setup
    problem: str | None = None
    """Why the engine did not run, with or without VUA."""
    uncached: bool = False
    tokens: list[int] = field(default_factory=list)
    """Without VUA."""
    chunks: dict[int, tuple[str, dict[str, torch.Tensor]]] = field(default_factory=dict)
    """Per chunk of its prompt where it is stored, and its K and V."""
    shared: list[int] = field(default_factory=list)
    """The tokens in the directory for all."""
    loaded: int = 0


def read_chunks(root: Path) -> dict[int, tuple[str, dict[str, torch.Tensor]]]:
    """Read a prompt's chunks from a directory: where, and K, V ``[heads, layers, tokens, dim]``."""
    found: dict[int, tuple[str, dict[str, torch.Tensor]]] = {}
    for file in stored(root):
        place = str(file.parent.relative_to(root))
        with safe_open(file, "pt") as opened:
            number = int(opened.metadata()["tokens"].partition("-")[0]) // CHUNK
            parts = {name: opened.get_tensor(name).float() for name in ("k", "v")}
        if number in found:  # of the next TP rank
            before = found[number][1]
            parts = {name: torch.cat([before[name], parts[name]]) for name in parts}
        found[number] = (place, parts)
    return found


def distance(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Return how far K or V are apart, relative to their length; inf: other shapes."""
    found = []
    for name in ("k", "v"):
        if one[name].shape != other[name].shape:
            return math.inf
        if not torch.equal(one[name], other[name]):
            found.append(float((one[name] - other[name]).norm() / one[name].norm()))
    return max((far if math.isfinite(far) else math.inf for far in found), default=0.0)


def observe(setup: Setup, own: Path) -> Result:
    """Run a setup without VUA, and in a directory of its own."""
    result = Result(setup)
    try:
        alone, stored_it = run(setup.phase(None), setup.phase(own))
    except AssertionError as problem:
        result.problem = str(problem)[-2000:]
        return result
    result.problem = alone.problem or stored_it.problem
    if result.problem is None:
        result.tokens = alone.tokens[0]
        result.chunks = read_chunks(own)
        result.uncached = not result.chunks
        if stored_it.tokens != alone.tokens:
            result.problem = f"other tokens while storing: {stored_it.tokens} for {alone.tokens}"
    return result


def share(result: Result, common: Path) -> None:
    """Run a setup in the directory for all."""
    served: Served
    (served,) = run(result.setup.phase(common))
    if served.problem is not None:
        result.problem = served.problem
        return
    result.shared, result.loaded = served.tokens[0], served.cached[0]


def compare(results: Sequence[Result]) -> dict[str, Any]:
    """Compare the keys and the K and V of all pairs, chunk by chunk.

    Where two setups differ in a later chunk of one prompt they are two models, of which nobody can
    know that an earlier chunk is equal (it holds none of the tokens whose embeddings differ): such
    chunks are counted by themselves.
    """
    counts: Counter[str] = Counter()
    wrong, missed = [], []
    for one, other in combinations(results, 2):
        if one.setup.salt != other.setup.salt:
            counts["pairs with other salts"] += 1
            continue
        counts["pairs"] += 1
        names = [" + ".join(each.setup.changes) for each in (one, other)]
        apart = []
        differ = False
        for number in sorted(one.chunks.keys() & other.chunks.keys()):
            (place, kv), (other_place, other_kv) = one.chunks[number], other.chunks[number]
            far, same_key = distance(kv, other_kv), place == other_place
            counts["chunks"] += 1
            counts["chunks with the same key"] += same_key
            if far >= OTHER:
                differ = True
                counts["chunks with other K and V"] += 1
                if same_key:
                    wrong.append([*names, number, far])
            elif far > SAME:
                counts["chunks in between"] += 1
            elif same_key:
                counts["chunks with the same K and V"] += 1
            else:
                apart.append([*names, number, far])
        if differ:
            counts["chunks equal by chance"] += len(apart)
        else:
            counts["chunks with the same K and V"] += len(apart)
            missed += apart
    same = counts["chunks with the same K and V"]
    return {
        "counts": dict(counts),
        "shared of what could be": 1 - len(missed) / same if same else None,
        "wrong": wrong,
        "missed": missed,
    }


def campaign(count: int, seed: int, say: Callable[[str], None] = print) -> dict[str, Any]:
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="vua-campaign-") as folder:
        place = Path(folder)
        (place / "made").mkdir()
        results = []
        for number in range(count):
            result = observe(draw(rng, number, place / "made"), place / f"own-{number}")
            results.append(result)
            far = "uncached" if result.uncached else f"{len(result.chunks)} chunks"
            say(f"{number:3} {' + '.join(result.setup.changes)}: {result.problem or far}"[:300])
        able = [result for result in results if result.problem is None and not result.uncached]
        for result in rng.sample(able, len(able)):
            share(result, place / "common")
        found = compare(able)
        names = {id(result): " + ".join(result.setup.changes) for result in able}
        found["other tokens"] = [
            [names[id(result)], result.loaded] for result in able if result.shared != result.tokens
        ]
        found["setups"] = len(able)
        found["uncached"] = [r.setup.changes for r in results if r.uncached and r.problem is None]
        found["problems"] = [
            [r.setup.changes, (r.problem or "")[-300:]] for r in results if r.problem is not None
        ]
        found["loaded in the directory for all"] = sum(result.loaded > 0 for result in able)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the campaign; return 1 where something was wrong, or too little was shared."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--setups", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args(arguments)
    found = campaign(chosen.setups, chosen.seed)
    if chosen.json:
        chosen.json.write_text(json.dumps(found, indent=1, default=str))
    for name in ("wrong", "other tokens", "missed", "problems", "uncached"):
        print(f"\n{name}: {len(found[name])}")
        for line in found[name][:20]:
            print("  ", line)
    print("\n", json.dumps(found["counts"], indent=1))
    print("setups:", found["setups"], " loaded:", found["loaded in the directory for all"])
    print("shared of what could be:", found["shared of what could be"])
    shared = found["shared of what could be"]
    return int(bool(found["wrong"] or found["other tokens"] or (shared or 0) < LEAST_SHARED))


if __name__ == "__main__":
    sys.exit(main())
