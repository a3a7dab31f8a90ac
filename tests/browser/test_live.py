"""The operator's page, served by the real routes: keys, live figures, and what goes wrong."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn
from starlette.responses import JSONResponse

from tests.browser.browser import Browser
from tests.unit.server.test_routes import Remembering, app_with
from vllm_scope.control.tally import Tally
from vllm_scope.server import pages

API_KEY, ADMIN_KEY = "key-of-one", "operator"
#: Seconds between two questions of the page.
EVERY_S = 0.05
FACTS = "return document.querySelector('summary .facts')?.textContent ?? ''"
FAILED = "return document.querySelector('.failed').textContent"


class Served:
    """The routes on a port. `came` has (path, query, Authorization) of each request."""

    def __init__(self, app) -> None:
        self.app, self.came, self.fails = app, [], False
        #: "nothing" or "headers": what the answers to questions for data stop behind.
        self.hangs = ""
        self.url = ""

    async def __call__(self, scope, receive, send):
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"authorization", b"").decode()
        self.came.append((scope["path"], scope["query_string"].decode(), given))
        if self.hangs and scope["path"].startswith("/v1"):
            if self.hangs == "headers":
                await send({"type": "http.response.start", "status": 200, "headers": []})
                await send({"type": "http.response.body", "body": b"{", "more_body": True})
            while (await receive())["type"] != "http.disconnect":
                pass
        elif self.fails:
            await JSONResponse({"error": {"message": "<b>it fails</b>"}}, 500)(scope, receive, send)
        elif scope["path"].startswith("/v1") and given != f"Bearer {API_KEY}":
            # As vLLM's middleware does.
            await JSONResponse({"error": "Unauthorized"}, 401)(scope, receive, send)
        else:
            await self.app(scope, receive, send)


@pytest.fixture
def engine() -> Remembering:
    found = Remembering()
    found.tallies["risky"] = Tally(0.5)
    return found


@pytest.fixture
def served(tmp_path, monkeypatch, engine) -> Iterator[Served]:
    monkeypatch.setattr(pages, "_EVERY_S", EVERY_S)
    app = app_with(tmp_path, monkeypatch, ADMIN_KEY, engine)
    found = Served(app)
    config = uvicorn.Config(found, "127.0.0.1", 0, lifespan="off", log_level="error")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    end = time.monotonic() + 60
    while not server.started and time.monotonic() < end:
        time.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    found.url = f"http://127.0.0.1:{port}"
    yield found
    server.should_exit = True
    thread.join(60)
    app.state.scope.store.close()


def give(browser: Browser, api: str, admin: str) -> None:
    browser.run("document.querySelector('form input').focus()")
    browser.press(*api, "Tab", *admin, "Enter")


def open_page(window: Browser, served: Any) -> None:
    """With both keys; returns when the one monitor is shown."""
    window.forget()
    window.load(f"{served.url}/scope/monitors")
    give(window, API_KEY, ADMIN_KEY)
    window.until(f"return ({FACTS[7:]}).includes('0 requests')")


def test_the_page_shows_what_happens_while_it_is_open(browser, served, engine):
    browser.load(f"{served.url}/scope/monitors")
    assert browser.run("return document.querySelector('main').childNodes.length") == 0
    give(browser, API_KEY, ADMIN_KEY)
    browser.until(f"return ({FACTS[7:]}).includes('0 requests')")
    assert browser.run("return document.querySelector('form').checkVisibility()") is False
    browser.run("document.querySelector('summary').focus()")
    browser.press("Enter")  # closed by the reader
    engine.tallies["risky"].add(0.75, "cmpl-<i>", 0, (4, 0.75))
    browser.until(f"return ({FACTS[7:]}).includes('1 requests, 1 verdicts')")
    assert browser.run("return document.activeElement.tagName") == "SUMMARY"
    assert browser.run("return document.querySelector('details').open") is False
    browser.press("Enter")
    rows = "return [...document.querySelectorAll('details td')].map(cell => cell.textContent)"
    browser.until("return document.querySelector('details td')")
    assert browser.run(rows) == ["cmpl-<i>", "0", "4", "0.75", "flag"]
    assert {path for path, _, _ in served.came} == {"/scope/monitors", "/v1/scope/monitors/view"}
    assert {query for _, query, _ in served.came} == {""}
    # The page has no key, its address neither.
    html = browser.run("return document.documentElement.outerHTML + location.href")
    assert API_KEY not in html
    assert browser.complaints() == []


@pytest.mark.parametrize(
    ("api", "admin", "why"),
    [
        pytest.param(API_KEY, "x", "HTTP 403: X-Scope-Admin-Key is not", id="wrong-operators-key"),
        pytest.param("x", ADMIN_KEY, "HTTP 401: Unauthorized", id="wrong-api-key"),
        pytest.param("", ADMIN_KEY, "HTTP 401: Unauthorized", id="no-api-key"),
        pytest.param(API_KEY, "", "HTTP 403: ", id="no-operators-key"),
        pytest.param(API_KEY, "κ", "A key has a character that", id="no-header"),
    ],
)
def test_without_both_keys_nothing_is_shown_and_the_page_says_why(api, admin, why, window, served):
    window.forget()
    window.load(f"{served.url}/scope/monitors")
    give(window, api, admin)
    window.until("return document.querySelector('.failed').textContent != ''")
    assert window.run(FAILED).startswith(why)
    assert "alert" in [role for role, _ in window.spoken()]
    assert window.run("return document.querySelector('main').childNodes.length") == 0
    assert window.run("return document.activeElement.type") == "password"
    assert "risky" not in window.run("return document.body.textContent")


def test_a_server_that_fails_leaves_what_was_shown_and_says_that_it_is_older(window, served):
    open_page(window, served)
    served.fails = True
    window.until("return document.querySelector('main').classList.contains('stale')")
    assert window.run(FAILED) == "HTTP 500: <b>it fails</b>; what is shown is older."
    assert "risky" in window.run("return document.querySelector('main').textContent")
    served.fails = False
    window.until("return !document.querySelector('main').classList.contains('stale')")
    assert window.run(FAILED) == ""


@pytest.mark.parametrize("hangs", ["nothing", "headers"])
def test_a_server_that_does_not_answer_is_told(window, served, hangs, monkeypatch):
    monkeypatch.setattr(pages, "_TIMEOUT_S", 2.5)
    open_page(window, served)
    served.hangs = hangs
    window.until("return document.querySelector('main').classList.contains('stale')")
    said = "no answer from the server within 2.5 s; what is shown is older."
    assert window.run(FAILED) == said
    served.hangs = ""
    window.until("return !document.querySelector('main').classList.contains('stale')")
    assert window.run(FAILED) == ""


def test_what_the_reader_has_opened_stays_with_its_monitor(window, served, engine):
    for name in ('b "q"]\\', "c", "d", "e"):
        engine.tallies[name] = Tally(0.5)
    window.forget()
    window.load(f"{served.url}/scope/monitors")
    give(window, API_KEY, ADMIN_KEY)
    opened = (
        "[...document.querySelectorAll('details')].filter(one => one.open)"
        ".map(one => one.querySelector('b').textContent)"
    )
    window.until("return document.querySelectorAll('details').length === 5")
    assert window.run(f"return {opened}") == ["risky", 'b "q"]\\', "c", "d"]
    window.run("document.querySelectorAll('summary')[0].focus()")
    window.press("Enter")  # risky is closed
    window.run("document.querySelectorAll('summary')[1].focus()")
    window.until("return !document.querySelector('details').open")
    engine.tallies = {"new": Tally(0.5), **engine.tallies}
    window.until("return document.querySelectorAll('details').length === 6")
    assert window.run(f"return {opened}") == ["new", 'b "q"]\\', "c", "d"]
    assert window.run("return document.activeElement.querySelector('b')?.textContent") == (
        'b "q"]\\'
    )
    del engine.tallies["new"], engine.tallies["c"]
    window.until("return document.querySelectorAll('details').length === 4")
    assert window.run(f"return {opened}") == ['b "q"]\\', "d"], "e is not opened by its new place"


def test_a_reader_can_pause_it(window, served, engine):
    window.forget()
    window.load(f"{served.url}/scope/monitors")
    window.run(
        """const original = window.fetch;
        [window.asked, window.waiting] = [0, 0];
        window.fetch = (...given) => {
          window.asked++;
          window.waiting++;
          return original(...given).finally(() => window.waiting--);
        };"""
    )
    give(window, API_KEY, ADMIN_KEY)
    window.until("return window.asked > 3")
    button = "document.querySelector('.live button')"
    window.until(f"return !window.waiting && ({button}.click(), true)")
    assert window.run(f"return {button}.getAttribute('aria-pressed')") == "true"
    asked = window.run("return window.asked")
    engine.tallies["risky"].add(0.1)
    time.sleep(10 * EVERY_S)
    assert window.run("return window.asked") == asked
    assert "0 requests" in window.run(FACTS)
    window.run(f"{button}.click()")
    window.until(f"return ({FACTS[7:]}).includes('1 requests')")


def test_nothing_is_drawn_while_a_button_is_down(window, served, engine):
    """A click on what is replaced between down and up would be lost."""
    open_page(window, served)
    window.run("dispatchEvent(new Event('pointerdown'))")
    engine.tallies["risky"].add(0.1)
    asked, end = len(served.came), time.monotonic() + 60
    while len(served.came) < asked + 4:
        assert time.monotonic() < end
        time.sleep(EVERY_S)
    assert "0 requests" in window.run(FACTS)
    window.run("dispatchEvent(new Event('pointerup'))")
    window.until(f"return ({FACTS[7:]}).includes('1 requests')")


def test_a_server_without_an_operators_key_has_no_page(window, tmp_path, monkeypatch):
    app = app_with(tmp_path, monkeypatch, None, Remembering())
    paths = {getattr(route, "path", "") for route in app.routes}
    assert not [path for path in paths if "monitors" in path]
    app.state.scope.store.close()
