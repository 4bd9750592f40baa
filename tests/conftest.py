"""What holds for all tests."""

from __future__ import annotations

import os
import signal

# No test asks a model hub: where a network answers with errors, transformers and huggingface_hub
# would try again for minutes. Set before they are imported.
os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", VLLM_NO_USAGE_STATS="1")

# A shell starts what runs in the background (`dev.py test &`) with Ctrl-C ignored, and what the
# tests start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
