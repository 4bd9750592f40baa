"""Every argument and variable of SGLang stands in VUA's tables, and does as said there; setups.

`make_sglang_fields.py` reads them from the installed release's sources; `sglang_fields.json` has
what computes nothing of the variables there that are of no family of SGLang's. Runs in SGLang's
environment: `dev.py sglang`.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
import types
import unittest
from collections import Counter
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from helpers import TESTS, DirectoryTest
from make_sglang_fields import listed
from vua.connector.cache_spec import UncachedError

pytest.importorskip("sglang.srt", reason="SGLang has an environment of its own: `dev.py sglang`")
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # SGLang's, about missing GPUs

import sglang  # noqa: E402 - it is there

from vua.sglang.identity import (  # noqa: E402 - likewise
    COUNTED_VARIABLES,
    EXCLUDED,
    EXCLUDED_VARIABLES,
    FAMILIES,
    NEUTRAL,
    settings_that_count,
    setup_of,
    variables_that_count,
)

ARGUMENTS, VARIABLES = listed(Path(str(sglang.__file__)).parent.parent)
HARMLESS = set(json.loads((TESTS / "sglang_fields.json").read_text())["harmless"])
BEYOND = (
    "NVIDIA_TF32_OVERRIDE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "DNNL_DEFAULT_FPMATH_MODE",
)
"""Variables that count and that not SGLang reads, but what computes for it."""

# A value that some server may have and that changes what it computes.
COUNTED: tuple[tuple[str, Any], ...] = (
    ("decrypted_config_file", "other.json"),
    ("dllm_algorithm", "LowConfidence"),
    ("enable_deterministic_inference", True),
    ("enable_mis", True),
    ("enable_quant_communications", True),
    ("enable_tf32_matmul", True),
    ("experts_shared_outer_loras", True),
    ("experts_shared_outer_loras", False),
    ("forward_hooks", [{"target_modules": ["*"], "hook_factory": "somebody:hook"}]),
    ("forward_hooks", [{"target_modules": ["*.mlp"], "hook_factory": "somebody:hook"}]),
    ("fp8_gemm_runner_backend", "triton"),
    ("hisparse_config", '{"top_k": 2048}'),
    ("json_model_override_args", '{"rope_theta": 500}'),
    ("json_model_override_args", '{"rope_theta": 501}'),
    ("kv_canary", "log"),
    ("model_impl", "transformers"),
    ("model_loader_extra_config", '{"enable_multithread_load": true}'),
    ("moe_runner_backend", "triton"),
    ("quantization", "fp8"),
    ("rl_on_policy_target", "fsdp"),
    ("speculative_algorithm", "NGRAM"),
    ("an_argument_of_next_year", 1),
)


def excluded() -> list[str]:
    return [*chain(*EXCLUDED.values())]


def server(**changed: Any) -> Any:
    """Arguments with every listed one neutral but for these."""
    values: dict[str, Any] = dict.fromkeys(excluded())
    values |= {name: values[0] for name, values in NEUTRAL.items()}
    values |= changed
    return SimpleNamespace(__struct_fields__=tuple(values), **values)


def counted(**changed: Any) -> dict[str, Any]:
    return settings_that_count(server(**changed))


class TableTest(unittest.TestCase):
    def test_every_argument_is_listed(self) -> None:
        """No argument stands in neither table, in both, or in one of them twice."""
        from sglang.srt.server_args import ServerArgs

        self.assertGreater(len(ARGUMENTS), 500)
        self.assertEqual(set(ARGUMENTS), set(ServerArgs.__struct_fields__))
        tables = Counter([*excluded(), *NEUTRAL])
        self.assertEqual([], [name for name in ARGUMENTS if tables[name] != 1])
        self.assertEqual(set(), set(tables) - set(ARGUMENTS))

    def test_every_variable_is_listed(self) -> None:
        """Those of no family count or are known as harmless; no other is in a table."""
        excluded = [*chain(*EXCLUDED_VARIABLES.values())]
        self.assertGreater(len(VARIABLES), 900)
        self.assertEqual(len(excluded), len({*excluded} & {*VARIABLES}))
        self.assertEqual([], [name for name in excluded if not name.startswith(FAMILIES)])
        plain = {name for name in VARIABLES if not name.startswith(FAMILIES)}
        self.assertEqual(plain, COUNTED_VARIABLES - {*BEYOND} | HARMLESS)
        self.assertEqual(set(), COUNTED_VARIABLES & HARMLESS)

    def test_a_server_without_arguments(self) -> None:
        """A plain server counts for nothing; so it shares with the other engines."""
        from sglang.srt.server_args import ServerArgs

        self.assertEqual({}, settings_that_count(ServerArgs(model_path="model")))


class ArgumentsTest(DirectoryTest):
    def test_neutral(self) -> None:
        """Each neutral value of each argument adds nothing."""
        self.assertEqual({}, counted())
        for name, values in NEUTRAL.items():
            for value in values:
                with self.subTest(name, value=value):
                    self.assertEqual({}, counted(**{name: value}))

    def test_excluded(self) -> None:
        """No value of an excluded argument matters, not even one that cannot be told."""
        for name in excluded():
            with self.subTest(name):
                self.assertEqual({}, counted(**{name: object()}))

    def test_counted(self) -> None:
        """Every other argument counts with any other value, and no two are taken for one."""
        seen: list[dict[str, Any]] = []
        for name in NEUTRAL:
            with self.subTest(name):
                found = counted(**{name: "a value of next year"})
                self.assertEqual([name], list(found))
        for name, value in COUNTED:
            with self.subTest(name, value=value):
                found = counted(**{name: value})
                self.assertEqual([name], list(found))
                self.assertNotIn(found, seen)
                seen.append(found)

    def test_no_lasting_form(self) -> None:
        """What cannot be told apart is refused, with the argument's name."""
        with self.assertRaisesRegex(UncachedError, "quantization"):
            counted(quantization=object())

    def test_files(self) -> None:
        """An argument that names a file or a folder is refused: nobody knows its content."""
        file = self.root / "scales.json"
        file.write_text('{"k": 1}')
        for name, value in (
            ("decrypted_config_file", file.name),  # SGLang looks in the model's folder
            ("quantization_param_path", str(file)),
            ("model_loader_extra_config", json.dumps({"path": [str(file)]})),
            ("kt_weight_path", str(self.root)),
        ):
            with self.subTest(name), self.assertRaisesRegex(UncachedError, name):
                settings_that_count(server(**{name: value}), self.root)
        with self.assertRaisesRegex(UncachedError, "SGLANG_SCALES"):
            variables_that_count({"SGLANG_SCALES": str(file)})


class VariablesTest(DirectoryTest):
    def counted(self, **environment: str) -> dict[str, Any]:
        return variables_that_count({"HOME": "/root", "PATH": "/bin", **environment})

    def test_variables(self) -> None:
        """Excluded ones never matter, all others do where they are set, unknown ones too."""
        self.assertEqual({}, self.counted(SGLANG_USE_AITER=""))
        for name in chain(*EXCLUDED_VARIABLES.values()):
            with self.subTest(name):
                self.assertEqual({}, self.counted(**{name: "1"}))
        for name in [*COUNTED_VARIABLES, "SGLANG_OF_NEXT_YEAR", "SGL_OLD"]:
            with self.subTest(name):
                one, other = self.counted(**{name: "1"}), self.counted(**{name: "2"})
                self.assertEqual([name], list(one))
                self.assertNotEqual(one, other)


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


class Scaled(torch.nn.Linear):
    """A class of somebody's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


def hook(module: Any, inputs: Any, output: Any) -> Any:
    return output * 2


class SetupTest(DirectoryTest):
    def assert_unusual(self, of: Any, text: str) -> None:
        found = setup_of(of)
        self.assertRegex("; ".join(found.unusual), text)
        self.assertNotEqual("", found.epoch)

    def test_same(self) -> None:
        """Two engines alike have one setup, wherever they are, with nothing unusual."""
        found = setup_of(runner())
        self.assertEqual(([], "", 64), (found.unusual, found.epoch, len(found.digest)))
        with mock.patch.dict("os.environ", {"SGLANG_RUN_ID": "another at each start"}):
            same = setup_of(runner(port=31000, log_level="warning", random_seed=5))
        self.assertEqual(found, same)
        storage = {"hicache_storage_backend_extra_config": '{"shared_storage_path": "/kv"}'}
        self.assertEqual(found, setup_of(runner(**storage)))  # a path computes nothing

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
        seen = {setup_of(runner()).digest, setup_of(runner(chunked_prefill_size=128)).digest}
        self.assertEqual(2, len(seen))
        for number, case in enumerate(cases):
            with self.subTest(number), case:
                found = setup_of(runner())
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
                self.assertEqual([], setup_of(runner()).unusual)
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
                self.assertEqual([], setup_of(served).unusual)
