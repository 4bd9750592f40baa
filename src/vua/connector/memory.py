"""What one worker computes with: its weights and its adapters, as they are in memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol

from vua.connector.adapters import Adapter, AdapterNote
from vua.connector.weights_watch import WeightsWatch

__all__ = ["Memory"]


class AdapterWatch(Protocol):
    """Sees which LoRA adapters the engine holds. For the worker's thread, except :meth:`holds`."""

    def look(self) -> None:
        """See what is there now: what the step that ends has computed with."""

    def holds(self, adapter: Adapter | None) -> bool:
        """Whether an adapter was there at the latest :meth:`look`. Any thread. None: none."""

    def news(self, wanted: Iterable[Any]) -> dict[int, AdapterNote]:
        """Return what has changed since the last time, and the answer for each that is wanted."""


class Memory:
    """For the worker's thread, except :meth:`holds` and what :meth:`proof` returns."""

    def __init__(
        self,
        weights: WeightsWatch | None = None,
        adapters: AdapterWatch | None = None,
        unknown: str | None = None,
    ) -> None:
        """Look at what is given; None: weights never change, there are no adapters.

        ``unknown``: why nobody can tell what is in memory; nothing may be stored or loaded then.
        """
        self._weights, self._adapters = weights, adapters
        self.unknown = unknown
        self._told = unknown is None

    def rebase(self) -> None:
        """Take the weights for those that are expected."""
        self._told = True
        if self._weights is not None:
            self._weights.rebase()

    def weights_changed(self) -> str | None:
        """Return what shows that they are other ones; None if nothing does. For every step.

        Weights that are not known count as changed once: the engine then leaves what others stored.
        """
        if not self._told:
            return self.unknown
        return None if self._weights is None else self._weights.changed()

    def doubt(self) -> None:
        """Compare all of the weights in the background: somebody says that they may have changed.

        Then :meth:`weights_changed` tells, when :attr:`comparing` ends. Weights that are not known
        count as changed.
        """
        self._told = self.unknown is None
        if self._weights is not None:
            self._weights.doubt()

    @property
    def comparing(self) -> bool:
        """Whether :meth:`weights_changed` is to be asked again before anything is believed."""
        return self._weights is not None and self._weights.comparing

    def close(self) -> None:
        """Read no more of the model."""
        if self._weights is not None:
            self._weights.close()

    def look(self) -> None:
        """See which adapters there are."""
        if self._adapters is not None:
            self._adapters.look()

    def holds(self, adapter: Adapter | None) -> bool:
        """Whether an adapter was there at the latest :meth:`look`. None: none is needed."""
        return adapter is None or (self._adapters is not None and self._adapters.holds(adapter))

    def proof(self) -> Callable[[], bool]:
        """Return what tells, on any thread, whether the weights still are what is expected now.

        If so, they have been since this call.
        """
        if self._weights is None:
            return lambda: True
        return partial(self._weights.expected.still_at, time.monotonic())

    def adapter_news(self, wanted: Iterable[Any]) -> dict[int, AdapterNote]:
        """Return what the scheduler's half is to know; behind a step's forward pass.

        ``wanted``: the engine's requests for adapters (``lora_int_id``) that it asks about.
        """
        if self._adapters is None:
            return {request.lora_int_id: AdapterNote(None, 1) for request in wanted}
        self._adapters.look()
        return self._adapters.news(wanted)
