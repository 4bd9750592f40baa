"""Forms of pages that an engine on a CPU may have; and GPU kernels without a GPU."""

from __future__ import annotations

import importlib.util
import os
import sys
import unittest
import warnings
from collections.abc import Mapping
from types import ModuleType
from typing import Any
from unittest import mock

import torch

from vua.device.paged import PageForm

HAS_TRITON = importlib.util.find_spec("triton") is not None
NEEDS_TRITON = unittest.skipUnless(
    HAS_TRITON, "needs Triton (pip install triton), x86-64 or Arm Linux alone"
)


def triton_kernels(*, interpreted: bool) -> ModuleType:
    """A fresh `vua.device.kernels`: what Triton makes of it is decided when it is imported."""
    name = f"kernels_{'interpreted' if interpreted else 'compiled'}"
    if name not in sys.modules:
        importlib.import_module("triton")  # with the settings of this process, unlike our kernels
        found = importlib.util.find_spec("vua.device.kernels")
        spec = importlib.util.spec_from_file_location(name, found.origin)
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        with mock.patch.dict(os.environ, TRITON_INTERPRET=str(int(interpreted))):
            spec.loader.exec_module(module)
    return sys.modules[name]


def compiled(kernel: Any, sizes: Mapping[str, object], pointers: tuple[str, ...]) -> str:
    """A kernel's PTX as Triton makes it for a Hopper, for a launch with well aligned rows."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    signature, hints = {}, {}
    for number, name in enumerate(names):
        kind = "*u8" if name == "data" else "*i64" if name in pointers else "i32"
        signature[name] = "constexpr" if name in sizes else kind
        if name not in sizes and name not in ("tokens", "tiles", "data"):
            hints[number,] = [["tt.divisibility", 16]]
    values = {(names.index(name),): value for name, value in sizes.items()}
    source = ASTSource(kernel, signature, values, hints)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # about Triton's own defaults
        return str(triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"])


def column_form(block_size: int, dim: int) -> PageForm:
    """The form vLLM calls `vec`: K transposed as one block, then V by rows."""
    k = torch.arange(dim) * block_size + torch.arange(block_size)[:, None]
    v = torch.arange(block_size * dim).view(block_size, dim) + block_size * dim
    return PageForm(k, v, 2 * dim)


def shuffled_form(block_size: int, dim: int) -> PageForm:
    generator = torch.Generator().manual_seed(block_size * dim)
    places = torch.randperm(2 * block_size * dim, generator=generator)
    k, v = places.view(2, block_size, dim)
    return PageForm(k, v, 2 * dim)
