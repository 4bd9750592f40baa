"""What one engine stored no other one loads that would have computed other K and V."""

from __future__ import annotations

import pytest

from e2e.harness import (
    PROMPT,
    Batch,
)

pytestmark = [pytest.mark.vllm, pytest.mark.thorough]


ASK = Batch([PROMPT])
SEEING = {"skip_tokenizer_init": False}
