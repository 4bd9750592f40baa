"""Which weights a model has: one digest over every byte of every tensor.

`identify_weights` digests files and remembers the results, `Identification` does it on its own
thread. docs/decisions/0015-weights-by-content.md says what is trusted and what remains.
"""

from vua.weights.fingerprint import (
    Identification,
    Weights,
    checkpoint_files,
    identify_weights,
    process_began_s,
    weights_fingerprint,
    write_note,
)
