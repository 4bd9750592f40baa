"""What SGLang lacks on a machine without a GPU; Python imports this at its start.

Put this folder on PYTHONPATH. Five things: a stand-in for torchvision, which SGLang imports at its
start and uses for images only; copies between the device's KV cache and the host's, by PyTorch in
place of CUDA kernels; host memory that is neither pinned nor kept back for others; memory for
LoRA adapters that is not pinned either; and attention that reads a sliding window where it lies.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.metadata
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

TORCHVISION = "torchvision"
VERSION = "0.28.0"  # the one that belongs to torch 2.13


class StandIn(types.ModuleType):
    """A module that has every name: classes for capitals, modules and functions for the rest."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__: list[str] = []
        self.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name[:1].isupper():
            return Names(name, (), {})
        whole = f"{self.__name__}.{name}"
        return sys.modules.setdefault(whole, sys.modules.get(whole) or StandIn(whole))

    def __call__(self, *args: object, **named: object) -> None:
        """Do nothing."""


class Names(type):
    """A class whose attributes are their own names, as an enumeration of strings."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return name


class Installed(importlib.metadata.Distribution):
    """The record of an installed torchvision: transformers asks for its version."""

    def read_text(self, filename: str) -> str | None:
        texts = {
            "METADATA": f"Metadata-Version: 2.1\nName: {TORCHVISION}\nVersion: {VERSION}\n",
            "top_level.txt": f"{TORCHVISION}\n",
        }
        return texts.get(filename)

    def locate_file(self, path: Any) -> Any:
        return path


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the stand-in, and the record of its installation."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return the stand-in for torchvision and all in it."""
        if name.partition(".")[0] == TORCHVISION:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> StandIn:
        return StandIn(spec.name)

    def exec_module(self, module: Any) -> None:
        """Nothing is left to do."""

    def find_distributions(self, context: Any = None) -> Iterator[Installed]:
        if getattr(context, "name", None) in (None, TORCHVISION):
            yield Installed()


# Copies between the device's pool, one tensor [tokens, heads, dim] per layer, and the host's.


def copy_pages(
    src_layers: Any, dst_layers: Any, src_indices: Any, dst_indices: Any, page_size: int
) -> None:
    """Host and device alike: tensors of one shape each."""
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]


def load_page_first_direct(
    src_ptrs: Any, dst_ptrs: Any, src_indices: Any, dst_indices: Any, layer_id: int, page_size: int
) -> None:
    """One layer out of the host's [pages, layers, page, heads, dim]."""
    for source, target in zip(src_ptrs, dst_ptrs, strict=True):
        target[dst_indices] = source[src_indices // page_size, layer_id, src_indices % page_size]


def save_page_first_direct(
    src_ptrs: Any, dst_ptrs: Any, src_indices: Any, dst_indices: Any, page_size: int
) -> None:
    """All layers of K, then of V, into such memory."""
    layers = len(src_ptrs) // len(dst_ptrs)
    for at, target in enumerate(dst_ptrs):
        for layer, source in enumerate(src_ptrs[at * layers : (at + 1) * layers]):
            target[dst_indices // page_size, layer, dst_indices % page_size] = source[src_indices]


def in_pool(module: Any) -> None:
    """Give a module of host pools the copies that it has from CUDA elsewhere."""
    module.transfer_kv_direct = copy_pages
    module.transfer_kv_per_layer_direct_pf_lf = load_page_first_direct
    module.transfer_kv_all_layer_direct_lf_pf = save_page_first_direct


def without_reserve(module: Any) -> None:
    """Keep no 10 GiB of the host's memory back, and pin none."""
    module.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0
    module.HostKVCache.pin_memory = property(lambda _: False, lambda *_: None)


def unpinned(module: Any) -> None:
    import torch

    def allocate(dims: Sequence[int], dtype: Any, *args: object, **named: object) -> Any:
        return torch.zeros(tuple(dims), dtype=dtype)

    module.ALLOC_MEMORY_FUNCS["cpu"] = allocate


def without_pinning(_: Any) -> None:
    """LoRA adapters: take any memory where SGLang asks for pinned memory, which needs a GPU."""
    import torch

    def anywhere(make: Callable[..., Any]) -> Callable[..., Any]:
        def made(*arguments: Any, pin_memory: bool = False, **named: Any) -> Any:
            return make(*arguments, **named)

        return made

    for name in ("tensor", "empty", "zeros"):
        setattr(torch, name, anywhere(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda self, *_: self  # type: ignore[method-assign]


def in_own_slots(module: Any) -> None:
    """Read sliding windows at the slots of their own pool, in which SGLang has written them.

    SGLang's attention on a CPU reads them at the slots of the pool of all tokens. The two are the
    same until the first slots are used again.
    """
    backend = module.TorchNativeAttnBackend

    def by_own_slots(attend: Callable[..., Any]) -> Callable[..., Any]:
        def run(
            self: Any,
            query: Any,
            output: Any,
            k_cache: Any,
            v_cache: Any,
            slots: Any,
            *arguments: Any,
            sliding_window_size: int | None = None,
            **named: Any,
        ) -> Any:
            if sliding_window_size is not None and self.use_sliding_window_kv_pool:
                slots = self.token_to_kv_pool.translate_loc_from_full_to_swa(slots)
            named["sliding_window_size"] = sliding_window_size
            return attend(self, query, output, k_cache, v_cache, slots, *arguments, **named)

        return run

    for name in ("_run_sdpa_forward_extend", "_run_sdpa_forward_decode"):
        setattr(backend, name, by_own_slots(getattr(backend, name)))


PATCHES: dict[str, Callable[[Any], None]] = {
    "sglang.srt.layers.attention.torch_native_backend": in_own_slots,
    "sglang.srt.lora.lora": without_pinning,
    "sglang.srt.mem_cache.pool_host.mha": in_pool,
    "sglang.srt.mem_cache.pool_host.mla": in_pool,
    "sglang.srt.mem_cache.pool_host.base": without_reserve,
    "sglang.srt.mem_cache.pool_host.common": unpinned,
}


class Patches(importlib.abc.MetaPathFinder):
    """Changes some modules of SGLang right after they are imported."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return the module's own specification, with the change behind its execution."""
        if name not in PATCHES:
            return None
        for finder in sys.meta_path:
            if finder is self or (spec := finder.find_spec(name, path, target)) is None:
                continue
            run: Any = spec.loader.exec_module  # type: ignore[union-attr]

            def execute(module: Any, run: Any = run) -> None:
                run(module)
                PATCHES[name](module)

            spec.loader.exec_module = execute  # type: ignore[union-attr,method-assign]
            return spec
        return None


sys.meta_path.append(Finder())
sys.meta_path.insert(0, Patches())
