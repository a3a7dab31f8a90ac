"""`vllm-scope monitor`: what a server tells of its monitors, as a table and as a page."""

from __future__ import annotations

import io
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import msgspec
import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from tests.unit.views.reading import data_of
from vllm_scope.cli import app
from vllm_scope.cli.monitor import bars, view
from vllm_scope.control.activity import Activity, Ring, State
from vllm_scope.control.tally import Tally

RISKY = ("resid_post", "stop", [2, 5], None)
ACTIVITY, INFO = "/v1/scope/monitors/activity", "/v1/scope"
SINKS = {"memory": {"bytes": 10}, "filesystem": {"rows": 12, "drops": 5, "errors": 1}}
RING = Ring(4 << 20, 1 << 20, 7.0)
STATE = State(3, 2, 3 << 20, 64 << 20, 1, 2 << 20, 8 << 20, [RING], SINKS)


class _Answers(BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.came.append((self.path, self.headers.get("X-Scope-Admin-Key")))
        status, body = self.server.says(self.path)
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args):
        pass


@pytest.fixture
def served():
    """A server; `says` maps a path to a status and a body."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Answers)
    server.came, server.url = [], f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def saying(tallies, info=None, now_s=1000.0):
    """Name -> (what the monitor is, its tally, its escalations); None: there are no such routes."""

    def says(path):
        if path == ACTIVITY and tallies is not None:
            found = {
                name: tally.found(*what, escalations)
                for name, (what, tally, escalations) in tallies.items()
            }
            return 200, msgspec.json.encode(Activity(now_s, found, STATE))
        found = info if path == INFO else None
        return (404, {"detail": "Not Found"}) if found is None else (200, found)

    return says


def run(*arguments, ok=True, **env):
    done = CliRunner().invoke(app, ["monitor", *arguments], env={"COLUMNS": "200"} | env)
    assert (done.exit_code == 0) == ok, done.output
    assert "Traceback" not in done.output
    return done.stdout


def tally_of(*values, threshold=0.8, since_s=0.0, at_s=990.0):
    tally = Tally(threshold, since_s, clock=lambda: at_s)
    for i, value in enumerate(values):
        tally.add(value, f"cmpl-{i}\x1b", 0, (i, value) if value > threshold else None)
    return tally


def test_a_pipe_gets_one_table_of_what_the_server_tells(served):
    name = "[bold]risky[/]\x1b"
    tally = tally_of(-3.0, 0.45, 0.45, 0.85)
    tally.add(None)  # nothing was scored
    told = {"sent": 1, "failed": 2, "dropped": 3, "waiting": 4}
    later = ("embed", "escalate", [], "[bold]risky"), tally_of(threshold=-1.5), told
    served.says = saying({name: (RISKY, tally, {}), "unseen": later})
    table = run(served.url, VLLM_SCOPE_ADMIN_KEY="operator")
    assert served.came == [(ACTIVITY, "operator")]
    heading, risky, place, unseen, embed, after, *told = table.splitlines()
    assert heading.split() == ["monitor", "action", "requests", "verdicts", "flagged", "scores"]
    assert risky.split()[:5] == ["[bold]risky[/]\\x1b", "stop", "4", "1", "25.0%"]
    drawn = risky[heading.index("scores") :].rstrip()
    # Ranges of 1/8, two to a bar: -3.0 is the 31st below, 0.45 the third, 0.85 the first above.
    assert drawn == "▄" + " " * 13 + "█" + " " + "│▄"
    assert place.split() == [
        "resid_post", "2,", "5", "above", "0.8", "0.07/s", "0.02/s", "-3.2", "to", "1.05",
    ]  # fmt: skip
    assert unseen.split() == ["unseen", "escalate", "0", "0", "-", "-"]
    assert embed.split() == ["embed", "above", "-1.5", "0.00/s", "0.00/s"]
    assert after.split() == ["after", "[bold]risky"]
    assert told == [
        "escalations: 1 sent, 2 failed, 3 dropped, 4 waiting",
        f"verdict at 00:16:30 UTC: {name[:-1]}\\x1b, 0.85 at position 3, stop, cmpl-3\\x1b",
        "plugin: 3 requests, 2 pending, rows 3.0 of 64.0 MiB, 1 files 2.0 of 8.0 MiB",
        "rings: 25.0% full",
        "sink filesystem: 5 rows dropped, 1 errors",
    ]


def test_a_narrow_pipe_gets_each_verdict_on_one_line(served):
    served.says = saying({"m" * 60: (RISKY, tally_of(0.85), {})})
    lines = run(served.url, COLUMNS="80").splitlines()
    (verdict,) = [line for line in lines if line.startswith("verdict at ")]
    assert verdict.endswith("m, 0.85 at position 0, stop, cmpl-0\\x1b")


def test_a_terminal_shows_what_is_new_until_the_server_is_gone(served):
    tally = tally_of(0.1)
    plain = saying({"live": (RISKY, tally, {})})

    def says(path):
        looks = sum(came == ACTIVITY for came, _ in served.came)
        if looks == 3:
            return 500, {"error": {"message": "the engine is dead"}}
        if looks == 2:
            for value in (0.9, 0.9, 0.2):
                tally.add(value, "r", 0, (0, value) if value > 0.8 else None)
        return plain(path)

    served.says = says
    shown = run(served.url, "--interval", "0.1", ok=False, FORCE_COLOR="1", TERM="xterm")
    assert "\x1b[31m" in shown, "no bar is red"
    plain_text = re.sub(r"\x1b\[[^a-zA-Z]*[a-zA-Z]", "", shown)
    assert re.search(r"live .* 1 +0 +0.0% ", plain_text)
    assert re.search(r"live .* 4 +2 +50.0% ", plain_text)
    assert "HTTP 500: the engine is dead" in shown


def test_once_ends_on_a_terminal_too(served):
    served.says = saying({"live": (RISKY, tally_of(0.1), {})})
    done = run(served.url, "--once", FORCE_COLOR="1", TERM="xterm")
    assert "resid_post 2, 5" in done
    assert len(served.came) == 1


def test_a_page_is_written_instead(served, tmp_path):
    name = "<script>risky"
    served.says = saying({name: (RISKY, tally_of(0.1, 0.9), {})})
    assert run(served.url, "--page", str(tmp_path / "page.html")) == ""
    data = data_of((tmp_path / "page.html").read_text(encoding="utf-8"))
    (section,) = [part for part in data["parts"] if part["kind"] == "section"]
    assert (section["title"], section["facts"]) == (
        name, "2 requests, 1 verdicts since the start",
    )  # fmt: skip
    told = run(served.url, "--page", str(tmp_path / "page.txt"), ok=False)
    assert "a page's name must end in .html" in told


@pytest.mark.parametrize(
    ("says", "sentence"),
    [
        (saying({}), "has no monitors; set them with PUT /v1/scope/monitors"),
        (saying(None), "has no scope: HTTP 404: Not Found"),
        (saying(None, {"operator": False}), "start it with VLLM_SCOPE_ADMIN_KEY."),
        (lambda path: (401, {"error": "Unauthorized"}), "401: Unauthorized; give the keys with"),
        (lambda path: (200, {"monitors": {}}), "activity of monitors has an unknown form"),
        (lambda path: (200, []), "answer has an unknown form"),
        (lambda path: (200, b"<html>"), "the answer is no JSON"),
    ],
)
def test_what_cannot_be_shown_is_one_sentence(says, sentence, served):
    served.says = says
    told = run(served.url, ok=False)
    assert sentence in told
    assert len(told.splitlines()) == 1


def test_a_server_that_is_not_there_is_one_sentence(served):
    served.server_close()
    told = run(served.url, ok=False)
    assert told.startswith(f"no answer from {served.url}: ")
    assert len(told.splitlines()) == 1


def test_a_narrow_console_shows_every_column():
    tally = tally_of(*[0.1] * 20, 0.9, -5.0, at_s=999.0)
    found = {"a" * 30: tally.found("resid_post", "escalate", [1, 2], None, {})}
    console = Console(width=80, file=io.StringIO())
    console.print(view(Activity(1000.0, found, STATE), 80))
    shown = console.file.getvalue()
    assert "0.40/s" in shown
    assert "…" not in shown
    assert str(view(Activity(1000.0, {}, STATE), 80)) == "There are no monitors now."


@pytest.mark.parametrize("step", [1, 2, 4])
def test_no_bar_lies_on_both_sides_of_the_threshold(step):
    values = np.random.default_rng(0).normal(size=300).tolist()
    found = tally_of(*values, threshold=0.3).found(*RISKY, {})
    text = bars(found, step)
    drawn, ends = text.plain.split("\n")
    assert drawn.count("│") == 1
    assert len(drawn) <= 64 / step + 1
    (low, high) = map(float, ends.split(" to "))
    assert low < min(values) < max(values) <= high
    red = [drawn[span.start : span.end] for span in text.spans]
    assert "".join(red) == drawn.split("│")[1]
