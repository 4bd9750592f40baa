"""Each architecture that vLLM serves, with weights that make attention count.

`rows` asks them. Of what vLLM cannot run on a CPU, or VUA does not store there, the reason is
asked, and VUA describes its real configuration, as those of all.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from e2e.checkpoints import with_biases
from e2e.damage import stored
from e2e.engine import ENVIRONMENT
from e2e.harness import Phase, needs_windows, run
from e2e.kinds import KINDS, Kind
from e2e.rows import WHOLE, check_by_tier, check_loads

pytestmark = [pytest.mark.vllm, pytest.mark.soak]


class TestArchitectures:
    @needs_windows
    @pytest.mark.parametrize("name", KINDS)
    def test_one(self, name: str, tmp_path: Path) -> None:
        """Its real configuration is described; a small model of it runs in real engines."""
        kind = KINDS[name]
        check_door(name, kind, tmp_path)
        config = {"architectures": [name], **kind.config}
        model = with_biases(tmp_path / "model", kind.model_type, **config)
        engine, root = {"model": str(model), **kind.engine}, tmp_path / "kv"
        if kind.cannot:
            check_refused(kind, engine, root)
        elif kind.why_tier:
            check_by_tier(engine, root, len(kind.loaded))
        else:
            check_loads(engine, root, kind.loaded)


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


def check_refused(kind: Kind, engine: dict[str, Any], root: Path) -> None:
    """On a CPU vLLM does not run it, or VUA stores nothing: either says why."""
    by_name = {"kv_connector": "VUA", "kv_connector_module_path": None}
    transfer = by_name if kind.why_tier else {}
    bare, served = run(Phase([WHOLE], engine), Phase([WHOLE], engine, root, transfer=transfer))

    assert kind.cannot in (served.problem or served.log)
    assert bare.tokens == served.tokens
    assert (bare.problem is None) == (served.problem is None)
    assert stored(root) == []
