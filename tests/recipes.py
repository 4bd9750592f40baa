"""Runs examples/recipe.py with a small random model of each class: `dev.py recipe [NAME ...]`.

Store, reset, load, identical output. The results go into docs/measurements/models.json, and onto
docs/models.md.
"""

from __future__ import annotations

import datetime as dt
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from e2e import architectures
from e2e.harness import ENVIRONMENT, llama, models
from model_classes import ROOT, load, save, write
from small_models import make_model

SAME: dict[str, Any] = {
    "block_size": 32,
    "dtype": "float32",
    "enforce_eager": True,
    "kv_cache_memory_bytes": 128 << 20,
    "max_model_len": 4096,
    "skip_tokenizer_init": True,
}
TIMEOUT_S = 240


class Recipe(NamedTuple):
    """A class: how its checkpoint is made, and how vLLM is started with it."""

    make: Callable[[], Path]
    engine: dict[str, Any] = {}  # noqa: RUF012 - read alone
    extra: dict[str, Any] = {}  # noqa: RUF012


def windowed() -> Path:
    return make_model(models() / "mistral-window", family="mistral")


def guessing(method: str, tokens: int = 2, **more: Any) -> dict[str, Any]:
    config = {"method": method, "num_speculative_tokens": tokens, **more}
    return {"speculative_config": config}


BFLOAT16 = {"dtype": "bfloat16", "mamba_ssm_cache_dtype": "float32"}
RECIPES: dict[str, Recipe] = {
    "full attention": Recipe(llama),
    "full attention, fp8 cache": Recipe(llama, {"kv_cache_dtype": "fp8"}),
    "full and windowed layers": Recipe(architectures.gpt_oss),
    "windowed layers alone": Recipe(windowed, {"hf_overrides": {"sliding_window": 128}}),
    "layers that share caches": Recipe(
        lambda: architectures.gemma3n(*["sliding_attention", "full_attention"] * 2)
    ),
    "gated delta net": Recipe(architectures.qwen3_next, BFLOAT16),
    "short convolution": Recipe(architectures.lfm2),
    "guesses by n-grams": Recipe(llama, guessing("ngram", prompt_lookup_max=3)),
    "draft by EAGLE": Recipe(
        llama, {"draft": lambda: guessing("eagle", model=str(architectures.eagle()))}
    ),
    "draft in the model (MTP)": Recipe(architectures.ernie, guessing("mtp", tokens=1)),
}


def run(name: str) -> dict[str, Any]:
    """Run one, in a process of its own."""
    one = RECIPES[name]
    engine = SAME | {key: value for key, value in one.engine.items() if key != "draft"}
    if "draft" in one.engine:
        engine |= one.engine["draft"]()
    model = one.make()
    with tempfile.TemporaryDirectory(prefix="vua-recipe-") as folder:
        result, root = Path(folder, "result"), Path(folder, "kv")
        words = ["--path", str(root), "--engine", json.dumps(engine), "--json", str(result)]
        extra = {"witness_every": 0, "timeouts": {"lookup_s": 60.0}} | one.extra
        program = [sys.executable, str(ROOT / "examples" / "recipe.py"), str(model), *words]
        done = subprocess.run(
            [*program, "--extra", json.dumps(extra)],
            env={**os.environ, **ENVIRONMENT},
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        if result.exists():
            found: dict[str, Any] = json.loads(result.read_text("utf-8"))
        else:
            lines = (done.stderr or done.stdout).strip().splitlines() or ["no answer"]
            found = {"passed": False, "why": lines[-1][:120], "engine": "vLLM", "device": "-"}
            found |= {"groups": [], "stored_bytes": 0, "loaded_bytes": 0}
    found.pop("model", None)
    return found | {"date": dt.datetime.now(dt.timezone.utc).date().isoformat()}


def main() -> int:
    """Run what is asked for; return the exit status."""
    names = sys.argv[1:] or list(RECIPES)
    if unknown := sorted({*names} - {*RECIPES}):
        sys.exit(f"no recipe {unknown[0]!r}; there are: {'; '.join(RECIPES)}")
    results, failed = load(), 0
    for name in names:
        one = run(name)
        failed += not one["passed"]
        what = "identical" if one["passed"] else one.get("why", "not identical")
        sys.stdout.write(f"{name}: {what}\n")
        sys.stdout.flush()
        results["recipes"][name] = one
        save(results)
    write(results)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
