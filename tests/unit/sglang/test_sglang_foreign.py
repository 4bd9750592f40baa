"""What runs in an SGLang engine and is not SGLang's own. Runs in its environment."""

from __future__ import annotations

import importlib.metadata
import types
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from helpers import DirectoryTest
from vua.connector.cache_spec import UncachedError

pytest.importorskip("sglang.srt", reason="SGLang has an environment of its own: `dev.py sglang`")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # SGLang's, about missing GPUs


def model() -> Any:
    from sglang.srt.layers.layernorm import RMSNorm

    return torch.nn.Sequential(torch.nn.Linear(4, 4), RMSNorm(4))


def foreign(changed: Any) -> dict[str, Any]:
    from vua.sglang.identity import foreign_code

    return foreign_code(SimpleNamespace(model=changed))


def scaling(factor: float) -> Callable[..., Any]:
    def hook(module: Any, inputs: Any, output: Any) -> Any:
        return output * factor

    return hook


class Hook:
    """A hook that is an object."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, module: Any, inputs: Any, output: Any) -> Any:
        return output * self.factor


class Scaled(torch.nn.Linear):
    """A class of somebody's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


class ForeignTest(DirectoryTest):
    def test_own(self) -> None:
        """Of SGLang's and torch's own modules nothing counts, a hook of torch's included."""
        own = model()
        torch.nn.utils.parametrizations.weight_norm(own[0])
        own.register_forward_hook(torch.utils.hooks.RemovableHandle)
        self.assertEqual({}, foreign(own))

    def test_hooks(self) -> None:
        """A hook counts with its code and with what it holds."""
        seen = [foreign(model())]
        for hook in (scaling(2.0), scaling(3.0), Hook(2.0), Hook(3.0)):
            for register in ("register_forward_hook", "register_forward_pre_hook"):
                hooked = model()
                getattr(hooked[0], register)(hook)
                with self.subTest(hook=hook, register=register):
                    found = foreign(hooked)
                    self.assertNotIn(found, seen)
                    self.assertEqual(found, foreign(hooked))
                    seen.append(found)

    def test_hooks_everywhere(self) -> None:
        """A hook on all modules counts."""
        handle = torch.nn.modules.module.register_module_forward_hook(scaling(2.0))
        self.addCleanup(handle.remove)
        self.assertNotEqual({}, foreign(model()))

    def test_classes(self) -> None:
        """A class of somebody's counts, and a method or function that somebody put in a place."""
        from sglang.srt.layers import layernorm

        def forward(self: Any, x: Any) -> Any:
            return x

        changed = model()
        changed[0] = Scaled(4, 4)
        self.assertNotEqual({}, foreign(changed))
        changed = model()
        changed[1].forward = types.MethodType(forward, changed[1])
        self.assertNotEqual({}, foreign(changed))
        with mock.patch.object(layernorm.RMSNorm, "forward_native", forward):
            self.assertNotEqual({}, foreign(model()))
        with mock.patch.object(layernorm, "a_function_of_the_module", forward, create=True):
            self.assertNotEqual({}, foreign(model()))
        self.assertEqual({}, foreign(model()))

    def test_not_to_be_told(self) -> None:
        """A hook that holds what has no lasting form is refused."""
        file = (self.root / "x").open("w")
        self.addCleanup(file.close)
        hooked = model()
        hooked.register_forward_hook(scaling(file))  # type: ignore[arg-type]
        with self.assertRaisesRegex(UncachedError, "not SGLang's"):
            foreign(hooked)

    def test_plugins(self) -> None:
        """A plug-in that is installed counts with its source, and so does a registered hook."""
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        package = self.root / "vua_somebodys_plugin.py"
        point = importlib.metadata.EntryPoint(
            "somebody", f"{package.stem}:register", "sglang.srt.plugins"
        )
        self.monkeypatch.syspath_prepend(str(self.root))

        def points(group: str) -> list[importlib.metadata.EntryPoint]:
            return [point] if group == point.group else []

        seen = []
        with mock.patch("importlib.metadata.entry_points", points):
            for text in ("A = 1", "A = 2"):
                package.write_text(text)
                seen.append(foreign(model()))
            self.monkeypatch.setenv("SGLANG_PLUGINS", "other")
            self.assertEqual({}, foreign(model()))
        self.assertEqual(2, len({str(one) for one in seen if one}))
        HookRegistry.register("sglang.srt.layers.layernorm.x", scaling(2.0), HookType.REPLACE)
        self.addCleanup(HookRegistry._hooks.clear)
        self.assertNotEqual({}, foreign(model()))

    def test_attention(self) -> None:
        """A backend counts where the model needs what it does not read, or where bits count."""
        from vua.sglang.identity import attention_that_counts

        def counted(cap: float, backend: str, *, exact: bool = False) -> dict[str, Any]:
            layer = torch.nn.Linear(4, 4)
            layer.logit_cap = cap
            arguments = SimpleNamespace(
                attention_backend=backend,
                prefill_attention_backend=None,
                decode_attention_backend=None,
                enable_deterministic_inference=exact,
                device="cpu",
            )
            return attention_that_counts(SimpleNamespace(model=layer, server_args=arguments))

        for cap, backend in ((0.0, "torch_native"), (0.0, "triton"), (50.0, "triton")):
            self.assertEqual({}, counted(cap, backend))
        self.assertEqual({"attention": ["torch_native"]}, counted(50.0, "torch_native"))
        exact = [counted(0.0, backend, exact=True) for backend in ("triton", "torch_native")]
        self.assertNotEqual(*exact)
        self.assertNotIn({}, exact)

    @pytest.fixture(autouse=True)
    def _monkeypatch(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch
