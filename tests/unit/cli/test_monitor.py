"""`vllm-scope monitor`: a real server's monitors and /metrics, as a table."""

from __future__ import annotations

import io
import json
import math
import re
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from prometheus_client import generate_latest
from rich.console import Console
from typer.testing import CliRunner

from vllm_scope.cli import app
from vllm_scope.cli.monitor import Counts, Look, Monitor, bars, counted, view
from vllm_scope.sinks.metrics import count_escalation, count_verdict

RISKY = {"site": "resid_post", "layers": [2, 5], "threshold": 0.8, "action": "stop"}
EMBED = {"site": "embed", "threshold": -1.5, "action": "escalate", "tokens": "prompt"}
MONITORS, INFO = "/v1/scope/monitors", "/v1/scope"


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


def saying(monitors, info=None):
    def says(path):
        if path == "/metrics":
            return 200, generate_latest()
        found = {MONITORS: monitors, INFO: info}.get(path)
        return (404, {"detail": "Not Found"}) if found is None else (200, found)

    return says


def run(*arguments, ok=True, **env):
    done = CliRunner().invoke(app, ["monitor", *arguments], env={"COLUMNS": "200"} | env)
    assert (done.exit_code == 0) == ok, done.output
    assert "Traceback" not in done.output
    return done.stdout


def test_a_pipe_gets_one_table_of_what_the_registry_has_counted(served):
    name = "[bold]risky[/]\x1b"
    for value in (-3.0, 0.45, 0.45, 0.85):
        count_verdict(name, value, value > 0.8)
    count_verdict(name, None, False)  # nothing was scored
    count_escalation("sent")
    (_, escalations) = counted(generate_latest().decode())
    served.says = saying({name: RISKY, "unseen": EMBED})
    table = run(served.url, VLLM_SCOPE_ADMIN_KEY="operator")
    assert served.came == [(MONITORS, "operator"), ("/metrics", None)]
    top, heading, risky, place, unseen, embed, told = table.splitlines()
    assert top.split() == ["scores"]
    assert heading.split()[:5] == ["monitor", "action", "requests", "verdicts", "flagged"]
    assert heading.rstrip().endswith(" -1 to 2")
    assert risky.split()[:5] == ["[bold]risky[/]\\x1b", "stop", "4", "1", "25.0%"]
    drawn = risky[heading.index("-1 to 2") :].rstrip()
    assert drawn == "▄" + " " * 14 + "█" + " " * 3 + "▄", "at -inf, above 0.4, above 0.8"
    assert place.split() == ["resid_post", "2,", "5", "above", "0.8"]
    assert unseen.split() == ["unseen", "escalate", "0", "0", "-"]
    assert embed.split() == ["embed", "above", "-1.5"]
    assert told == (
        f"escalations: {escalations['sent']} sent, {escalations.get('failed', 0)} failed, "
        f"{escalations.get('dropped', 0)} dropped"
    )


def test_a_terminal_shows_what_the_last_interval_added_until_the_server_is_gone(served):
    plain = saying({"live": RISKY})
    count_verdict("live", 0.1, False)

    def says(path):
        looks = sum(came == "/metrics" for came, _ in served.came)
        if path == MONITORS and looks == 2:
            return 500, {"error": {"message": "the engine is dead"}}
        if path == "/metrics" and looks == 2:
            for value in (0.9, 0.9, 0.2):
                count_verdict("live", value, value > 0.8)
        return plain(path)

    served.says = says
    shown = run(served.url, "--interval", "0.1", ok=False, FORCE_COLOR="1", TERM="xterm")
    assert "\x1b[31m" in shown, "no bar is red"
    plain_text = re.sub(r"\x1b\[[^a-zA-Z]*[a-zA-Z]", "", shown)
    assert re.search(r"last +scores +\n.* 0\.\d s -1 to 2", plain_text)
    assert re.search(r"live .* 4 +2 +50.0% +2 of 3 ", plain_text)
    assert "HTTP 500: the engine is dead" in shown


def test_once_ends_on_a_terminal_too(served):
    served.says = saying({"live": RISKY})
    done = run(served.url, "--once", FORCE_COLOR="1", TERM="xterm")
    assert "resid_post 2, 5" in done
    assert "last" not in done


@pytest.mark.parametrize(
    ("says", "sentence"),
    [
        (saying({}), "has no monitors; PUT /v1/scope/monitors sets them"),
        (saying(None), "has no scope: HTTP 404: Not Found"),
        (saying(None, {"operator": False}), "start it with VLLM_SCOPE_ADMIN_KEY."),
        (lambda path: (401, {"error": "Unauthorized"}), "401: Unauthorized; give the keys with"),
        (saying({"a": {"site": "embed"}}), "list of monitors has an unknown form"),
        (saying([]), "answer has an unknown form"),
        (lambda path: (200, {"a": RISKY}), "/metrics is not the text of Prometheus"),
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


def test_without_prometheus_the_command_names_it(served):
    served.says = saying({"a": RISKY})
    code = (
        "import sys; sys.modules['prometheus_client.parser'] = None; "
        f"from vllm_scope.cli import app; app(['monitor', {served.url!r}])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.strip() == "monitor needs prometheus_client: pip install prometheus_client."


def test_a_later_stage_is_shown_with_its_first_one():
    told = {"sure": Monitor("resid_post", 0.5, "stop", [1, 2], after="[bold]risky\x1b")}
    console = Console(width=200, file=io.StringIO())
    console.print(view(Look(told, {}, {}, 0.0), None, 200))
    lines = console.file.getvalue().splitlines()
    assert [line.split()[0] for line in lines[-4:]] == [
        "sure",
        "resid_post",
        "after",
        "escalations:",
    ]
    assert lines[-2].split() == ["after", "[bold]risky\\x1b"]


def test_a_narrow_console_shows_every_column():
    told = {"a" * 30: Monitor("resid_post", 0.5, "escalate", [1, 2])}
    counts = {"a" * 30: Counts({-1.0: 0, 0.0: 1, 1.0: 10_000_000, math.inf: 10_000_000}, 2)}
    found = Look(told, counts, {}, 2.0)
    console = Console(width=80, file=io.StringIO())
    console.print(view(found, Look(told, {}, {}, 0.0), 80))
    shown = console.file.getvalue()
    assert "2 of 10,000,000" in shown
    assert "…" not in shown
    empty = view(Look({}, {}, {}, 0.0), None, 80)
    assert str(empty) == "There are no monitors now."


def test_bars_add_up_neighbours_and_keep_the_ranges_without_an_end_alone():
    counts = Counts({-1.0: 8, 0.0: 8, 1.0: 12, 2.0: 12, 3.0: 12, math.inf: 13})
    bins = counts.bins()
    assert bins == [(-math.inf, 8), (-1.0, 0), (0.0, 4), (1.0, 0), (2.0, 0), (3.0, 1)]
    assert counts.requests == 13
    assert bars(bins, 1.0, 1).plain == "█ ▄  ▁"
    two = bars(bins, 1.0, 2)
    assert two.plain == "█▄ ▁"
    assert [(span.start, span.end) for span in two.spans] == [(2, 3), (3, 4)]
    assert bars([], 1.0, 2).plain == ""
