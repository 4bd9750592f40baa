"""LMCache's connector for vLLM, where vLLM has no Triton and the engine no process of its own.

LMCache brings numba, and with it llvmlite's library: an object that has an attribute of every name.
vLLM looks for kernels in ``vars(object).get`` of all that is in a module, and fails on that one.
"""

from __future__ import annotations

from llvmlite.binding import ffi
from lmcache.integration.vllm.lmcache_mp_connector import LMCacheMPConnector

__all__ = ["LMCacheMPConnector"]

ffi.lib._fntab["__dict__"] = {}  # where it keeps what it has answered
