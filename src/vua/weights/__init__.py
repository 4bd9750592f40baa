"""Which weights a model has: one digest over every byte of every tensor.

`identify_weights` digests files and remembers what they hold, `Identification` does it on a thread
of its own. docs/decisions/0015-weights-by-content.md says what is trusted and what remains.
"""

from vua.weights.background import Identification, process_began_s
from vua.weights.files import checkpoint_files
from vua.weights.fingerprint import Weights, identify_weights, weights_fingerprint

__all__ = [
    "Identification",
    "Weights",
    "checkpoint_files",
    "identify_weights",
    "process_began_s",
    "weights_fingerprint",
]
