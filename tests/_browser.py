"""A real browser without a window, and what it complains of."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


@dataclass
class Complaints:
    """What must not happen on a page."""

    console: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    dialogs: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    """Of anything but the page's own file and what it carries in itself."""


@contextmanager
def chromium() -> Iterator[Any]:
    """Start Chromium; the test skips, saying so, where there is none."""
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    with api.sync_playwright() as playwright:
        path = found or playwright.chromium.executable_path
        if not Path(path).exists():
            pytest.skip("no Chromium is found on this machine")
        browser = playwright.chromium.launch(executable_path=path)
        yield browser
        browser.close()


@contextmanager
def opened(browser: Any, file: Path, **options: Any) -> Iterator[tuple[Any, Complaints]]:
    """Open a page from disk; ``options`` are those of a browser context."""
    heard = Complaints()
    context = browser.new_context(**{"viewport": {"width": 1100, "height": 900}, **options})
    # In a page's own world this would itself be forbidden; the debugger's scripts are not.
    context.add_init_script(
        "window.violations = []; addEventListener('securitypolicyviolation', (event) => "
        "window.violations.push(`${event.violatedDirective} ${event.blockedURI} ${event.sample}`));"
    )
    page = context.new_page()
    page.on("console", lambda message: heard.console.append(f"{message.type}: {message.text}"))
    page.on("pageerror", lambda error: heard.errors.append(str(error)))
    page.on("dialog", lambda dialog: (heard.dialogs.append(dialog.message), dialog.dismiss()))
    address = file.as_uri()
    page.on(
        "request",
        lambda request: (
            None
            if request.url == address or request.url.startswith("data:")
            else heard.requests.append(request.url)
        ),
    )
    page.goto(address)
    yield page, heard
    context.close()
