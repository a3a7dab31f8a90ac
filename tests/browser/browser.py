"""A headless Chromium, driven by the WebDriver protocol over HTTP.

Owns:  Browser.
Needs: chromium and chromedriver (Debian: chromium, chromium-driver) in PATH.

Source: the W3C's WebDriver; `goog/cdp/execute` and `se/log` are ChromeDriver's own.
"""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

PROGRAMS = ("chromium", "chromedriver")
MISSING = [name for name in PROGRAMS if shutil.which(name) is None]
FLAGS = [
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--window-size=1000,1400", "--hide-scrollbars",
]  # fmt: skip
#: As WebDriver names them.
KEYS = {
    "Tab": "\ue004", "Enter": "\ue007", "End": "\ue010", "Home": "\ue011", "ArrowLeft": "\ue012",
    "ArrowUp": "\ue013", "ArrowRight": "\ue014", "ArrowDown": "\ue015", "Control": "\ue009",
}  # fmt: skip
_PATIENCE_S = 60


class Browser:
    """One window.

    Args:
        session: the address of the WebDriver session.
    """

    def __init__(self, session: str) -> None:
        self._http = httpx.Client(base_url=session, timeout=_PATIENCE_S, trust_env=False)

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        return _value(self._http.post(path, json=body))

    def open(self, path: Path) -> None:
        """Load a file, and wait until it has run its script."""
        self.load(path.as_uri())

    def load(self, url: str) -> None:
        """As `open`, of an address."""
        self._post("/url", {"url": url})

    def run(self, script: str, *given: Any) -> Any:
        """What a function body returns; `arguments` are those given."""
        return self._post("/execute/sync", {"script": script, "args": list(given)})

    def press(self, *keys: str) -> None:
        """One key after another; "Control+End" holds the first."""
        actions = []
        for key in keys:
            held = [KEYS.get(name, name) for name in key.split("+")]
            actions += [{"type": "keyDown", "value": one} for one in held]
            actions += [{"type": "keyUp", "value": one} for one in reversed(held)]
        self._post("/actions", {"actions": [{"type": "key", "id": "keys", "actions": actions}]})

    def point(self, selector: str) -> None:
        """Move the pointer to the middle of an element."""
        found = self._post("/element", {"using": "css selector", "value": selector})
        move = {"type": "pointerMove", "x": 0, "y": 0, "origin": found}
        self._post("/actions", {"actions": [{"type": "pointer", "id": "mouse", "actions": [move]}]})

    def until(self, script: str) -> None:
        """Wait until a function body returns true."""
        end = time.monotonic() + _PATIENCE_S
        while not self.run(script):
            assert time.monotonic() < end, script
            time.sleep(0.02)

    def devtools(self, command: str, **params: Any) -> Any:
        return self._post("/goog/cdp/execute", {"cmd": command, "params": params})

    def set_theme(self, theme: str) -> None:
        """`theme`: what prefers-color-scheme is, "light" or "dark"."""
        feature = {"name": "prefers-color-scheme", "value": theme}
        self.devtools("Emulation.setEmulatedMedia", features=[feature])

    def spoken(self) -> list[tuple[str, str]]:
        """(role, name) of all that a screen reader is told, in the order of the page."""
        nodes = self.devtools("Accessibility.getFullAXTree")["nodes"]
        return [
            (node["role"]["value"], node.get("name", {}).get("value", ""))
            for node in nodes
            if not node["ignored"]
        ]

    def requests(self) -> list[str]:
        """The addresses that were asked for since the last call."""
        entries = _value(self._http.post("/se/log", json={"type": "performance"}))
        messages = [json.loads(entry["message"])["message"] for entry in entries]
        return [
            m["params"]["request"]["url"]
            for m in messages
            if m["method"] == "Network.requestWillBeSent"
        ]

    def complaints(self) -> list[str]:
        """What the console said since the last call: errors, and what the page's policy stopped."""
        entries = _value(self._http.post("/se/log", json={"type": "browser"}))
        return [entry["message"] for entry in entries]

    def forget(self) -> None:
        """Leave the page, and drop what was asked for and said until now."""
        self.load("about:blank")
        self.requests()
        self.complaints()

    def picture(self, selector: str) -> bytes:
        """A PNG of an element."""
        found = self._post("/element", {"using": "css selector", "value": selector})
        (name,) = found.values()
        return base64.b64decode(_value(self._http.get(f"/element/{name}/screenshot")))


def _value(answer: httpx.Response) -> Any:
    value = answer.json()["value"]
    assert answer.is_success, value
    return value


@contextmanager
def browsing(profile: Path) -> Iterator[Browser]:
    """A browser with an empty profile of its own.

    Args:
        profile: an empty folder.
    """
    driver = subprocess.Popen(
        ["chromedriver", "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert driver.stdout is not None
        said = next(line for line in driver.stdout if "successfully on port" in line)
        root = "http://127.0.0.1:" + said.rsplit(maxsplit=1)[1].strip(".")
        chromium = {"args": [*FLAGS, f"--user-data-dir={profile}"], "binary": _chromium()}
        wanted = {
            "browserName": "chrome", "goog:chromeOptions": chromium,
            "goog:loggingPrefs": {"performance": "ALL", "browser": "ALL"},
        }  # fmt: skip
        with httpx.Client(base_url=root, timeout=_PATIENCE_S, trust_env=False) as http:
            asked = {"capabilities": {"alwaysMatch": wanted}}
            session = f"/session/{_value(http.post('/session', json=asked))['sessionId']}"
            try:
                yield Browser(root + session)
            finally:
                http.delete(session)
    finally:
        driver.terminate()
        driver.wait(_PATIENCE_S)


def _chromium() -> str:
    found = shutil.which("chromium")
    assert found is not None
    return found
