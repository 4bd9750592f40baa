"""SGLang's part of a setup (`vua.connector.setup`), and what in an engine is unusual.

An engine that runs other code than SGLang's has a namespace of its own. It is named by the code, so
a server that runs the same finds it. Hooks may hold anything: such an engine's namespace ends with
its process.
"""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Iterable, Iterator
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final, NamedTuple

import torch
from sglang.srt.plugins.hook_registry import HookRegistry

from vua.connector.log import logger
from vua.connector.setup import Engine, code_of, in_text, is_installed, joined, settings_digest
from vua.format.excluded import NOT_COMPUTED, listed
from vua.sglang.identity import EXCLUDED, EXCLUDED_VARIABLES

log = logger("worker")


ENGINE: Final = Engine(
    ("sglang", "sglang-kernel", "sgl-kernel", "torch", "triton", "flashinfer-python"),
    ("sglang.srt.plugins", "sglang.srt.platforms"),
    ("SGLANG_", "SGL_", "AITER_", "FLASHINFER_"),
    (
        *("sglang.srt.arg_groups", "sglang.srt.entrypoints", "sglang.srt.environ"),
        *("sglang.srt.managers", "sglang.srt.observability", "sglang.srt.server_args"),
        "sglang.srt.utils",
    ),
    listed(EXCLUDED_VARIABLES, *NOT_COMPUTED, "where"),
)
_APART: Final = listed(EXCLUDED, *NOT_COMPUTED, "where")
_BESIDE: Final = ("attn_backend", "decode_attn_backend", "token_to_kv_pool", "req_to_token_pool")
"""What a model runner has beside its model."""
_OF_SGLANG: Final = ("smg-grpc-servicer",)
"""Packages that SGLang itself requires, whose plug-ins only receive requests."""
_KNOWN: Final = frozenset(("sglang", "sgl_kernel", "sitecustomize", "torch", "vua"))
"""Packages wherever they are installed, and what Python's own start may change in them."""


class Setup(NamedTuple):
    """Facts about an engine that other engines must know."""

    digest: str
    """Equal for two engines that compute the same, 64 hex digits; "": unknown."""
    unusual: list[str]
    """Software that runs in it beside SGLang, in words."""
    epoch: str
    """The part of an unusual engine in its namespace's name; "" if it is not."""


def setup_of(runner: Any, pools: Iterable[Any] = ()) -> Setup:
    """Return the setup of an engine with these host pools; takes about a second.

    ``runner``: SGLang's ``ModelRunner``.
    """
    try:
        plugins, hooks = {one.name: one.module for one in _plugins()}, [*_hook_names(runner)]
        package = os.environ.get("SGLANG_EXTERNAL_MODEL_PACKAGE", "")
        arguments, beside = (
            runner.server_args,
            {each: getattr(runner, each, None) for each in _BESIDE},
        )
        config = {
            name: in_text(getattr(arguments, name))
            for name in arguments.__struct_fields__
            if name not in _APART
        }
        beside = {name: each for name, each in beside.items() if hasattr(each, "__dict__")}
        beside |= {type(pool).__name__: type(pool) for pool in pools}
        _resolve(runner.model)
        own = _KNOWN | {name.partition(".")[0] for name in (package, *plugins.values())}
        code = code_of(runner.model, ENGINE.aside, {"runner": runner, **beside}, own)
    except Exception as problem:  # whatever another engine's code raises
        log.debug("its code cannot be read", exc_info=True)
        return Setup("", [f"code that cannot be read ({problem})"], secrets.token_hex(8))
    known = _KNOWN | {package.partition(".")[0]}
    local = {
        name
        for name, file in code.sources
        if name.partition(".")[0] not in known and not is_installed(name, file)
    }
    unusual = [*hooks, *(f"the plug-in {name}" for name in plugins)]
    unusual += [f"code of {name}" for name in sorted(local)]
    epoch = secrets.token_hex(8) if hooks else code.digest[:16] if unusual else ""
    return Setup(joined(settings_digest(ENGINE, config), [code.digest]), unusual, epoch)


def _resolve(model: torch.nn.Module) -> None:
    """Have SGLang choose now what it chooses at a module's first call.

    Otherwise an engine to which VUA is attached later would have another setup after its restart.
    """
    if fused := sys.modules.get("sglang.kernels.fused_op"):
        fused.get_fused_op_backend()
    modules: Iterable[Any] = model.modules()
    for module in modules:
        if getattr(module, "_forward_method", ...) is None:
            module._forward_method = module._resolve_forward_method()  # noqa: SLF001 - as it does


def _hook_names(runner: Any) -> Iterator[str]:
    everywhere = torch.nn.modules.module
    held = [everywhere._global_forward_hooks, everywhere._global_forward_pre_hooks]  # noqa: SLF001
    for module in runner.model.modules():
        held += [module._forward_hooks, module._forward_pre_hooks]  # noqa: SLF001 - no public list
    for hook in [hook for hooks in held for hook in hooks.values()]:
        name = str(getattr(hook, "__module__", None) or type(hook).__module__)
        if name.partition(".")[0] not in _KNOWN:
            yield f"a hook of {name}"
    for target, hooks in HookRegistry._hooks.items():  # noqa: SLF001 - there is no public list
        if any(source is None or source.dist_name not in _OF_SGLANG for _, _, source in hooks):
            yield f"a hook on {target}"


def _plugins() -> Iterator[EntryPoint]:
    allowed = {one.strip() for one in os.environ.get("SGLANG_PLUGINS", "").split(",")} - {""}
    for one in (one for group in ENGINE.plugins for one in entry_points(group=group)):
        owned = one.dist is not None and one.dist.name in _OF_SGLANG
        if not owned and (not allowed or one.name in allowed):
            yield one
