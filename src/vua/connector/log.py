"""The names of the connector's loggers: the one place that decides them.

All lie below ``vllm``, also those of modules that know no engine: vLLM gives its format and its
level to loggers below that name and to no others, so their lines stand among the engine's own.
Another engine's package that wants them elsewhere takes ``logging.getLogger(ROOT)``, from which all
of them inherit; until then Python itself prints warnings and errors.
"""

from __future__ import annotations

import logging
from typing import Final

__all__ = ["ROOT", "logger"]

ROOT: Final = "vllm.vua"


def logger(part: str = "") -> logging.Logger:
    """Return the logger of a part of the connector: ``scheduler``, ``worker``, ``requests``..."""
    return logging.getLogger(f"{ROOT}.{part}" if part else ROOT)
