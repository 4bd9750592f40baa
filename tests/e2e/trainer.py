"""A transport of weights for vLLM's weight updates: what a trainer computed comes from files.

vLLM's own transports (NCCL, CUDA IPC) need GPUs. Its sessions and calls are the same with this one.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.config.weight_transfer import WeightTransferConfig
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo

from e2e.changes import write


@dataclass
class Init(WeightTransferInitInfo):
    """Nothing is to be agreed upon."""


@dataclass
class Update(WeightTransferUpdateInfo):
    """The directory of a checkpoint."""

    source: str


class FileTransfer(WeightTransferEngine[Init, Update]):
    init_info_cls = Init
    update_info_cls = Update

    def init_transfer_engine(self, init_info: Init) -> None:
        """Do nothing: files need no connection."""

    def start_weight_update(self) -> None:
        """Do nothing: weights are written in place."""

    def finish_weight_update(self) -> None:
        """Do nothing, likewise."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load at once; the base class waits for an accelerator, and there is none."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: Update) -> None:
        write(self.model, Path(update_info.source))

    def shutdown(self) -> None:
        """Do nothing: there is nothing to close."""


def configured(backend: str) -> WeightTransferConfig:
    """Make the transport known to vLLM as ``backend``; return the setting that asks for it."""
    WeightTransferEngineFactory.register_engine(backend, FileTransfer)
    return WeightTransferConfig(backend=backend)
