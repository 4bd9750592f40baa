"""VUA for vLLM: the KV connector, and the hook by which vLLM finds it by name.

Light on purpose: vLLM imports this package in each of its processes, even those without a KV cache.
"""

import os
from collections.abc import Mapping
from functools import cache
from typing import Any

__all__ = ["register"]

CONNECTOR = "VUAStorageConnector_V1"
BESIDE_OFFLOADING = (
    "--kv-offloading-size puts vLLM's own connector in the place of VUA's, so nothing would be "
    "stored: leave out --kv-offloading-size, or VUA"
)


def register() -> None:
    """Make ``{"kv_connector": "VUAStorageConnector_V1"}`` work without a module path.

    Called by vLLM through the ``vllm.general_plugins`` entry point, possibly several times in one
    process. From then on vLLM's configurations are checked before an engine is made of them.
    """
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if CONNECTOR in KVConnectorFactory._registry:
        return
    KVConnectorFactory.register_connector(CONNECTOR, "vua.vllm.kv_connector_v1", CONNECTOR)
    name = "_post_init_kv_transfer_config"  # it exchanges connectors; there is no public way
    resolve = getattr(VllmConfig, name, None)
    if resolve is not None:

        def checked(config: Any) -> None:
            _check(config)
            resolve(config)

        setattr(VllmConfig, name, checked)


def vua_in(transfer: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return what concerns VUA in a ``--kv-transfer-config``: all of it, or a MultiConnector's."""
    extra = transfer.get("kv_connector_extra_config") or {}
    below = extra.get("connectors", ()) if transfer["kv_connector"] == "MultiConnector" else ()
    return [one for one in (transfer, *below) if one.get("kv_connector") == CONNECTOR]


def _check(config: Any) -> None:
    """Refuse an engine that would replace VUA; warn of a ``VUA_PATH`` that no connector uses."""
    transfer, path = config.kv_transfer_config, os.environ.get("VUA_PATH")
    named = transfer and vua_in(vars(transfer))
    if named and getattr(config.cache_config, "kv_offloading_size", None) is not None:
        from vua.errors import ConfigError

        raise ConfigError(BESIDE_OFFLOADING)
    if path and not named and config.model_config is not None:
        _warn_of(path)


@cache
def _warn_of(path: str) -> None:
    from vua.connector.log import logger

    logger().warning(
        "VUA: VUA_PATH is %s, but this engine's --kv-transfer-config does not name VUA: nothing is "
        "stored. Start it with `vua-vllm serve`, or give it what `vua args vllm %s` prints",
        *(path, path),
    )
