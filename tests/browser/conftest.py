from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.browser.browser import MISSING, Browser, browsing


@pytest.fixture(scope="session")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """A browser for all tests; each loads a page of its own."""
    if MISSING:
        pytest.skip(f"no page can be looked at, because these are missing: {', '.join(MISSING)}.")
    with browsing(tmp_path_factory.mktemp("profile")) as found:
        yield found


@pytest.fixture(params=["light", "dark"])
def browser(window: Browser, request: pytest.FixtureRequest) -> Browser:
    """The same browser in both themes, with nothing left of the test before."""
    window.set_theme(request.param)
    window.forget()
    return window
