"""Each architecture that vLLM serves, with weights that make attention count.

Cold, then by another process the whole prompt, a longer one and one that shares a part; a bit
flipped in each file; noise in the place of what is stored, with which other tokens come out. Of
what vLLM cannot run on a CPU, or VUA does not store there, the reason is asked, and VUA describes
its real configuration, as those of all.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from e2e.checkpoints import with_biases
from e2e.controls import exchange_for_noise
from e2e.damage import flip, stored
from e2e.engine import ENVIRONMENT
from e2e.harness import (
    PROMPT,
    RESET,
    RESET_ALL,
    Batch,
    Exchange,
    Phase,
    needs_windows,
    run,
    tier_at,
    tokens,
)
from e2e.kinds import ALIGNED, KINDS, Kind

pytestmark = [pytest.mark.vllm, pytest.mark.soak]

WHOLE = Batch([PROMPT[:642]])
"""Two tokens are left to compute: states fade, and here they cannot."""
OTHERS = (Batch([PROMPT[:642] + tokens(300, seed=4)]), Batch([PROMPT[:400] + tokens(150, seed=2)]))


class TestArchitectures:
    @needs_windows
    @pytest.mark.parametrize("name", KINDS)
    def test_one(self, name: str, tmp_path: Path) -> None:
        """Its real configuration is described; a small model of it runs in real engines."""
        kind = KINDS[name]
        check_door(name, kind, tmp_path)
        config = {"architectures": [name], **kind.config}
        model = with_biases(tmp_path / "model", kind.model_type, **config)
        check = check_by_tier if kind.why_tier else check_loads
        check = check_refused if kind.cannot else check
        check(kind, {"model": str(model), **kind.engine}, tmp_path / "kv")


def check_door(name: str, kind: Kind, at: Path) -> None:
    """On a GPU it takes the door that the table says; the connector has an identity for it."""
    import torch
    from transformers import AutoConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.models import registry
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    from vua.connector.config import ConnectorConfig
    from vua.vllm.cache_spec import describe
    from vua.vllm.support import door_of

    real = AutoConfig.for_model(kind.model_type).to_dict() | {"architectures": [name]}
    (at / "config.json").write_text(json.dumps(real), encoding="utf-8")
    given = {"max_model_len": 1024, "skip_tokenizer_init": True, "dtype": "bfloat16"}
    in_this_process = mock.patch.object(registry, "_run_in_subprocess", lambda look: look())
    with mock.patch.dict(os.environ, ENVIRONMENT), in_this_process:
        config = EngineArgs(model=str(at), **given).create_engine_config()
    heads = config.model_config.get_total_num_kv_heads()
    spec = FullAttentionSpec(32, num_kv_heads=heads, head_size=32, dtype=torch.bfloat16)
    table = SimpleNamespace(layer_names=["model.layers.0.attn"], kv_cache_spec=spec)
    caches = SimpleNamespace(kv_cache_groups=[table])
    asked = {f"is_{one}": lambda one=one: one == "cuda" for one in ("cpu", "cuda", "rocm", "xpu")}
    gpu = SimpleNamespace(**asked, device_type="cuda")
    memory = mock.patch("vua.vllm.support.machine_memory_nbytes", return_value=64 << 30)
    with mock.patch("vllm.platforms.current_platform", gpu), memory:
        door, why = door_of(config)
        assert door == ("tier" if kind.why_tier else "connector"), why
        assert kind.why_tier in why
        if not kind.why_tier:
            found = describe(config, caches, ConnectorConfig(shared_storage_path=str(at)))
            assert len(found.identity.model) == 64


def check_loads(kind: Kind, engine: dict[str, Any], root: Path) -> None:
    """The same tokens in every way, and with noise other ones."""
    others = OTHERS[: len(kind.loaded)]
    flipped, noise = (root.with_name(name) for name in ("flipped", "noise"))

    def phase(*batches: Batch | Exchange) -> Phase:
        steps = [step for batch in batches for step in (RESET, batch)]
        return Phase(steps, engine, root)

    (cold,) = run(
        phase(WHOLE, *(replace(one, salt=f"other {at}") for at, one in enumerate(others)))
    )
    assert cold.problem is None
    assert len({*map(tuple, cold.tokens)}) == len(cold.tokens), cold.tokens
    assert not any(cold.cached)
    for copy in (flipped, noise):
        shutil.copytree(root, copy)
    for path in stored(flipped):
        flip(path)
    exchange_for_noise(noise, WHOLE.prompts[0])

    again = (Exchange(flipped, root), WHOLE, Exchange(noise, root), WHOLE)
    (warm,) = run(phase(WHOLE, *others, *again))

    assert warm.problem is None
    *right, wrong = warm.tokens
    assert right == [*cold.tokens, cold.tokens[0]]
    assert warm.cached == [640, *kind.loaded, 0, 640]
    assert warm.counts["corrupt"] > 0
    assert warm.counts["tokens_loaded"] >= 2 * 640 + sum(kind.loaded)
    assert wrong != cold.tokens[0]


def check_by_tier(kind: Kind, engine: dict[str, Any], root: Path) -> None:
    """The same tokens by another process, of which a part is loaded; no damaged byte is."""
    flipped, others = root.with_name("flipped"), OTHERS[: len(kind.loaded)]
    engine = ALIGNED | engine

    def phase(at: Path, *batches: Batch) -> Phase:
        steps = [step for batch in batches for step in (RESET_ALL, batch)]
        return Phase(steps, engine, at, transfer=tier_at(at))

    apart = (replace(one, salt=f"other {at}") for at, one in enumerate(others))
    (cold,) = run(phase(root, WHOLE, *apart))
    assert cold.problem is None
    assert len({*map(tuple, cold.tokens)}) == len(cold.tokens), cold.tokens
    shutil.copytree(root, flipped)
    for path in stored(flipped):
        flip(path)

    warm, damaged = run(phase(root, WHOLE, *others), phase(flipped, WHOLE))

    assert (cold.tokens, cold.tokens[:1]) == (warm.tokens, damaged.tokens)
    assert (not any(cold.cached), damaged.cached) == (True, [0])
    assert warm.cached[0] >= 512


def check_refused(kind: Kind, engine: dict[str, Any], root: Path) -> None:
    """On a CPU vLLM does not run it, or VUA stores nothing: either says why."""
    by_name = {"kv_connector": "VUA", "kv_connector_module_path": None}
    transfer = by_name if kind.why_tier else {}
    bare, served = run(Phase([WHOLE], engine), Phase([WHOLE], engine, root, transfer=transfer))

    assert kind.cannot in (served.problem or served.log)
    assert bare.tokens == served.tokens
    assert (bare.problem is None) == (served.problem is None)
    assert stored(root) == []
