"""A headless Chromium to drive in tests, by its DevTools protocol over a pipe: no port, no driver, nothing to install.

The browser can reach loopback only. A `Page` keeps every request, dialog and error that it has seen.
"""

import base64
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--hide-scrollbars"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-extensions"),
    *("--disable-dev-shm-usage", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost"),
]
LIMIT_S = 300
# Chromium reads commands from file descriptor 3 and answers on 4; 0 after each message.
_START = """import fcntl, os, sys
ours = [fcntl.fcntl(int(number), fcntl.F_DUPFD, 10) for number in sys.argv[1:3]]
for descriptor, number in zip(ours, (3, 4)): os.dup2(descriptor, number)
os.execv(sys.argv[3], sys.argv[3:])"""


def why_not() -> str | None:
    """Why there is no browser to test with, if there is none."""
    if CHROMIUM is None:
        return "no Chromium here: install it (Debian: apt-get install chromium)"
    # Some systems have a stand-in of that name that only says where to get the browser.
    asked = subprocess.run([CHROMIUM, "--version"], capture_output=True, text=True, timeout=LIMIT_S, check=False)
    return None if asked.returncode == 0 else f"{CHROMIUM} does not start: {asked.stderr.strip()[-200:]}"


class Browser:
    """Use it in `with`."""

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None
        (theirs_in, self._write), (self._read, theirs_out) = os.pipe(), os.pipe()
        command = [sys.executable, "-c", _START, str(theirs_in), str(theirs_out), CHROMIUM, *FLAGS]
        command += [f"--user-data-dir={profile}", "--remote-debugging-pipe", "about:blank"]
        self._log = open(profile.with_suffix(".log"), "wb")  # noqa: SIM115 (closed at the end)
        self._process = subprocess.Popen(
            command, pass_fds=(theirs_in, theirs_out), stdout=self._log, stderr=self._log, start_new_session=True
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._news = threading.Condition()
        self._number, self._answers, self._closed = 0, dict[int, dict[str, Any]](), False
        self._listeners: dict[str, Callable[[str, dict[str, Any]], None]] = {}  # by session
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._write)
        self._process.kill()
        self._process.wait()
        self._thread.join(LIMIT_S)
        os.close(self._read)
        self._log.close()

    def open(self, width: int = 1280, height: int = 900, *, dark: bool = False) -> "Page":
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        return Page(self, session, width, height, dark=dark)

    def send(self, method: str, session: str | None = None, **params: Any) -> dict[str, Any]:
        """The answer to a command."""
        with self._news:
            self._number += 1
            number = self._number
        message = {"id": number, "method": method, "params": params} | ({"sessionId": session} if session else {})
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self._write, data) :]
        with self._news:
            self._news.wait_for(lambda: number in self._answers or self._closed, LIMIT_S)
            assert number in self._answers, f"Chromium did not answer {method}"
            answer = self._answers.pop(number)
        assert "error" not in answer, f"{method}: {answer['error']}"
        return answer["result"]

    def listen(self, session: str, listener: Callable[[str, dict[str, Any]], None]) -> None:
        self._listeners[session] = listener

    def _listen(self) -> None:
        rest = b""
        while chunk := os.read(self._read, 1 << 16):
            *messages, rest = (rest + chunk).split(b"\0")
            for message in map(json.loads, messages):
                with self._news:
                    if "id" in message:
                        self._answers[message["id"]] = message
                        self._news.notify_all()
                    elif listener := self._listeners.get(message.get("sessionId", "")):
                        listener(message["method"], message["params"])
        with self._news:
            self._closed = True
            self._news.notify_all()


class Page:
    def __init__(self, browser: Browser, session: str, width: int, height: int, *, dark: bool) -> None:
        self._browser, self._session = browser, session
        self.requests: list[str] = []  # addresses
        self.dialogs: list[str] = []
        self.errors: list[str] = []  # exceptions, and what the browser refused
        browser.listen(session, self._note)
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.send(f"{domain}.enable")
        self.resize(width, height)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.send(method, self._session, **params)

    def resize(self, width: int, height: int) -> None:
        self.send("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def go(self, url: str) -> None:
        failed = self.send("Page.navigate", url=url).get("errorText")
        assert not failed, f"{url}: {failed}"
        self.wait("document.readyState === 'complete'")

    def run(self, script: str) -> Any:
        """The value of an expression; a promise is waited for."""
        found = self.send("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in found, f"{script}: {found['exceptionDetails']}"
        return found["result"].get("value")

    def wait(self, script: str) -> Any:
        """Until an expression is true: its value, which is {} for an element."""
        end = time.monotonic() + LIMIT_S
        while (value := self.run(script)) in (None, False, 0, ""):
            assert time.monotonic() < end, f"never: {script}\n{self.run('document.body.innerText')}\n{self.errors}"
            time.sleep(0.05)
        return value

    def click(self, selector: str) -> None:
        """With the mouse, where the element is to be seen."""
        x, y = self._place(selector, 0.5, 0.5)
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def hover(self, selector: str, across: float = 0.5, down: float = 0.5) -> None:
        """Over some share of the element's width and height."""
        x, y = self._place(selector, across, down)
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def _place(self, selector: str, across: float, down: float) -> tuple[float, float]:
        x, y = self.wait(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); if (!e) return null;"
            "e.scrollIntoView({block: 'nearest'}); const r = e.getBoundingClientRect();"
            f"return r.width && [r.left + {across} * r.width, r.top + {down} * r.height] }})()"
        )
        return x, y

    def type(self, text: str) -> None:
        """Key by key, into what has the focus."""
        for character in text:
            for kind in ("keyDown", "keyUp"):
                self.send(
                    "Input.dispatchKeyEvent", type=kind, key=character, text=character if kind == "keyDown" else ""
                )

    def insert(self, text: str) -> None:
        """All at once, as pasting does."""
        self.send("Input.insertText", text=text)

    def screenshot(self) -> bytes:
        return base64.b64decode(self.send("Page.captureScreenshot", format="png")["data"])

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Page.javascriptDialogOpening":
            self.dialogs.append(params["message"])
        elif method == "Runtime.exceptionThrown":
            self.errors.append(str(params["exceptionDetails"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"]["text"])
