"""An SGLang engine's setup, and what in it is unusual. Runs in SGLang's environment."""

from __future__ import annotations

import importlib.metadata
import sys
import types
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from helpers import DirectoryTest

pytest.importorskip("sglang.srt", reason="SGLang has an environment of its own: `dev.py sglang`")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # SGLang's, about missing GPUs


def runner(**arguments: Any) -> Any:
    """As much of SGLang's model runner as the setup needs."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.layers.layernorm import RMSNorm
    from sglang.srt.server_args import ServerArgs

    return SimpleNamespace(
        model=torch.nn.Sequential(torch.nn.Linear(4, 4), RMSNorm(4)),
        attn_backend=TorchNativeAttnBackend.__new__(TorchNativeAttnBackend),
        server_args=ServerArgs(model_path="model", **arguments),
    )


def setup(of: Any) -> Any:
    from vua.sglang.identity import setup_of

    return setup_of(of)


class Scaled(torch.nn.Linear):
    """A class of somebody's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


def hook(module: Any, inputs: Any, output: Any) -> Any:
    return output * 2


class SetupTest(DirectoryTest):
    def assert_unusual(self, of: Any, text: str) -> None:
        found = setup(of)
        self.assertRegex("; ".join(found.unusual), text)
        self.assertNotEqual("", found.epoch)

    def test_same(self) -> None:
        """Two engines alike have one setup, wherever they are, with nothing unusual."""
        found = setup(runner())
        self.assertEqual(([], "", 64), (found.unusual, found.epoch, len(found.digest)))
        with mock.patch.dict("os.environ", {"SGLANG_RUN_ID": "another at each start"}):
            same = setup(runner(port=31000, log_level="warning", random_seed=5))
        self.assertEqual(found, same)
        storage = {"hicache_storage_backend_extra_config": '{"shared_storage_path": "/kv"}'}
        self.assertEqual(found, setup(runner(**storage)))  # a path computes nothing

    def test_others(self) -> None:
        """Arguments, variables, and code that replaces SGLang's or torch's are other setups."""
        from sglang.srt.layers import layernorm
        from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

        def replaced(function: Any) -> Any:
            scope = {"__name__": function.__module__}
            exec("def changed(self, *args, **named): return args[0] * 2", scope)
            return scope["changed"]

        native, rotated = layernorm.RMSNorm.forward_native, TorchNativeAttnBackend.forward_extend
        cases: tuple[Any, ...] = (
            mock.patch.dict("os.environ", {"SGLANG_SOMETHING": "1"}),
            mock.patch.dict("os.environ", {"OMP_NUM_THREADS": "17"}),
            mock.patch.object(layernorm.RMSNorm, "forward_native", replaced(native)),
            mock.patch.object(TorchNativeAttnBackend, "forward_extend", replaced(rotated)),
        )
        seen = {setup(runner()).digest, setup(runner(chunked_prefill_size=128)).digest}
        self.assertEqual(2, len(seen))
        for number, case in enumerate(cases):
            with self.subTest(number), case:
                found = setup(runner())
                self.assertNotIn(found.digest, seen)
                self.assertEqual(([], ""), (found.unusual, found.epoch))
                seen.add(found.digest)

    def test_unusual(self) -> None:
        """Hooks, classes and functions of somebody's are named."""
        from sglang.srt.layers import layernorm

        hooked, other, bound, backend = (runner() for _ in range(4))
        hooked.model[0].register_forward_hook(hook)
        self.assert_unusual(hooked, f"a hook of {__name__}")
        other.model[0] = Scaled(4, 4)
        bound.model[1].forward = types.MethodType(hook, bound.model[1])
        backend.attn_backend.forward_extend = types.MethodType(hook, backend.attn_backend)
        for changed in (other, bound, backend):
            self.assert_unusual(changed, f"code of {__name__}")
        with mock.patch.object(layernorm.RMSNorm, "forward_native", hook):
            self.assert_unusual(runner(), f"code of {__name__}")
        handle = torch.nn.modules.module.register_module_forward_hook(hook)
        self.addCleanup(handle.remove)
        self.assert_unusual(runner(), f"a hook of {__name__}")

    def test_plugins(self) -> None:
        """A plug-in that SGLang loads is named, and so is a registered hook."""
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        point = importlib.metadata.EntryPoint("somebody", "x:y", "sglang.srt.plugins")

        def points(group: str) -> list[importlib.metadata.EntryPoint]:
            return [point] if group == point.group else []

        with mock.patch("vua.sglang.identity.entry_points", points):
            self.assert_unusual(runner(), "the plug-in somebody")
            with mock.patch.dict("os.environ", {"SGLANG_PLUGINS": "other"}):
                self.assertEqual([], setup(runner()).unusual)
        HookRegistry.register("sglang.srt.layers.layernorm.x", hook, HookType.REPLACE)
        self.addCleanup(HookRegistry._hooks.clear)
        self.assert_unusual(runner(), "a hook on sglang.srt.layers.layernorm.x")

    def test_package(self) -> None:
        """A package that SGLang imports for models is not unusual: its name counts."""
        package = self.root / "vua_somebodys_models.py"
        package.write_text(
            "import torch\n\n\nclass Own(torch.nn.Linear):\n    def forward(self, x): return x\n"
        )
        with mock.patch("sys.path", [str(self.root), *sys.path]):
            served = runner()
            served.model[0] = importlib.import_module(package.stem).Own(4, 4)
            self.assert_unusual(served, f"code of {package.stem}")
            with mock.patch.dict("os.environ", {"SGLANG_EXTERNAL_MODEL_PACKAGE": package.stem}):
                self.assertEqual([], setup(served).unusual)

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
