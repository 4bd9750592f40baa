"""Which way into vLLM an engine takes, with which versions, and when its KV cache is not stored.

`arrange` completes an engine's configuration: `VUA_PATH` alone is enough. `door_of` chooses between
VUA's own connector and the tier below vLLM's offloading (`vua.vllm.tier`).
docs/vllm.md says which versions were run. Why something is not stored, and what
to do: `vua.connector.cache_spec`.
"""

from __future__ import annotations

import os
import shutil
from copy import copy
from functools import cache
from pathlib import Path
from typing import Any, Final

import vllm
from packaging.version import InvalidVersion, Version
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from vua import native
from vua.connector.cache_spec import refused
from vua.connector.config import VLLM_TRANSFER, ConnectorConfig
from vua.connector.log import WarnOnce, logger
from vua.errors import ConfigError, VUAError
from vua.io.posix import machine_memory_nbytes
from vua.security.keyring import check_keys
from vua.store.place import prepare
from vua.vllm import BESIDE_OFFLOADING, CONNECTOR, TIER, VUA, vua_in

log = logger()

OLDEST: Final = Version("0.32")
NEWEST: Final = Version("0.33")
"""VUA is tested with these two."""


def _release() -> Version | None:
    try:
        found = Version(vllm.__version__)
    except InvalidVersion:
        return None
    return Version(f"{found.major}.{found.minor}")


def check_version() -> None:
    """Refuse a vLLM that lacks what the connector needs. Raises ConfigError."""
    release = _release()
    if release is not None and release < OLDEST:
        raise ConfigError(
            f"vLLM {vllm.__version__} is not supported: this version of VUA works with {OLDEST} "
            f"to {NEWEST}. Install one of these, or look for another version of VUA"
        )


def is_tested() -> bool:
    """Whether this vLLM is none that came after those that were run."""
    release = _release()
    return release is None or release <= NEWEST


_BESIDE: Final = "beside"
"""The value of ``VUA_DOOR`` with which VUA joins a connector of the user's own."""
_DOORS: Final = ("connector", "tier", _BESIDE)
_PLAIN: Final = ("auto", "bfloat16", "float16", "float32")
"""KV caches whose elements are the model's."""
_OTHER_HEADS: Final = (
    *("attention_other_setting", "block_configs", "global_head_dim"),
    *("swa_head_dim", "swa_num_key_value_heads"),
)
"""Fields of models some of whose layers have other heads (Step 3.5, Nemotron, Gemma 4, MiMo)."""
_SHARED: Final = Path("/dev/shm")  # noqa: S108 - where vLLM maps it
_LEAST_NBYTES: Final = 1 << 30
_MOST_NBYTES: Final = 32 << 30
"""Host memory of the tier: at least, and at most for each rank. vLLM takes all at its start."""
_NEVER_RUN: Final = "never run with vLLM {} (run: {} to {})"
warn_once: Final = WarnOnce(log)


def arrange(vllm_config: Any) -> None:
    """Give an engine VUA where ``VUA_PATH`` or its ``kv_transfer_config`` asks for it.

    Called before vLLM looks at a configuration. No error ends an engine's start: one line says why
    it is served without VUA.
    """
    given, path = vllm_config.kv_transfer_config, os.environ.get("VUA_PATH")
    name = None if given is None else given.kv_connector
    alone = name in (None, VUA)
    if not (name == VUA or (path and (alone or not vua_in(vars(given))))):
        return
    try:
        vllm_config.kv_transfer_config = _arranged(vllm_config, given, alone=alone)
        KVConnectorFactory.get_connector_class(vllm_config.kv_transfer_config)
        vllm_config._verify_kv_transfer_compat()  # noqa: SLF001 - refuses all connectors
        if vllm_config.kv_transfer_config.kv_connector == TIER:
            vllm_config.cache_config.kv_offloading_size = None  # else vLLM exchanges connectors
    except Exception as problem:  # noqa: BLE001 - whatever breaks, the engine starts
        vllm_config.kv_transfer_config = None if alone else given
        known = isinstance(problem, VUAError | OSError | ValueError)
        text = " ".join((str(problem) if known else repr(problem)).split())
        warn_once(text, f"this engine is served without VUA: {text}")


def _arranged(vllm_config: Any, given: Any, *, alone: bool) -> Any:
    """Return an engine's ``kv_transfer_config`` with VUA; raise what speaks against it.

    ``alone``: no connector beside VUA.
    """
    if not alone and os.environ.get("VUA_DOOR") != _BESIDE:
        text = "VUA_PATH is set, but --kv-transfer-config names {}: VUA_DOOR={} joins both"
        raise ConfigError(text.format(given.kv_connector, _BESIDE))
    ours = _transfer(given if alone else None)
    config = ConnectorConfig.from_extra_config(ours.kv_connector_extra_config)
    ours.kv_connector_extra_config["shared_storage_path"] = config.shared_storage_path
    check_version()
    check_starts(vllm_config)
    check_keys(config.security)
    prepare(config.shared_storage_path, config.security, writes=ours.is_kv_producer)
    if not alone:
        if _offloading_size(vllm_config) is not None:
            raise ConfigError(BESIDE_OFFLOADING)
        return _joined(given, ours)
    door, why = door_of(vllm_config)
    if door == "connector":
        _say(f"through VUA's own connector: {why}")
        return ours
    if not is_tested():
        warn_once("new", _NEVER_RUN.format(vllm.__version__, OLDEST, NEWEST))
    nbytes = _host_nbytes(vllm_config)
    text = "as a tier below vLLM's offloading, which takes {:.1f} GiB of the host's memory: {}"
    _say(text.format(nbytes / 2**30, why))
    return _below_offloading(ours, nbytes)


@cache
def _say(text: str) -> None:
    log.info("VUA: %s", text)


def door_of(vllm_config: Any) -> tuple[str, str]:
    """Return an engine's door, ``"connector"`` or ``"tier"``, and why.

    The connector where K and V are canonical and were measured, the tier for all else; the user may
    name it by ``VUA_DOOR``. Raises ConfigError for one that cannot be.
    """
    named, cannot = os.environ.get("VUA_DOOR", ""), no_tier(vllm_config)
    if named not in ("", *_DOORS):
        raise ConfigError(f"VUA_DOOR must be one of {', '.join(_DOORS)}, found {named!r}")
    offloads_too = _offloading_size(vllm_config) is not None
    if offloads_too and (named == "connector" or cannot):
        raise ConfigError(f"{BESIDE_OFFLOADING} ({cannot or 'VUA_DOOR is connector'})")
    if named == "tier" and cannot:
        raise ConfigError(f"VUA_DOOR is tier, but {cannot}")
    if named in ("connector", "tier"):
        return named, "VUA_DOOR names it"
    why = "--kv-offloading-size" if offloads_too else why_tier(vllm_config)
    if why and not cannot:
        return "tier", why
    return "connector", f"{why}, but {cannot}" if why else "a layout that other engines share"


def why_tier(vllm_config: Any, *, alone: bool = False) -> str:
    """Return what the connector refuses, or was not measured with; empty if nothing.

    ``alone``: only what it refuses.
    """
    from vllm.platforms import current_platform

    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    text = getattr(model, "hf_text_config", None)
    kept = str(getattr(vllm_config.cache_config, "cache_dtype", "auto"))
    sizes = (getattr(parallel, f"{one}_context_parallel_size", 1) for one in ("decode", "prefill"))
    speculative = vllm_config.speculative_config
    kinds = {*(getattr(text, "layer_types", None) or ())}
    # transformers 5.19 has Gemma 4 so
    apart = {*(getattr(text, "per_layer_attributes", None) or ())}
    heads = any(getattr(text, name, None) for name in _OTHER_HEADS)
    pipeline = parallel.pipeline_parallel_size > 1
    refuses = (
        (not (current_platform.is_cpu() or current_platform.is_cuda()), "this device"),
        (max(sizes) > 1, "context parallelism"),
        (getattr(model, "enable_sleep_mode", False), "sleep mode"),
        (model.is_hybrid or model.has_inner_state, "layers with states"),
        (speculative is not None and speculative.method in DRAFTS, "a draft's layers"),
        (hasattr(text, "index_topk"), "an indexer"),
        (getattr(text, "compress_ratios", None), "compressed latents"),
    )
    unmeasured = (
        (not is_tested(), f"vLLM {vllm.__version__} is new"),
        (heads or apart & {"head_dim", "num_key_value_heads"}, "heads that differ"),
        (getattr(model, "attention_chunk_size", None), "attention within chunks"),
        (kept not in _PLAIN, f"a cache of {kept}"),
        (pipeline and len(kinds) > 1, "pipeline parallelism with several kinds of layers"),
    )
    every = refuses if alone else (*refuses, *unmeasured)
    return next((why for holds, why in every if holds), "")


def no_tier(vllm_config: Any) -> str:
    """Return why vLLM's offloading cannot be used; empty if it can."""
    from vllm.platforms import current_platform

    nbytes, model = _host_nbytes(vllm_config), vllm_config.model_config
    stateful = model.is_hybrid or model.has_inner_state
    kept = vllm_config.cache_config.enable_prefix_caching  # else vLLM does not start with a tier
    little = (
        f"{nbytes >> 20} MiB of /dev/shm are too little for a tier: free more (docker: --ipc=host)"
    )
    few = nbytes < _LEAST_NBYTES
    reasons = (
        (
            current_platform.is_cpu() and not is_tested(),
            f"a tier on CPUs needs vLLM {NEWEST} or older",
        ),
        (getattr(vllm_config.parallel_config, "nnodes", 1) > 1, "a tier has one node"),
        (stateful and not kept, "a tier for states needs --enable-prefix-caching"),
        (few and _offloading_size(vllm_config) is None, little),
    )
    return next((why for holds, why in reasons if holds), "")


def _offloading_size(vllm_config: Any) -> float | None:
    size: float | None = getattr(vllm_config.cache_config, "kv_offloading_size", None)
    return size


def _host_nbytes(vllm_config: Any) -> int:
    """Return the tier's memory on the host, for all of an engine's ranks.

    By default all engines on a machine take an eighth of its memory together.
    """
    parallel, size = vllm_config.parallel_config, _offloading_size(vllm_config)
    if size is not None:
        return int(size * (1 << 30))
    free = shutil.disk_usage(_SHARED).free if _SHARED.is_dir() else 0
    most = min(machine_memory_nbytes() // 8, free * 9 // 10)
    most //= max(getattr(parallel, "data_parallel_size_local", 1), 1)
    return min(most, _MOST_NBYTES * parallel.world_size)


def _below_offloading(ours: Any, nbytes: int) -> Any:
    tier: dict[str, Any] = {"type": "VUATier", "module_path": "vua.vllm.tier"}
    tier |= ours.kv_connector_extra_config
    tier["path"] = tier.pop("shared_storage_path")
    ours.kv_connector, ours.kv_connector_module_path = TIER, "vua.vllm.offloading"
    ours.kv_connector_extra_config = {
        "spec_name": "TieringOffloadingSpec",
        "cpu_bytes_to_use": nbytes,
        "secondary_tiers": [tier],
    }
    return ours


def _transfer(given: Any) -> Any:
    ours = KVTransferConfig(**VLLM_TRANSFER) if given is None else copy(given)
    if ours.kv_connector is None:
        ours.kv_load_failure_policy = VLLM_TRANSFER["kv_load_failure_policy"]
    ours.kv_connector, ours.kv_role = CONNECTOR, ours.kv_role or "kv_both"
    ours.kv_connector_module_path = VLLM_TRANSFER["kv_connector_module_path"]
    ours.kv_connector_extra_config = {**ours.kv_connector_extra_config}
    return ours


def _joined(given: Any, ours: Any) -> Any:
    names = ("kv_connector", "kv_connector_module_path", "kv_role", "kv_connector_extra_config")
    multi, own = copy(given), [{name: getattr(given, name) for name in names}]
    if given.kv_connector == "MultiConnector":
        own = given.kv_connector_extra_config.get("connectors", [])
    multi.kv_connector, multi.kv_connector_module_path = "MultiConnector", None
    multi.kv_load_failure_policy = "recompute"
    child = {name: getattr(ours, name) for name in (*names, "kv_load_failure_policy")}
    multi.kv_connector_extra_config = {"connectors": [*own, child]}
    return multi


def announce(transfer: Any) -> None:
    """Log what is in use, and what users may want to change in ``transfer``."""
    log.info("VUA: %s", native.status().text)
    if not is_tested():
        text = _NEVER_RUN.format(vllm.__version__, OLDEST, NEWEST)
        warn_once(
            "new", f"{text}: nothing is loaded until a stored prompt was computed and compared"
        )
    if getattr(transfer, "kv_load_failure_policy", "recompute") != "recompute":
        log.warning(
            'VUA: kv_load_failure_policy is "%s": a damaged or vanished file will FAIL its '
            'request. Set kv_load_failure_policy="recompute" in --kv-transfer-config; below a '
            "MultiConnector, whose settings VUA does not see, set it in both",
            transfer.kv_load_failure_policy,
        )


DRAFTS: Final = ("eagle", "eagle3", "mtp")
"""Methods of speculative decoding whose layers continue from the model's own hidden states."""
WITHOUT_LAYERS: Final = ("medusa", "mlp_speculator", "ngram", "ngram_gpu", "suffix")
"""Those that keep no K and V."""


def check_engine(vllm_config: Any) -> None:
    """Refuse engines whose K and V depend on more than the identity covers."""
    from vllm.platforms import current_platform

    model = vllm_config.model_config
    runner = getattr(model, "runner_type", "generate")
    if not (runner == "generate" or getattr(model, "is_prefix_caching_supported", False)):
        raise refused("pooling", runner)
    if why := why_tier(vllm_config, alone=True):
        raise refused("tier_alone", why)
    computed = str(getattr(model, "dtype", "")).removeprefix("torch.")
    kept = getattr(vllm_config.cache_config, "cache_dtype", "auto")
    aside = current_platform.is_cpu() and kept in ("bfloat16", "float16") and kept != computed
    if aside:
        raise refused("mixed_blocks", kept)
    check_drafts(vllm_config)


def check_starts(vllm_config: Any) -> None:
    """Raise ConfigError for what vLLM does not start with a KV connector: it says less itself."""
    if getattr(vllm_config.model_config, "is_encoder_decoder", False):
        raise ConfigError(str(refused("encoder_decoder")))


def adapters_spill(vllm_config: Any) -> bool:
    """Whether vLLM applies adapters to requests without one in the same step.

    Its CPU backend uses -1, which means no adapter, as the index of the last slot: wrong as soon as
    that holds an adapter, even one that no request of the step uses.
    """
    from vllm.platforms import current_platform

    return current_platform.is_cpu() and vllm_config.lora_config is not None


def check_drafts(vllm_config: Any) -> None:
    """Refuse speculative decoding whose own layers are not known well enough to be stored."""
    speculative = vllm_config.speculative_config
    if speculative is not None and speculative.method not in (*DRAFTS, *WITHOUT_LAYERS):
        raise refused("draft_method", f"speculative decoding by {speculative.method!r}")
