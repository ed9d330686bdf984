"""A real Chromium, through its driver's own protocol (W3C WebDriver): what the tests of pages need of it."""

from __future__ import annotations

import base64
import contextlib
import json
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["Browser", "browser", "is_there"]


def is_there() -> bool:
    """Whether there is a Chromium and its driver."""
    return shutil.which("chromedriver") is not None and shutil.which("chromium") is not None


class Browser:
    """One window."""

    def __init__(self, address: str, session: str) -> None:
        self._session = f"{address}/session/{session}"

    def open(self, path: Path) -> None:
        """Show a file, when it has been loaded."""
        self.go(path.resolve().as_uri())

    def go(self, address: str) -> None:
        """Show a page, when it has been loaded."""
        _ask("POST", f"{self._session}/url", {"url": address})

    def run(self, script: str, *arguments: Any) -> Any:
        """What the body of a JavaScript function returns."""
        return _ask("POST", f"{self._session}/execute/sync", {"script": script, "args": list(arguments)})

    def run_until_done(self, script: str, *arguments: Any) -> Any:
        """What the body of a JavaScript function gives to the function that is its last argument."""
        return _ask("POST", f"{self._session}/execute/async", {"script": script, "args": list(arguments)})

    def complaints(self) -> list[str]:
        """What the page has written to its console since the last time, warnings and worse, and failed loads."""
        return [entry["message"] for entry in _ask("POST", f"{self._session}/se/log", {"type": "browser"})]

    def tell(self, command: str, **parameters: Any) -> Any:
        """A command of the protocol of Chromium's developer tools."""
        return _ask("POST", f"{self._session}/goog/cdp/execute", {"cmd": command, "params": parameters})

    def look(self, width: int, height: int, dark: bool) -> None:
        """Show the page in a window of so many CSS pixels, to a person who likes it dark or light."""
        self.tell(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.tell("Emulation.setEmulatedMedia", features=[feature])

    def picture(self, path: Path, whole: bool = False) -> None:
        """Write what is seen, or the whole page, as PNG."""
        taken = self.tell("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        path.write_bytes(base64.b64decode(taken["data"]))


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    """A Chromium without a display, ended afterwards."""
    driver = subprocess.Popen(
        ["chromedriver", "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert driver.stdout is not None
        port = next(
            int(line.split("on port ")[1].rstrip(".\n")) for line in driver.stdout if "successfully on port " in line
        )
        address = f"http://127.0.0.1:{port}"
        # As root, Chromium has no sandbox; the page is one of ours.
        options = {"args": ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]}
        wanted = {"browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}
        made = _ask("POST", f"{address}/session", {"capabilities": {"alwaysMatch": wanted}})
        try:
            yield Browser(address, made["sessionId"])
        finally:
            _ask("DELETE", f"{address}/session/{made['sessionId']}")
    finally:
        driver.terminate()
        driver.wait()


def _ask(method: str, address: str, body: Any = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(address, data, {"Content-Type": "application/json"}, method=method)
    # No proxy: it is this machine.
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=120) as answer:
        return json.loads(answer.read())["value"]
