"""When an engine's namespace is opened: as soon as its weights are known, and not before.

Until then nothing is loaded or stored. Digesting weights and opening directories is the work of a
thread beside the engine's; a namespace that cannot be told is never opened.
"""

from __future__ import annotations

from concurrent.futures import CancelledError, Future, wait
from typing import Final, NamedTuple

from vua.connector.cache_spec import Model
from vua.connector.config import ConnectorConfig
from vua.connector.log import logger
from vua.errors import VUAError
from vua.format.identity import Identity
from vua.store.namespace import Namespace
from vua.store.opening import create_namespace, locate
from vua.store.place import look_at
from vua.weights import Identification, Weights

__all__ = ["Opened", "Opening", "open_namespace"]

log = logger("scheduler")

_START_WAIT_S: Final = 1.0
"""How long the engine's start waits: for small models, and weights whose digest is remembered."""


class Opened(NamedTuple):
    """What a model's identity leads to."""

    model: Model
    namespace: Namespace
    """With one store per group of the model."""


def open_namespace(config: ConnectorConfig, model: Model, identity: Identity) -> Namespace:
    """Open an identity's namespace, one store per group. Raises StorageError, LayoutError."""
    return create_namespace(
        locate(config.shared_storage_path, security=config.security),
        identity,
        [group.layout for group in model.groups],
        durable=config.durable,
        bounds=config.limits,
        security=config.security,
        rules=config.worker,
    )


class Opening:
    """Opens the namespace of one engine; for the scheduler's half, which asks :meth:`take`."""

    def __init__(
        self, model: Model, config: ConnectorConfig, identification: Identification | None
    ) -> None:
        """Open now what is identified, else when ``identification`` has its answer.

        Waits up to a second for that. Raises StorageError, LayoutError only for what is identified.
        """
        self._model, self._config, self._identification = model, config, identification
        self._opened: Future[Opened | None] = Future()
        self._closed = False
        if identification is None:
            self._opened.set_result(Opened(model, open_namespace(config, model, model.identity)))
            return
        identification.answer.add_done_callback(self._identified)
        if not wait([self._opened], timeout=_START_WAIT_S).done:
            log.info(
                "VUA: the weights are being identified (read once, then remembered); until that is "
                "done nothing is loaded or stored"
            )

    def take(self) -> Opened | None:
        """Return the open namespace; None before it is known, and where it never will be."""
        return self._opened.result() if self._opened.done() else None

    def close(self) -> None:
        """Let the search for the weights stop; what it finds is not opened any more."""
        self._closed = True
        if self._identification is not None:
            self._identification.close()

    def _identified(self, answer: Future[Weights]) -> None:
        opened = None
        try:
            weights = answer.result()
            if self._closed:
                raise CancelledError  # noqa: TRY301
            model = self._model.with_weights(weights.fingerprint)
            opened = Opened(model, open_namespace(self._config, model, model.identity))
            log.info(
                "VUA: KV cache in %s, namespace %s, chunks of %d tokens; weights identified in "
                "%.1f s (%.1f of %.1f MB read, the rest remembered)",
                *(look_at(self._config.shared_storage_path), model.identity.namespace[:12]),
                *(model.chunk_tokens, weights.seconds),
                *(weights.read_nbytes / 1e6, weights.nbytes / 1e6),
            )
        except CancelledError:
            pass
        except VUAError as problem:
            log.warning("VUA: this engine is served without a stored KV cache: %s", problem)
        except Exception:  # whatever breaks, requests are served
            log.exception("VUA: this engine is served without a stored KV cache")
        finally:
            self._opened.set_result(opened)
