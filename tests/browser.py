"""A headless Chromium, driven over chromedriver's own protocol (W3C WebDriver): JSON over HTTP on this machine."""

import base64
import json
import os
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from contextlib import contextmanager

import pytest


@contextmanager
def chromium(profile, size=(1280, 900)):
    """A Browser with its own profile folder and no network; skips where chromium or its driver is not installed."""
    driver = shutil.which("chromedriver")
    program = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if not driver or not program:
        pytest.skip("no chromium with chromedriver here (Debian: chromium, chromium-driver)")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    env = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}  # a sanitizer's is not for it
    process = subprocess.Popen([driver, f"--port={port}"], env=env, stdout=subprocess.DEVNULL,
                               stderr=subprocess.DEVNULL)
    browser = Browser(f"http://127.0.0.1:{port}")
    try:
        browser.start(program, profile, size)
        yield browser
    finally:
        browser.quit()
        process.terminate()
        process.wait(20)


class Browser:
    """The few commands that the tests need."""

    def __init__(self, url):
        self.url, self.session = url, ""

    def ask(self, method, path, body=None):
        """One request; returns its value. RuntimeError with the driver's words if it fails."""
        data = None if method in ("GET", "DELETE") else json.dumps(body or {}).encode()
        request = urllib.request.Request(self.url + self.session + path, data, {"Content-Type": "application/json"},
                                         method=method)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=60) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as refused:
            with refused:
                raise RuntimeError(json.load(refused)["value"]["message"]) from None

    def start(self, program, profile, size):
        """Starts the browser, as soon as the driver answers."""
        arguments = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
                     f"--user-data-dir={profile}", f"--window-size={size[0]},{size[1]}",
                     "--host-resolver-rules=MAP * ~NOTFOUND", "--disable-background-networking"]
        wanted = {"capabilities": {"alwaysMatch": {
            "goog:chromeOptions": {"binary": program, "args": arguments}, "goog:loggingPrefs": {"browser": "ALL"}}}}
        end = time.monotonic() + 30
        while True:
            try:
                self.session = "/session/" + self.ask("POST", "/session", wanted)["sessionId"]
                return
            except (urllib.error.URLError, ConnectionError):
                if time.monotonic() > end:
                    raise
                time.sleep(0.1)

    def quit(self):
        """Ends the browser."""
        if self.session:
            self.ask("DELETE", "")

    def open(self, url):
        """Loads a page anew."""
        self.ask("POST", "/url", {"url": "about:blank"})
        self.ask("POST", "/url", {"url": url})

    def run(self, script, *arguments):
        """What a script returns."""
        return self.ask("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def choose(self, element_id, value):
        """Picks an option of a select by hand, as its change event tells the page."""
        self.run("const e = document.getElementById(arguments[0]); e.value = arguments[1];"
                 "e.dispatchEvent(new Event('change'));", element_id, value)

    def press(self, *keys):
        """Presses keys where the focus is."""
        actions = [{"type": kind, "value": key} for key in keys for kind in ("keyDown", "keyUp")]
        self.ask("POST", "/actions", {"actions": [{"type": "key", "id": "keyboard", "actions": actions}]})

    def messages(self):
        """What the console said since the last time, worst things first."""
        return [f"{entry['level']}: {entry['message']}" for entry in self.ask("POST", "/se/log", {"type": "browser"})]

    def screenshot(self, path):
        """A PNG of the window."""
        path.write_bytes(base64.b64decode(self.ask("GET", "/screenshot")))
