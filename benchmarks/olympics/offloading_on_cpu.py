"""vLLM's OffloadingConnector on a CPU, for other tiers than VUA's: see `vua.vllm.offloading`."""

from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from vua.vllm.offloading import lend

__all__ = ["OffloadingConnector"]

lend()
