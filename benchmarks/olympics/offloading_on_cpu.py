"""vLLM's OffloadingConnector on a CPU, for other tiers than VUA's: see `vua.vllm.cpu_copies`."""

from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from vua.vllm.cpu_copies import lend

__all__ = ["OffloadingConnector"]

lend()
