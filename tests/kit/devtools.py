"""A page in headless Chromium, driven through its debugging pipe: what it logs, asks for, shows and has focused.

Not a test. The pipe needs neither a port nor another package: Chromium reads commands from descriptor 3 and
answers on 4, JSON ended by a zero byte.
"""

import base64
import json
import os
import select
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.kit.browser import CHROMIUM

OPTIONS = (
    *("--headless", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--force-color-profile=srgb", "--hide-scrollbars"),
)
PATIENCE_S = 60.0
KEYS = {"Tab": 9, "Enter": 13, " ": 32}


class Tab:
    """One page. `logged` are its messages and exceptions, `requested` every address that it asked for."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._out, self._in, self._buffer, self._last = to_browser, from_browser, b"", 0
        self._session: str | None = None
        self.logged: list[str] = []
        self.requested: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def open(self, page: Path | str, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        """Load a page, from disk or by its address, and wait until it says that it is ready."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=page if isinstance(page, str) else page.as_uri())
        self.wait_for("document.readyState === 'complete'")

    def wait_for(self, expression: str) -> None:
        """Until a JavaScript expression is true."""
        until = time.monotonic() + PATIENCE_S
        while not self.value(expression):
            if time.monotonic() > until:
                raise TimeoutError(f"{expression}; logged: {self.logged}")
            time.sleep(0.05)

    def value(self, expression: str) -> Any:
        """What a JavaScript expression gives, awaited."""
        done = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in done:
            raise RuntimeError(f"{expression}: {done['exceptionDetails']}")
        return done["result"].get("value")

    def press(self, key: str) -> None:
        """A key, down and up."""
        code = {"key": key, "code": "Space" if key == " " else key, "windowsVirtualKeyCode": KEYS[key]}
        text = {"text": {"Enter": "\r", " ": " "}[key]} if key != "Tab" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", **code, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **code)

    def picture(self, file: Path, *, whole: bool = False) -> None:
        """A screenshot."""
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        file.write_bytes(base64.b64decode(data))

    def call(self, method: str, **parameters: Any) -> Any:
        """One command of the DevTools protocol, and its result."""
        self._last += 1
        number = self._last
        message = {"id": number, "method": method, "params": parameters}
        message |= {"sessionId": self._session} if self._session else {}
        rest = memoryview(json.dumps(message).encode() + b"\0")
        while rest:
            rest = rest[os.write(self._out, rest) :]
        until = time.monotonic() + PATIENCE_S
        while True:
            answer = self._next(until)
            if answer.get("id") == number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]
            self._note(answer)

    def _next(self, until: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            if not select.select([self._in], [], [], max(0.0, until - time.monotonic()))[0]:
                raise TimeoutError("the browser does not answer")
            chunk = os.read(self._in, 1 << 20)
            if not chunk:
                raise ConnectionError("the browser has gone")
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\0")
        content: dict[str, Any] = json.loads(line)
        return content

    def _note(self, event: dict[str, Any]) -> None:
        parameters = event.get("params", {})
        match event.get("method"):
            case "Runtime.consoleAPICalled":
                self.logged.append(str([each.get("value", each.get("description")) for each in parameters["args"]]))
            case "Runtime.exceptionThrown":
                self.logged.append(json.dumps(parameters["exceptionDetails"]))
            case "Log.entryAdded":
                self.logged.append(parameters["entry"]["text"])
            case "Network.requestWillBeSent":
                self.requested.append(parameters["request"]["url"])
            case "Page.javascriptDialogOpening":
                self.logged.append(f"dialog: {parameters['message']}")


@contextmanager
def browser() -> Iterator[Tab]:
    """A browser with one page, ended afterwards."""
    to_browser, ours = os.pipe()
    theirs, from_browser = os.pipe()
    sandbox = ("--no-sandbox",) if os.geteuid() == 0 else ()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        arguments = [CHROMIUM, *OPTIONS, *sandbox, "--remote-debugging-pipe", f"--user-data-dir={profile}"]
        script = 'exec 3<&"$0" 4>&"$1"; shift; exec "$@"'
        process = subprocess.Popen(
            ["/bin/bash", "-c", script, str(to_browser), str(from_browser), *arguments],
            pass_fds=(to_browser, from_browser),
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        try:
            yield Tab(ours, theirs)
        finally:
            process.kill()
            process.wait()
            os.close(ours)
            os.close(theirs)
