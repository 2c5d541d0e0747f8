"""A headless Chromium, driven over two pipes by the Chrome DevTools Protocol, without any package for it.

Messages are JSON objects that end in a zero byte; Chromium reads them from its descriptor 3 and writes to its 4.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SECONDS = 60.0  # for one answer, or for what a page is waited for
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update", "--disable-extensions", "--hide-scrollbars",
    "--disable-dev-shm-usage", "--remote-debugging-pipe", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)  # fmt: skip
DESKTOP = (1280, 800)
PHONE = (390, 844)


class Page:
    """One tab.

    Attributes:
        errors: What the page's scripts reported as an error, and uncaught exceptions.
        requests: The URLs that the page has requested.
    """

    def __init__(self, browser: Chromium, session: str) -> None:
        self._browser = browser
        self._session = session
        self.errors: list[str] = []
        self.requests: list[str] = []

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol for this tab and return its result."""
        return self._browser.call(method, self._session, **parameters)

    def show_as(self, size: tuple[int, int], dark: bool = False) -> None:
        """Give the page a size in CSS pixels and the color scheme that its reader prefers."""
        width, height = size
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1,
                  mobile=width < 600)  # fmt: skip
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def open(self, url: str) -> None:
        """Load a page and wait until it is complete."""
        self.call("Page.navigate", url=url)
        self.wait_for(f"document.readyState == 'complete' && location.href.startsWith({json.dumps(url)})")

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression.

        Raises:
            RuntimeError: The expression raised.
        """
        result = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in result:
            raise RuntimeError(result["exceptionDetails"]["exception"].get("description", expression))
        return result["result"].get("value")

    def type(self, text: str) -> None:
        """Press the keys of a text, in the element that has the focus."""
        for character in text:
            self.call("Input.dispatchKeyEvent", type="keyDown", key=character, text=character)
            self.call("Input.dispatchKeyEvent", type="keyUp", key=character)

    def wait_for(self, condition: str) -> None:
        """Wait until a JavaScript expression is true, in this page or the one that it goes to.

        Raises:
            TimeoutError: It was false for 60 seconds.
        """
        end = time.monotonic() + SECONDS
        while not self._is_true(condition):
            if time.monotonic() > end:
                raise TimeoutError(f"not true within {SECONDS:.0f} s: {condition}")
            self._browser.read(0.05)

    def _is_true(self, condition: str) -> bool:
        try:
            return bool(self.evaluate(condition))
        except RuntimeError as error:
            if "navigated" in str(error) or "context" in str(error):
                return False  # the page is being replaced by another one
            raise

    def screenshot(self, path: Path, whole: bool = False, quality: int = 78) -> None:
        """Write what the page shows, or all of it, as a PNG file, or as a WebP file of a quality up to 100."""
        kind = {"format": "webp", "quality": quality} if path.suffix == ".webp" else {"format": "png"}
        result = self.call("Page.captureScreenshot", captureBeyondViewport=whole, **kind)
        path.write_bytes(base64.b64decode(result["data"]))

    def received(self, event: str, parameters: dict[str, Any]) -> None:
        """Note an event of this tab."""
        if event == "Network.requestWillBeSent":
            self.requests.append(parameters["request"]["url"])
        elif event == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(parameters["exceptionDetails"]))
        elif event == "Runtime.consoleAPICalled" and parameters["type"] in ("error", "assert"):
            self.errors.append(json.dumps(parameters["args"]))
        elif event == "Log.entryAdded" and parameters["entry"]["level"] == "error":
            self.errors.append(parameters["entry"]["text"])


class Chromium:
    """The browser, without any network: no host name resolves, and only 127.0.0.1 answers."""

    def __init__(self, folder: Path) -> None:
        program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
        if program is None:
            raise FileNotFoundError("these tests need Chromium; install it, for example: apt-get install chromium")
        to_browser, self._write = os.pipe()
        self._read, from_browser = os.pipe()

        def descriptors() -> None:
            # above 4 first, so that neither overwrites the other
            high = os.dup(to_browser), os.dup(from_browser)
            first, second = (os.dup(number) if number < 5 else number for number in high)
            os.dup2(first, 3)
            os.dup2(second, 4)

        self._process = subprocess.Popen(
            [program, *FLAGS, f"--user-data-dir={folder}", "about:blank"],
            preexec_fn=descriptors,
            close_fds=False,
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "HOME": str(folder), "XDG_RUNTIME_DIR": str(folder)},
        )
        os.close(to_browser)
        os.close(from_browser)
        self._buffer = b""
        self._number = 0
        self._replies: dict[int, dict[str, Any]] = {}
        self._pages: dict[str, Page] = {}

    def page(self) -> Page:
        """Open a tab."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = self._pages[session] = Page(self, session)
        for domain in ("Page", "Runtime", "Network", "Log"):
            page.call(f"{domain}.enable")
        return page

    def call(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol.

        Raises:
            RuntimeError: The browser answered with an error.
            TimeoutError: It did not answer within 60 seconds.
        """
        self._number += 1
        number = self._number
        message = {"id": number, "method": method, "params": parameters, **({"sessionId": session} if session else {})}
        os.write(self._write, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + SECONDS
        while number not in self._replies:
            if time.monotonic() > end:
                raise TimeoutError(f"Chromium did not answer {method} within {SECONDS:.0f} s")
            self.read(1.0)
        reply = self._replies.pop(number)
        if "error" in reply:
            raise RuntimeError(f"{method}: {reply['error']}")
        result: dict[str, Any] = reply["result"]
        return result

    def read(self, seconds: float) -> None:
        """Receive what the browser sends within some seconds."""
        if not select.select([self._read], [], [], seconds)[0]:
            return
        received = os.read(self._read, 1 << 20)
        if not received:
            raise RuntimeError(f"Chromium has ended with {self._process.wait(SECONDS)}")
        *messages, self._buffer = (self._buffer + received).split(b"\0")
        for message in map(json.loads, messages):
            if "id" in message:
                self._replies[message["id"]] = message
            elif message.get("sessionId") in self._pages:
                self._pages[message["sessionId"]].received(message["method"], message["params"])

    def close(self) -> None:
        """End the browser and every process of it."""
        with contextlib.suppress(RuntimeError, TimeoutError, OSError):
            self.call("Browser.close")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._read)
        os.close(self._write)


@contextlib.contextmanager
def chromium() -> Iterator[Chromium]:
    """A browser with a profile of its own, which ends with the block."""
    with tempfile.TemporaryDirectory(prefix="tq-chromium-", ignore_cleanup_errors=True) as folder:
        browser = Chromium(Path(folder))
        try:
            yield browser
        finally:
            browser.close()
