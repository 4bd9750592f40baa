"""Classes of models by each door, each the whole way: `rows` asks them.

`tests/model_classes.py` lists where the other classes are tested.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from e2e.architectures import (
    deepseek,
    eagle,
    ernie,
    gemma3,
    gemma3n,
    gemma4,
    gpt_oss,
    lfm2,
    llama4,
    qwen3_next,
    small,
)
from e2e.harness import Phase, llama, needs_windows, run
from e2e.kinds import DELTA_ENGINE, SHORT_ENGINE
from e2e.rows import WHOLE, check_by_tier, check_loads, check_preempted

pytestmark = [pytest.mark.vllm, pytest.mark.thorough]

CPU = Path("/proc/cpuinfo").read_text(encoding="utf-8")
TP2: dict[str, Any] = {"tensor_parallel_size": 2}
BY_TURNS = ("sliding_attention", "full_attention") * 2
AVX512 = pytest.mark.skipif("avx512f" not in CPU, reason="vLLM needs AVX-512")
AMX = pytest.mark.skipif("amx_tile" not in CPU, reason="without AMX it continues no prefix")


def mistral() -> Path:
    """A Mistral of whose layers each has a window."""
    return small("MistralForCausalLM", sliding_window=128)


def drafted(method: str, count: int, **more: Any) -> dict[str, Any]:
    return {"speculative_config": {"method": method, "num_speculative_tokens": count} | more}


class Case(NamedTuple):
    model: Callable[[], Path] = llama
    engine: Callable[[], dict[str, Any]] = dict
    damaged: str = "l"
    """How the names of its files begin that are damaged."""
    others: int = 2
    """How many other prompts are asked: tokens of some depend on how vLLM cuts a prompt."""
    mark: Any = ()

    @property
    def settings(self) -> dict[str, Any]:
        return {"model": str(self.model()), **self.engine()}


CASES = {
    "llama": Case(),
    # each engine compiles the search for n-grams anew
    "n-grams": Case(engine=lambda: drafted("ngram", 2, prompt_lookup_max=3), mark=pytest.mark.soak),
    "gpt-oss": Case(gpt_oss, damaged="w128"),
    "gemma3": Case(gemma3, damaged="w128"),
    "gemma3n": Case(lambda: gemma3n(*BY_TURNS), damaged="w128"),
    "gemma3n of one kind": Case(lambda: gemma3n(*["full_attention"] * 4)),
    "mistral": Case(mistral, damaged="w128"),
}
BY_TIER = {
    "llama": Case(),
    "gpt-oss": Case(gpt_oss),
    "gemma3n": Case(lambda: gemma3n(*BY_TURNS)),
    "gemma4": Case(gemma4),
    "llama4": Case(llama4),
    "qwen3-next": Case(qwen3_next, lambda: DELTA_ENGINE),
    "lfm2": Case(lfm2, lambda: SHORT_ENGINE, others=0),
    "eagle": Case(engine=lambda: drafted("eagle", 2, model=str(eagle()))),
    "mtp": Case(ernie, lambda: drafted("mtp", 1)),
    "fp8": Case(engine=lambda: {"kv_cache_dtype": "fp8"}, mark=AVX512),
    "deepseek": Case(deepseek, lambda: {"block_size": 16}, mark=AMX),
}


def each(cases: dict[str, Case]) -> Any:
    chosen = [pytest.param(case, id=name, marks=case.mark) for name, case in cases.items()]
    return pytest.mark.parametrize("case", chosen)


@needs_windows
class TestClasses:
    @each(CASES)
    def test_row(self, case: Case, tmp_path: Path) -> None:
        check_loads(case.settings, tmp_path / "kv", damaged=case.damaged)

    @each(CASES)
    def test_preempted(self, case: Case, tmp_path: Path) -> None:
        check_preempted(case.settings, tmp_path / "kv")

    @each(BY_TIER)
    def test_by_tier(self, case: Case, tmp_path: Path) -> None:
        check_by_tier(case.settings, tmp_path / "kv", case.others)

    def test_workers(self, tmp_path: Path) -> None:
        """What two workers have stored of each group of layers one loads, and two load again."""
        engine, root = {"model": str(gpt_oss())}, tmp_path / "kv"
        plain, *served = run(
            Phase([WHOLE], engine | TP2),
            Phase([WHOLE], engine | TP2, root),
            Phase([WHOLE], engine, root),
            Phase([WHOLE], engine | TP2, root),
        )

        assert [one.problem for one in served] == [None] * 3
        assert [one.tokens for one in served] == [plain.tokens] * 3
        assert [cached for one in served for cached in one.cached] == [0, 640, 640]
