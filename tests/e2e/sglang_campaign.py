"""Random SGLang servers: which pairs of them share, against the K and V that each computes.

    dev.py sglang-campaign [--setups 16] [--seed 0] [--json FILE]

A set-up is a tiny model, arguments, environment variables and a request, changed at random in up to
three ways. Each has a directory of its own, out of which its K and V are
read. Two set-ups share a chunk if it has the same name in the same namespace; that is right if its
K and V are equal, and wrong if they are not (`e2e.campaign.compare`). 16 set-ups are 120 pairs.
Not drawn is what computes the same in another way, and counts nevertheless: another implementation
of a model, a value in `--json-model-override-args` instead of the model's own file.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from uuid import NAMESPACE_URL, uuid5

from e2e.adapters import strong_adapter
from e2e.campaign import LEAST_SHARED, Result, compare, read_chunks
from e2e.checkpoints import copied, edit, rewritten, scaled
from e2e.harness import llama, models, tokens
from e2e.sglang_hooks import hooks
from e2e.sglang_server import Schedulers, scheduler_arguments
from small_models import make_model

TEXT = tokens(330, seed=1)


@dataclass(frozen=True)
class Setup:
    """What is asked of which server."""

    changes: tuple[str, ...]
    model: Path
    arguments: dict[str, Any] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    request: dict[str, Any] = field(default_factory=dict)
    salt: str | None = None
    """Of the request's names, which are no other's then."""

    def with_arguments(self, **more: Any) -> Setup:
        return replace(self, arguments={**self.arguments, **more})

    def with_variables(self, **more: str) -> Setup:
        return replace(self, variables={**self.variables, **more})


Change = Callable[[Setup, Path], Setup]


def _harmless() -> dict[str, Change]:
    return {
        "chunked": lambda s, _: s.with_arguments(chunked_prefill_size=128),
        "one at a time": lambda s, _: s.with_arguments(max_running_requests=1),
        "log": lambda s, _: s.with_arguments(log_level="warning", decode_log_interval=7),
        "seed": lambda s, _: s.with_arguments(random_seed=7),
        "schedule": lambda s, _: s.with_arguments(schedule_policy="lof"),
        "shorter": lambda s, _: s.with_arguments(context_length=1024),
        "name": lambda s, _: s.with_arguments(served_model_name="another"),
        "trust": lambda s, _: s.with_arguments(trust_remote_code=True),
        "format": lambda s, _: s.with_arguments(load_format="safetensors"),
        "metrics": lambda s, _: s.with_arguments(enable_metrics=True),
        "host layout": lambda s, _: s.with_arguments(hicache_mem_layout="page_first_direct"),
        "variables": lambda s, _: s.with_variables(SGLANG_LOG_MS="1", SGLANG_TOOL_STRICT_LEVEL="1"),
        "port": lambda s, _: s.with_variables(SGLANG_HEALTH_CHECK_TIMEOUT="33", NCCL_ALGO="Ring"),
        "copied": lambda s, at: replace(s, model=copied(s.model, at)),
        "sharded": lambda s, at: replace(s, model=rewritten(s.model, at, shards=3)),
    }


def _meaningful() -> dict[str, Change]:
    """What changes K and V, or whose they are."""

    def config_file(setup: Setup, at: Path) -> Setup:
        model = copied(setup.model, at)
        shutil.copy(model / "config.json", model / "other.json")
        edit(model / "other.json", rms_norm_eps=0.7)
        return replace(setup, model=model).with_arguments(decrypted_config_file="other.json")

    def adapter(setup: Setup, _: Path) -> Setup:
        place = strong_adapter(models() / "sglang-adapter", seed=1)
        lora = {"lora_paths": [f"one={place}"], "lora_backend": "torch_native"}
        return replace(setup.with_arguments(**lora), request={"lora": "one"}, salt="an id")

    def guessed(setup: Setup, _: Path) -> Setup:
        key = uuid5(NAMESPACE_URL, f"one\0{models() / 'sglang-adapter'}").hex
        return replace(setup, request={"extra_key": key}, salt="an id")

    return {
        "hook": lambda s, _: s.with_arguments(forward_hooks=hooks(0.5)),
        "another hook": lambda s, _: s.with_arguments(forward_hooks=hooks(0.3)),
        "package": lambda s, _: s.with_variables(SGLANG_EXTERNAL_MODEL_PACKAGE="e2e.sglang_models"),
        "override": lambda s, _: s.with_arguments(json_model_override_args='{"rms_norm_eps": 0.5}'),
        "config file": config_file,
        "other weights": lambda s, at: replace(
            s, model=scaled(s.model, at, "layers.0.mlp.up_proj.weight")
        ),
        "rows": lambda s, at: replace(s, model=rewritten(s.model, at, rows=10)),
        "bfloat16": lambda s, _: s.with_arguments(dtype="bfloat16"),
        "adapter": adapter,
        "guessed": guessed,
    }


def draw(rng: random.Random, number: int, at: Path) -> Setup:
    """Draw a set-up: a family, and up to three changes of any kind."""
    family = rng.choice(("llama", "llama", "qwen3"))
    model = llama() if family == "llama" else make_model(models() / "sglang-qwen3", family="qwen3")
    setup = Setup((family,), model)
    for step in range(rng.choice((0, 1, 1, 2, 2, 3))):
        changes = rng.choice((_harmless(), _harmless(), _meaningful()))
        name = rng.choice(sorted(changes))
        if name not in setup.changes:
            setup = changes[name](setup, at / f"{number}-{step}")
            setup = replace(setup, changes=(*setup.changes, name))
    return setup


def observe(sglang: Schedulers, setup: Setup, own: Path) -> Result:
    """Run a set-up in a directory of its own."""
    result = Result(setup)  # type: ignore[arg-type] - salt and changes are what is read of it
    arguments = scheduler_arguments(setup.model, own, **setup.arguments)
    try:
        said = sglang.run(arguments, {"ask": TEXT, "new": 8, **setup.request}, **setup.variables)
    except AssertionError as problem:
        result.problem = str(problem)[-1500:]
        return result
    result.tokens = said[-1]["tokens"]
    result.chunks = read_chunks(own) if own.exists() else {}
    result.uncached = not result.chunks
    return result


def campaign(
    sglang: Schedulers, count: int, seed: int, say: Callable[[str], None] = print
) -> dict[str, Any]:
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="vua-campaign-") as folder:
        place = Path(folder)
        (place / "made").mkdir()
        results = []
        for number in range(count):
            setup = draw(rng, number, place / "made")
            result = observe(sglang, setup, place / f"own-{number}")
            results.append(result)
            far = "uncached" if result.uncached else f"{len(result.chunks)} chunks"
            say(f"{number:3} {' + '.join(setup.changes)}: {result.problem or far}"[-300:])
        able = [result for result in results if result.problem is None and not result.uncached]
        found = compare(able)
    found |= {
        "setups": count,
        "seed": seed,
        "ran": len([result for result in results if result.problem is None]),
        "uncached": len([result for result in results if result.uncached and not result.problem]),
    }
    return found


def main() -> int:
    """Run it as the command line says; 1 where a key stands for two functions."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--setups", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    sglang = Schedulers()
    try:
        found = campaign(sglang, chosen.setups, chosen.seed)
    finally:
        sglang.close()
    print(json.dumps(found, indent=1))
    if chosen.json:
        chosen.json.write_text(json.dumps(found, indent=1))
    shared = found["shared of what could be"]
    return int(bool(found["wrong"]) or (shared is not None and shared < LEAST_SHARED))


if __name__ == "__main__":
    sys.exit(main())
