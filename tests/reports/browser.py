"""A page in headless Chromium, through the DevTools protocol over a pipe: no driver needed.

https://chromedevtools.github.io/devtools-protocol/ describes the commands. The browser
resolves no host, so that a page which loads something shows it as an error.
"""

import base64
import fcntl
import json
import os
import select
import shlex
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)
_PATIENCE_SECONDS = 60.0


class Browser:
    """One browser with one page. Use it as a context manager.

    Args:
        profile: An empty folder for what the browser keeps.
        served: Allow connections to this machine's own servers, and to nothing else.
        options: Further options of the command line.
    """

    def __init__(self, profile: Path, *, served: bool = False, options: Sequence[str] = ()) -> None:
        assert CHROMIUM is not None
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()
        # Above 10, because the browser's own ends must become 3 and 4.
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 20) for fd in (theirs_in, theirs_out)]
        os.close(theirs_in)
        os.close(theirs_out)
        command = shlex.join([
            CHROMIUM,
            *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
            *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
            "--host-resolver-rules=MAP * ~NOTFOUND" + (", EXCLUDE 127.0.0.1" if served else ""),
            "--hide-scrollbars",
            *options,
            *("--font-render-hinting=none", "--force-color-profile=srgb"),
            f"--user-data-dir={profile}",
            *("--remote-debugging-pipe", "about:blank"),
        ])  # fmt: skip
        self._process = subprocess.Popen(
            ["bash", "-c", f"exec {command} 3<&{high[0]} 4>&{high[1]}"], pass_fds=high,
            stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True,
        )  # fmt: skip
        for fd in high:
            os.close(fd)
        self._out, self._in = ours_out, ours_in
        self._buffer = b""
        self._count = 0
        self.console: list[str] = []
        """What the page wrote to the console, and what the browser logged about it."""
        try:
            target = self._send("Target.createTarget", {"url": "about:blank"})["targetId"]
            attached = self._send("Target.attachToTarget", {"targetId": target, "flatten": True})
            self._session = attached["sessionId"]
            for domain in ("Page", "Runtime", "Log"):
                self.send(f"{domain}.enable")
        except BaseException:
            self._close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:  # fmt: skip
        self._close()

    def _close(self) -> None:
        os.close(self._out)
        os.close(self._in)
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def open(
        self, page: Path | str, *, width: int = 1280, height: int = 900, scale: float = 1.0,
        phone: bool = False, dark: bool = False, grey: bool = False,
    ) -> None:  # fmt: skip
        """Load a file or an address at a size, in a scheme of colours, and wait for it."""
        address = page if isinstance(page, str) else page.as_uri()
        metrics = {"width": width, "height": height, "deviceScaleFactor": scale, "mobile": phone}
        self.send("Emulation.setDeviceMetricsOverride", metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", {"features": [scheme]})
        self.send(
            "Emulation.setEmulatedVisionDeficiency", {"type": "achromatopsia" if grey else "none"}
        )
        self.send("Page.navigate", {"url": address})
        until = time.monotonic() + _PATIENCE_SECONDS
        ready = f"document.readyState === 'complete' && location.href === {json.dumps(address)}"
        while not self.evaluate(ready):
            assert time.monotonic() < until, "the page does not load"

    def evaluate(self, expression: str) -> Any:
        """The value of an expression of JavaScript in the page."""
        parameters = {"expression": expression, "returnByValue": True, "awaitPromise": True}
        answer = self.send("Runtime.evaluate", parameters)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def screenshot(self, *, top: int = 0, height: int | None = None) -> bytes:
        """A PNG of the page from ``top`` on, as high as it is or as asked for."""
        width, whole = self.evaluate(
            "[document.documentElement.clientWidth, document.documentElement.scrollHeight]"
        )
        high = whole - top if height is None else height
        clip = {"x": 0, "y": top, "width": width, "height": high, "scale": 1}
        parameters = {"format": "png", "clip": clip, "captureBeyondViewport": True}
        return base64.b64decode(self.send("Page.captureScreenshot", parameters)["data"])

    def send(self, method: str, parameters: dict[str, Any] | None = None) -> dict[str, Any]:
        """A command of the protocol to the page; its result."""
        return self._send(method, parameters, self._session)

    def _send(
        self, method: str, parameters: dict[str, Any] | None = None, session: str | None = None
    ) -> dict[str, Any]:
        self._count += 1
        message = {"id": self._count, "method": method, "params": parameters or {}}
        if session is not None:
            message["sessionId"] = session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._out, data) :]
        while True:
            answer = self._receive()
            if answer.get("id") == self._count:
                assert "error" not in answer, answer
                result: dict[str, Any] = answer["result"]
                return result
            self._note(answer)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], _PATIENCE_SECONDS)
            assert ready, "the browser does not answer"
            data = os.read(self._in, 1 << 20)
            assert data, "the browser has ended"
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        answer: dict[str, Any] = json.loads(message)
        return answer

    def _note(self, event: dict[str, Any]) -> None:
        parameters = event.get("params", {})
        if event.get("method") == "Log.entryAdded":
            self.console.append(str(parameters["entry"]["text"]))
        elif event.get("method") == "Runtime.consoleAPICalled":
            self.console.append(str(parameters["args"]))
        elif event.get("method") == "Runtime.exceptionThrown":
            self.console.append(str(parameters["exceptionDetails"]))
