"""VUA for vLLM: the KV connector, and the hook by which vLLM finds it by name.

Light on purpose: vLLM imports this package in each of its processes, even those without a KV cache.
"""

__all__ = ["register"]

CONNECTOR = "VUAStorageConnector_V1"


def register() -> None:
    """Make ``{"kv_connector": "VUAStorageConnector_V1"}`` work without a module path.

    Called by vLLM through the ``vllm.general_plugins`` entry point, possibly several times in one
    process.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if CONNECTOR not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR, "vua.vllm.kv_connector_v1", CONNECTOR)
