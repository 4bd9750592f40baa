"""Drives a headless Chromium over its DevTools protocol, through pipes."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from typing import Any, Final

from helpers import until

NAMES: Final = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM: Final = next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """A page in a browser of its own."""

    def __init__(self, out: int, back: int) -> None:
        self._out, self._back, self._number = os.fdopen(out, "wb"), os.fdopen(back, "rb"), 0
        self._rest = b""
        self._session = ""
        self.logged: list[str] = []
        """What the page's console was told: errors, and what its policy forbids."""
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")

    def close(self) -> None:
        self._out.close()
        self._back.close()

    def _call(self, method: str, **parameters: object) -> Any:
        self._number += 1
        said: dict[str, object] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            said["sessionId"] = self._session
        self._out.write(json.dumps(said).encode() + b"\0")
        self._out.flush()
        while True:
            heard = self._hear()
            if heard.get("id") == self._number:
                if "error" in heard:
                    raise AssertionError(heard["error"])
                return heard["result"]
            if heard.get("method") == "Log.entryAdded":
                self.logged.append(heard["params"]["entry"]["text"])
            if heard.get("method") == "Runtime.exceptionThrown":
                self.logged.append(json.dumps(heard["params"]["exceptionDetails"]))

    def _hear(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            some = os.read(self._back.fileno(), 1 << 20)
            if not some:
                raise AssertionError("the browser has ended")
            self._rest += some
        message, _, self._rest = self._rest.partition(b"\0")
        heard: dict[str, Any] = json.loads(message)
        return heard

    def size(self, width: int, height: int, *, dark: bool = False) -> None:
        """Make the window so large, in pixels, and the system's colours light or dark."""
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self._call("Emulation.setDeviceMetricsOverride", **metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, url: str) -> None:
        """Go to a page, and wait until it is loaded."""
        self._call("Page.navigate", url=url)
        self.until("document.readyState === 'complete' && location.protocol !== 'about:'")

    def run(self, script: str) -> Any:
        """Return the value of an expression in the page, a promise's when it is there."""
        said = {"expression": script, "awaitPromise": True, "returnByValue": True}
        result = self._call("Runtime.evaluate", **said)
        if "exceptionDetails" in result:
            raise AssertionError(result["exceptionDetails"])
        return result["result"].get("value")

    def until(self, script: str) -> Any:
        """Wait until an expression is true; return its value."""
        return until(lambda: self.run(script))

    def screenshot(self) -> bytes:
        return base64.b64decode(self._call("Page.captureScreenshot", format="png")["data"])


@contextlib.contextmanager
def browser() -> Iterator[Page]:
    command_in, command_out = os.pipe()
    answer_in, answer_out = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        words = [
            str(CHROMIUM), "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run",
            "--disable-dev-shm-usage", "--disable-background-networking", "--hide-scrollbars",
            f"--user-data-dir={home}", "--remote-debugging-pipe",
        ]  # fmt: skip
        moved = f'exec "$@" 3<&{command_in} 4>&{answer_out}'
        process = subprocess.Popen(
            ["bash", "-c", moved, "bash", *words],
            pass_fds=(command_in, answer_out),
            stderr=subprocess.DEVNULL,
            env={**os.environ, "HOME": home},
        )
        os.close(command_in)
        os.close(answer_out)
        page = None
        try:
            page = Page(command_out, answer_in)
            yield page
        finally:
            process.terminate()
            process.wait()
            if page is not None:
                page.close()
