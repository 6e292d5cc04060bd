"""Headless Chromium by its own debugging protocol, over a pipe: nothing else is needed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

__all__ = ["Browser", "find_chromium"]

_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)

_LAUNCHER = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(n), fcntl.F_DUPFD, 10) for n in sys.argv[1:3]]
for end, place in zip(ends, (3, 4)):
    os.dup2(end, place)
os.execv(sys.argv[3], sys.argv[3:])
"""  # Chromium reads commands from 3 and answers at 4


def find_chromium() -> str | None:
    """Path of a Chromium, None without one."""
    names = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
    return next(filter(None, map(shutil.which, names)), None)


class Browser:
    """One page of a new Chromium process.

    :param folder: an empty folder for its profile.
    """

    def __init__(self, folder: Path) -> None:
        their_in, our_out = os.pipe()
        our_in, their_out = os.pipe()
        launch = [sys.executable, "-c", _LAUNCHER, str(their_in), str(their_out)]
        self._process = subprocess.Popen(
            [*launch, find_chromium(), *_FLAGS, f"--user-data-dir={folder}"],
            pass_fds=(their_in, their_out),
            stderr=subprocess.DEVNULL,
        )
        os.close(their_in)
        os.close(their_out)
        self._out, self._in = our_out, our_in
        self._count, self._rest, self._session = 0, b"", None
        self.events: list[dict] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params) -> dict:
        """The answer to a command; events that come meanwhile are kept."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._count:
            self.events.append(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def _next(self) -> dict:
        while b"\0" not in self._rest:
            more = os.read(self._in, 1 << 20)
            if not more:
                raise RuntimeError("Chromium has gone.")
            self._rest += more
        message, self._rest = self._rest.split(b"\0", 1)
        return json.loads(message)

    def show(self, width: int, height: int, *, is_dark: bool) -> None:
        """The size and the colours that pages are to be shown in."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width, height=height, deviceScaleFactor=1, mobile=width < 600,
        )  # fmt: skip
        colors = {
            "name": "prefers-color-scheme",  # vocabulary: ok
            "value": "dark" if is_dark else "light",
        }
        self.call("Emulation.setEmulatedMedia", features=[colors])

    def open(self, page: Path, query: str = "") -> None:
        """Load a page, its pictures included."""
        self.events.clear()
        self.call("Page.navigate", url=page.as_uri() + query)
        while not any(e.get("method") == "Page.loadEventFired" for e in self.events):
            self.events.append(self._next())

    def evaluate(self, script: str):
        """What a script's last expression is."""
        answer = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        return answer["result"].get("value")

    def complaints(self) -> list[str]:
        """Errors and warnings that the page has caused since it was opened."""
        said = []
        for event in self.events:
            params = event.get("params", {})
            match event.get("method"):
                case "Runtime.exceptionThrown":
                    said.append(params["exceptionDetails"]["text"])
                case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                    said.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
                case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning"):
                    said.append(str(params["args"]))
        return said

    def close(self) -> None:
        os.close(self._out)
        os.close(self._in)
        self._process.terminate()
        self._process.wait()
