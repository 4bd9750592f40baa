"""Which versions of vLLM this connector works with, and when an engine's KV cache is not stored.

The connector is written for the newest version; what an older one lacks is handled here.
docs/vllm.md says which versions were run and which only read. Why something is not stored, and what
to do: `vua.connector.refusals`. A cache whose form is not known is no reason: its pages are stored
as they are.
"""

from __future__ import annotations

import os
from copy import copy
from typing import Any, Final

import vllm
from packaging.version import InvalidVersion, Version
from vllm.config import KVTransferConfig
from vllm.distributed import kv_events
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.outputs import KVConnectorOutput

from vua import native
from vua.connector.config import VLLM_TRANSFER, ConnectorConfig
from vua.connector.log import WarnOnce, logger
from vua.connector.refusals import refused
from vua.errors import ConfigError, VUAError
from vua.security.keyring import check_keys
from vua.store.place import prepare
from vua.vllm import BESIDE_OFFLOADING, CONNECTOR, VUA, vua_in

log = logger()

OLDEST: Final = Version("0.28")
NEWEST: Final = Version("0.33")
"""The connector is tested with `OLDEST`, 0.32 and this one."""


def _release() -> Version | None:
    """The minor release of vLLM; None for a custom build."""
    try:
        found = Version(vllm.__version__)
    except InvalidVersion:
        return None
    return Version(f"{found.major}.{found.minor}")


def check_version(*, allow_untested: bool) -> None:
    """Refuse a vLLM whose interface was never checked.

    Args:
        allow_untested: accept a newer one anyway.

    Raises:
        ConfigError: with the version found, the range, and what to do.
    """
    release = _release()
    if release is None:
        return
    if release < OLDEST or (release > NEWEST and not allow_untested):
        text = (
            f"vLLM {vllm.__version__} is not supported: this version of VUA works with {OLDEST} "
            f"to {NEWEST}. Install one of these, or look for another version of VUA"
        )
        if release > NEWEST:
            text += '; "allow": ["untested_vllm"] in kv_connector_extra_config tries this one'
        raise ConfigError(text)


_BESIDE: Final = "beside"
"""The value of ``VUA_DOOR`` with which VUA joins a connector of the user's own."""
_warn_once: Final = WarnOnce(log)


def arrange(vllm_config: Any) -> None:
    """Give an engine VUA's connector where ``VUA_PATH`` or its ``kv_transfer_config`` asks for it.

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
    except Exception as problem:  # noqa: BLE001 - whatever breaks, the engine starts
        vllm_config.kv_transfer_config = None if alone else given
        known = isinstance(problem, VUAError | OSError | ValueError)
        text = " ".join((str(problem) if known else repr(problem)).split())
        _warn_once(text, f"this engine is served without VUA: {text}")


def _arranged(vllm_config: Any, given: Any, *, alone: bool) -> Any:
    """Return an engine's ``kv_transfer_config`` with VUA; raise what speaks against it.

    ``alone``: there is no connector beside VUA.
    """
    if not alone and os.environ.get("VUA_DOOR") != _BESIDE:
        text = "VUA_PATH is set, but --kv-transfer-config names {}: VUA_DOOR={} joins both"
        raise ConfigError(text.format(given.kv_connector, _BESIDE))
    if getattr(vllm_config.cache_config, "kv_offloading_size", None) is not None:
        raise ConfigError(BESIDE_OFFLOADING)
    ours = _transfer(given if alone else None)
    config = ConnectorConfig.from_extra_config(ours.kv_connector_extra_config)
    ours.kv_connector_extra_config["shared_storage_path"] = config.shared_storage_path
    check_version(allow_untested="untested_vllm" in config.allow)
    check_starts(vllm_config)
    check_keys(config.security)
    prepare(config.shared_storage_path, config.security, writes=ours.is_kv_producer)
    return ours if alone else _joined(given, ours)


def _transfer(given: Any) -> Any:
    """Return the ``kv_transfer_config`` of VUA's connector with a user's settings."""
    ours = KVTransferConfig(**VLLM_TRANSFER) if given is None else copy(given)
    if ours.kv_connector is None:
        ours.kv_load_failure_policy = VLLM_TRANSFER["kv_load_failure_policy"]
    ours.kv_connector, ours.kv_role = CONNECTOR, ours.kv_role or "kv_both"
    ours.kv_connector_module_path = VLLM_TRANSFER["kv_connector_module_path"]
    ours.kv_connector_extra_config = {**ours.kv_connector_extra_config}
    return ours


def _joined(given: Any, ours: Any) -> Any:
    """Return a MultiConnector of the user's connectors and, after them, VUA's."""
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
    if (release := _release()) is not None and release > NEWEST:
        log.warning("VUA: never run with vLLM %s (run: %s to %s)", vllm.__version__, OLDEST, NEWEST)
    if getattr(transfer, "kv_load_failure_policy", "recompute") != "recompute":
        log.warning(
            'VUA: kv_load_failure_policy is "%s": a damaged or vanished file will FAIL its '
            'request. Set kv_load_failure_policy="recompute" in --kv-transfer-config; below a '
            "MultiConnector, whose settings VUA does not see, set it in both",
            transfer.kv_load_failure_policy,
        )


def can_fail_requests() -> bool:
    """Whether a failed load can be reported for a request as a whole (vLLM 0.30)."""
    return hasattr(KVConnectorOutput(), "failed_recving")


def knows_current_blocks() -> bool:
    """Whether a step says which blocks a request has now, freed ones left out (vLLM 0.32)."""
    return "kv_connector_block_state" in SchedulerOutput.__dataclass_fields__


def event_extra_keys(request: Any, blocks: range, block_size: int) -> list[Any] | None:
    """Return what identifies a request's blocks besides tokens, in the form of vLLM's events.

    None if there is nothing. vLLM 0.32 tags these keys and publishes them without the tags.
    """
    if not (request.lora_request or request.cache_salt or request.mm_features):
        return None
    keys, feature = [], 0
    for block in blocks:
        start = block * block_size
        found, feature = kv_cache_utils.generate_block_hash_extra_keys(
            request, start, start + block_size, feature
        )
        keys.append(found)
    untagged = getattr(kv_cache_utils, "to_event_extra_keys", None)
    return keys if untagged is None else list(untagged(keys))


def session_of(request: Any) -> dict[str, Any]:
    """Return the field of an event that names the request's session, if vLLM (0.32) has it."""
    if "session_id" not in kv_events.BlockStored.__struct_fields__:
        return {}
    return {"session_id": request.session_id}


DRAFTS: Final = ("eagle", "eagle3", "mtp")
"""Methods of speculative decoding whose layers continue from the model's own hidden states."""
WITHOUT_LAYERS: Final = ("medusa", "mlp_speculator", "ngram", "ngram_gpu", "suffix")
"""Those that keep no K and V."""


def check_engine(vllm_config: Any, config: ConnectorConfig) -> None:
    """Refuse engines whose K and V depend on more than the identity covers."""
    from vllm.platforms import current_platform

    model, parallel = vllm_config.model_config, vllm_config.parallel_config
    rocm, runner = current_platform.is_rocm(), getattr(model, "runner_type", "generate")
    if rocm and "untested_rocm" not in config.allow:
        raise refused("rocm")
    if not (rocm or current_platform.is_cpu() or current_platform.is_cuda()):
        raise refused("device", current_platform.device_type)
    computed = str(getattr(model, "dtype", "")).removeprefix("torch.")
    kept = getattr(vllm_config.cache_config, "cache_dtype", "auto")
    aside = current_platform.is_cpu() and kept in ("bfloat16", "float16") and kept != computed
    sizes = (getattr(parallel, f"{one}_context_parallel_size", 1) for one in ("decode", "prefill"))
    continues = runner == "generate" or getattr(model, "is_prefix_caching_supported", False)
    for holds, name, *found in (
        (max(sizes) > 1, "context_parallel"),
        (getattr(model, "enable_sleep_mode", False), "sleep"),
        (aside, "mixed_blocks", kept),
        (not continues, "pooling", runner),
    ):
        if holds:
            raise refused(str(name), *found)
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
    if speculative is None or speculative.method in WITHOUT_LAYERS:
        return
    named, parallel = f"speculative decoding by {speculative.method!r}", vllm_config.parallel_config
    if speculative.method not in DRAFTS:
        raise refused("draft_method", named)
    check_groups(named)
    own = speculative.draft_parallel_config.tensor_parallel_size
    steps = getattr(speculative, "num_speculative_tokens_per_batch_size", None)
    for holds, name in (
        (parallel.pipeline_parallel_size > 1, "draft_pipeline"),
        (own != parallel.tensor_parallel_size, "draft_ranks"),
        (steps, "draft_some_steps"),
    ):
        if holds:
            raise refused(name, named)


def check_latent(vllm_config: Any, config: ConnectorConfig) -> None:
    """Refuse MLA whose decode and prefill disagree: a cached prefix would change the output.

    vLLM's reference backend on CPUs has that bug with or without a connector.
    """
    chunked = vllm_config.scheduler_config.enable_chunked_prefill
    if not ("inexact_continuation" in config.allow or chunked):
        raise refused("latent")


def check_groups(kind: str) -> None:
    """Refuse layers that need more of the load interface than this vLLM has."""
    if not (can_fail_requests() and knows_current_blocks()):
        raise refused("old_vllm", kind)
