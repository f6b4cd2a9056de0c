# SPDX-License-Identifier: Apache-2.0
"""A real browser without a window: Chromium, told what to do over a pair of pipes.

DevTools' protocol is JSON with a zero byte after each message; Chromium reads it from descriptor 3
and writes to 4, so that neither a driver nor a port is needed.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import pathlib
import select
import shutil
import subprocess
import tempfile
import time
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
MISSING = (
    "the page is tested in a browser and none was found: run `scripts/setup browser`, or "
    "`apt-get install chromium`, or name one in the environment as BACKFOLD_BROWSER"
)


def find() -> str | None:
    named = os.environ.get("BACKFOLD_BROWSER")
    return next(filter(None, map(shutil.which, [named] if named else NAMES)), None)


class Browser:
    """
    >>> with Browser() as browser:
    ...     browser.open(path, width=1200, height=900)
    ...     browser.evaluate("document.title")
    """

    def __init__(self) -> None:
        program = find()
        if program is None:
            raise FileNotFoundError(MISSING)
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        ours_in, theirs_out = os.pipe()
        theirs_in, ours_out = os.pipe()

        def connect() -> None:
            # Out of the way first: either may be 3 or 4 itself.
            reads = fcntl.fcntl(theirs_in, fcntl.F_DUPFD, 10)
            writes = fcntl.fcntl(theirs_out, fcntl.F_DUPFD, 10)
            os.dup2(reads, 3)
            os.dup2(writes, 4)

        self._process = subprocess.Popen(
            [
                program,
                "--headless=new",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--hide-scrollbars",
                "--no-first-run",
                "--disable-background-networking",
                "--remote-debugging-pipe",
                f"--user-data-dir={self._profile.name}",
                "about:blank",
            ],
            close_fds=False,
            preexec_fn=connect,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._in, self._out = ours_in, ours_out
        self._read = b""
        self._last = 0
        self.complaints: list[str] = []  # errors and warnings on the console
        self.requests: list[str] = []  # of anything but the page itself
        target = self._send("Target.createTarget", url="about:blank")["targetId"]
        self._session: str | None = None
        attached = self._send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._send(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(20)
        os.close(self._in)
        os.close(self._out)
        self._profile.cleanup()

    def open(
        self,
        path: pathlib.Path,
        *,
        width: int,
        height: int,
        dark: bool = False,
        phone: bool = False,
    ) -> None:
        """Shows a file and waits until its charts are drawn."""
        self.complaints.clear()
        self.requests.clear()
        self._send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if phone else 1,
            mobile=phone,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._send("Emulation.setEmulatedMedia", features=[scheme])
        self._send("Page.navigate", url=path.resolve().as_uri())
        self.wait_for("document.documentElement?.dataset.drawn === 'true'")

    def wait_for(self, condition: str, seconds: float = 60) -> None:
        end = time.monotonic() + seconds
        while not self.evaluate(condition):
            if time.monotonic() > end:
                raise TimeoutError(f"{condition} did not come true: {self.complaints}")
            time.sleep(0.05)

    def evaluate(self, expression: str) -> Any:
        answer = self._send(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"]["exception"]["description"])
        return answer["result"].get("value")

    def press(self, key: str, code: int, text: str = "") -> None:
        for kind in ("keyDown", "keyUp"):
            self._send(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                code=key,
                windowsVirtualKeyCode=code,
                text=text if kind == "keyDown" else "",
            )

    def screenshot(self, path: pathlib.Path, *, whole: bool = False) -> None:
        shot = self._send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(shot["data"]))

    def _send(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._last += 1
        message: dict[str, Any] = {"id": self._last, "method": method, "params": parameters}
        if getattr(self, "_session", None):
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == self._last:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]
            self._note(answer)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._read:
            ready, _, _ = select.select([self._in], [], [], 60)
            part = os.read(self._in, 1 << 20) if ready else b""
            if not part:
                raise RuntimeError("the browser does not answer")
            self._read += part
        message, _, self._read = self._read.partition(b"\0")
        return json.loads(message)

    def _note(self, event: dict[str, Any]) -> None:
        method, given = event.get("method"), event.get("params", {})
        if method == "Runtime.exceptionThrown":
            details = given["exceptionDetails"]
            self.complaints.append(details.get("exception", {}).get("description", details["text"]))
        elif method == "Runtime.consoleAPICalled" and given["type"] in ("error", "warning"):
            self.complaints.append(" ".join(str(one.get("value")) for one in given["args"]))
        elif method == "Log.entryAdded" and given["entry"]["level"] in ("error", "warning"):
            self.complaints.append(given["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            url = given["request"]["url"]
            if not url.startswith(("file:", "blob:", "data:")):
                self.requests.append(url)
