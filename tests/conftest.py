"""What holds for all tests."""

from __future__ import annotations

import signal

# A shell starts what runs in the background (`dev.py test &`) with Ctrl-C ignored, and what the
# tests start would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
