"""VUA for vLLM: the KV connector, and the hook by which vLLM finds it by name.

Light on purpose: vLLM imports this package in each of its processes, even those without a KV cache.
"""

from collections.abc import Mapping
from functools import wraps
from importlib import import_module
from typing import Any

__all__ = ["register"]

VUA = "VUA"
"""What a `--kv-transfer-config` names where VUA chooses by itself, see `vua.vllm.support`."""
CONNECTOR = "VUAStorageConnector_V1"
TIER = "VUAOffloadingConnector"
BESIDE_OFFLOADING = (
    "--kv-offloading-size puts vLLM's own connector in the place of VUA's, so nothing would be "
    "stored: leave out --kv-offloading-size, or VUA"
)


def register() -> None:
    """Make `VUA_PATH` alone, and ``{"kv_connector": "VUA"}``, start an engine with VUA.

    Called by vLLM through the ``vllm.general_plugins`` entry point, possibly several times in one
    process. From then on vLLM's configurations are completed and checked before an engine is made
    of them.
    """
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if CONNECTOR in KVConnectorFactory._registry:
        return
    KVConnectorFactory.register_connector(CONNECTOR, "vua.vllm.kv_connector_v1", CONNECTOR)
    KVConnectorFactory.register_connector(VUA, "vua.vllm.kv_connector_v1", CONNECTOR)
    KVConnectorFactory.register_connector(TIER, "vua.vllm.offloading", TIER)
    complete = VllmConfig.__post_init__  # there is no public way

    @wraps(complete)
    def with_vua(config: Any, *given: Any) -> None:
        _arrange(config)
        complete(config, *given)

    VllmConfig.__post_init__ = with_vua


def _arrange(config: Any) -> None:
    """Refuse an engine that would replace a VUA that it names; complete the rest."""
    transfer = config.kv_transfer_config
    offloads = getattr(config.cache_config, "kv_offloading_size", None) is not None
    named = [] if transfer is None else vua_in(vars(transfer))
    if offloads and named and transfer.kv_connector != VUA:  # vLLM's own would take its place
        from vua.errors import ConfigError

        raise ConfigError(BESIDE_OFFLOADING)
    if config.model_config is None:
        return
    try:
        import_module("vua.vllm.support").arrange(config)
    except Exception as problem:  # noqa: BLE001 - whatever breaks, the engine starts
        from vua.connector.log import logger

        logger().warning("VUA: this engine is served without VUA: %r", problem)
        if transfer is not None and transfer.kv_connector == VUA:
            config.kv_transfer_config = None


def vua_in(transfer: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return what concerns VUA in a ``--kv-transfer-config``: all of it, or a MultiConnector's."""
    extra = transfer.get("kv_connector_extra_config") or {}
    below = extra.get("connectors", ()) if transfer["kv_connector"] == "MultiConnector" else ()
    return [one for one in (transfer, *below) if one.get("kv_connector") in (VUA, CONNECTOR, TIER)]
