"""The configuration that vLLM makes of a small model, to be changed in one place."""

from __future__ import annotations

import os
import tempfile
import unittest
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from e2e.engine import ENVIRONMENT
from small_models import make_model

Given = AbstractContextManager[Any]


def on(kind: str) -> Given:
    """Let vLLM say that it runs on this platform."""
    asked = {f"is_{one}": lambda one=one: one == kind for one in ("cpu", "cuda", "rocm", "xpu")}
    asked |= {"get_device_name": lambda: "simulated"}
    return mock.patch("vllm.platforms.current_platform", SimpleNamespace(**asked, device_type=kind))


def engine_config(model: Path | str, *, hub_name: str = "", **more: Any) -> Any:
    """``hub_name``: the model, as vLLM has it online; offline it becomes a path."""
    from vllm.engine.arg_utils import EngineArgs

    given = {"dtype": "float32", "max_model_len": 2048, "skip_tokenizer_init": True} | more
    arguments = EngineArgs(model=str(model), **given)
    arguments.model = hub_name or arguments.model
    return arguments.create_engine_config()


class ConfigTest(unittest.TestCase):
    made: Any
    root: Path

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        folder = tempfile.TemporaryDirectory(prefix="vua-test-", ignore_cleanup_errors=True)
        cls.root = Path(cls.enterClassContext(folder))
        environment = ENVIRONMENT | {"XDG_CACHE_HOME": str(cls.root / "cache")}
        cls.enterClassContext(mock.patch.dict(os.environ, environment))
        for name in ("VUA_PATH", "VUA_DOOR"):
            os.environ.pop(name, None)
        cls.made = engine_config(make_model(cls.root / "model", layers=2))

    def given(self, part: str, **values: Any) -> Given:
        """A part of the configuration ("" for the whole), with other values."""
        owner = getattr(self.made, part) if part else self.made
        return mock.patch.multiple(owner, create=True, **values)
