"""The names of the connector's loggers, in one place.

All are below ``vllm``, even those of modules that know no engine: vLLM applies its format and level
only to loggers below that name. Another engine's package may configure ``logging.getLogger(ROOT)``,
from which all of them inherit; until then Python itself prints warnings and errors.
"""

from __future__ import annotations

import logging
from typing import Final

ROOT: Final = "vllm.vua"


def logger(part: str = "") -> logging.Logger:
    """Return the logger of a part of the connector: ``scheduler``, ``worker``, ``requests``..."""
    return logging.getLogger(f"{ROOT}.{part}" if part else ROOT)


class WarnOnce:
    """Logs a warning once for each cause."""

    def __init__(self, to: logging.Logger) -> None:
        self._log, self._causes = to, set[str]()

    def __call__(self, cause: str, text: str) -> None:
        if cause not in self._causes:
            self._causes.add(cause)
            self._log.warning("VUA: %s", text)
