"""CPU time of an API server for the rows in its answers, without an engine.

    python -m benchmarks.answers
    python -m benchmarks.answers --layers 32 --tokens 64 --width 4096

A server process answers with recorded rows. The server uses vLLM's response classes and all code of
vllm-scope from the finished result to the socket. The client parses only the answers that name a
file. The kinds of answers take turns. There are four figures. The first is the CPU time of the
server process for a request. The second is the CPU time of a MB of rows: the difference to a plain
request's CPU time, divided by the MB of rows. The third is the MB that the server sends. The fourth
is the longest time in which the event loop did not run other tasks.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from benchmarks.server import running
from benchmarks.turns import order
from vllm_scope.request import media

BINARY = {"Accept": media.BINARY}
#: kind -> (the plain kind to compare with, headers, whether it streams, options of the scope)
KINDS: dict[str, tuple[str, dict[str, str], bool, dict[str, str]]] = {
    "plain": ("plain", {}, False, {}),
    "JSON": ("plain", {}, False, {}),
    "JSON and a file": ("plain", {}, False, {"tensors": "handle"}),
    "binary": ("plain", BINARY, False, {}),
    "plain, streamed": ("plain, streamed", {}, True, {}),
    "JSON, streamed": ("plain, streamed", {}, True, {"stream": "rows"}),
    "binary, streamed": ("plain, streamed", BINARY, True, {"stream": "rows"}),
}
NUM_PROMPT = 16
#: Number of tokens in one part of the rows. An engine delivers the rows of a few steps together.
PART = 8


def recorded(layers: int, tokens: int, width: int) -> Any:
    """A function of a number of tokens, which returns a result with the bfloat16 rows of the first
    tokens. For None, the result has the rows of all tokens."""
    import numpy as np
    import torch

    from vllm_scope import Read, Spec, scope
    from vllm_scope.batch.by_position import Part
    from vllm_scope.request.sites import Place, Sites
    from vllm_scope.results.result import ScopeResult

    sites = Sites(layers, width, "bfloat16", tuple(range(2 * layers + 1)))
    spec = Spec.from_json(str(scope(Read("resid_post"))["scope"]))
    asked, rows = spec.resolve(sites), torch.randn(tokens, width).bfloat16()
    places = [Place("resid_post", layer).point() for layer in range(layers)]
    cuts = [*range(0, tokens, PART), tokens]
    whole: list[list[Part]] = []
    for _ in places:
        some = pairwise(cuts)
        whole.append([Part(np.arange(a, b), np.arange(a, b), rows[a:b].clone()) for a, b in some])

    def result(count: int | None) -> ScopeResult:
        known = tokens if count is None else count
        parts = [p for p in range(len(cuts) - 1) if cuts[p + 1] <= known or count is None]
        arrived = {
            place: [each[p] for p in parts] for place, each in zip(places, whole, strict=True)
        }
        ids = list(range(known + 1))
        status = "complete" if count is None else "streaming"
        return ScopeResult(asked, sites, ids, NUM_PROMPT, {None: arrived}, status, None)  # type: ignore[arg-type]

    return result


def make_app() -> FastAPI:
    """`/v1/completions` as in vLLM, with recorded results instead of an engine."""
    from vllm.entrypoints.openai.completion.protocol import (
        CompletionResponse,
        CompletionResponseChoice,
        CompletionResponseStreamChoice,
        CompletionStreamResponse,
    )
    from vllm.entrypoints.serve.engine.protocol import UsageInfo

    from vllm_scope.server.answer import Answer
    from vllm_scope.server.options import ScopeOptions
    from vllm_scope.server.routes import attach
    from vllm_scope.server.store import owner_of

    late: list[float] = []

    @asynccontextmanager
    async def watched(app: FastAPI) -> AsyncIterator[None]:
        async def watch() -> None:
            while True:
                before = time.perf_counter()
                await asyncio.sleep(0.02)
                late.append(time.perf_counter() - before - 0.02)

        task = asyncio.create_task(watch())
        yield
        task.cancel()

    app = FastAPI(lifespan=watched)
    attach(app, lambda: None)
    results = cache(recorded)

    @app.get("/health")
    async def health() -> Response:
        return Response()

    @app.get("/late")
    async def lateness() -> float:
        found = max(late, default=0.0)
        late.clear()
        return found

    def made(body: dict[str, Any]) -> Answer | None:
        if body["options"] is None:
            return None
        state = app.state.scope
        options = ScopeOptions(**body["options"], reads=True)
        inline = state.settings.binary_bytes
        found = Answer(options, state.store, inline, owner_of(None), 1, body["stream"])
        found.add_prompt()
        found.open_one(lambda: None, True)
        return found

    def completed(count: int | None, result: Any) -> Any:
        end = "length" if count is None else None
        return SimpleNamespace(index=0, finish_reason=end, scope=result(count), scope_texts=[])

    async def streamed(answer: Answer | None, shape: tuple[int, int, int]) -> AsyncGenerator[str]:
        counts: list[int | None] = [*range(NUM_PROMPT, shape[1]), None]
        result = results(*shape)
        for count in counts:
            if answer is not None:
                answer.take(0, completed(count, result))
            choice = CompletionResponseStreamChoice(
                index=0, text=" word", finish_reason="length" if count is None else None
            )
            chunk = CompletionStreamResponse(model="model", choices=[choice])
            text = f"data: {chunk.model_dump_json(exclude_unset=False)}\n\n"
            yield text if answer is None else await answer.chunk(text)
            await asyncio.sleep(0)
        yield "data: [DONE]\n\n"

    @app.post("/v1/completions")
    async def complete(request: Request) -> Response:
        body = await request.json()
        answer, shape = made(body), tuple(body["shape"])
        if body["stream"]:
            return StreamingResponse(streamed(answer, shape), media_type="text/event-stream")
        choice = CompletionResponseChoice(index=0, text=" word" * shape[1], finish_reason="length")
        response = CompletionResponse(model="model", choices=[choice], usage=UsageInfo())
        if answer is not None:
            answer.take(0, completed(None, results(*shape)))
            await answer.fill(response)
        return JSONResponse(content=response.model_dump())

    return app


class Client:
    """One connection to the server. `process` is the server's process."""

    def __init__(self, url: str, process: psutil.Process, shape: list[int]) -> None:
        self._connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=600)
        self._process, self._shape = process, shape

    def measure(self, kind: str, seconds: float) -> dict[str, float]:
        """Figures of requests that are sent one after another, for this many seconds."""
        self._ask("GET", "/late")
        count, size, before, started = 0, 0, self._cpu(), time.perf_counter()
        while time.perf_counter() - started < seconds:
            size += self.ask(kind)
            count += 1
        cpu = self._cpu() - before
        late = float(self._ask("GET", "/late"))
        return {"ms": 1e3 * cpu / count, "mb": size / count / 1e6, "late_ms": 1e3 * late}

    def ask(self, kind: str) -> int:
        """Send a request, and return the number of bytes in the answer and in its file."""
        _, headers, streams, options = KINDS[kind]
        asked = None if kind.startswith("plain") else options
        body = {"stream": streams, "options": asked, "shape": self._shape}
        came = self._ask("POST", "/v1/completions", json.dumps(body), headers)
        if options.get("tensors") != "handle":
            return len(came)
        url = json.loads(came)["choices"][0]["scope"]["result"]["url"]
        return len(came) + len(self._ask("GET", f"{url}?delete=true"))

    def _ask(self, method: str, path: str, body: str | None = None, headers: Any = None) -> bytes:
        self._connection.request(method, path, body, headers or {})
        response = self._connection.getresponse()
        content = response.read()
        assert response.status == 200, content[:300]
        return content

    def _cpu(self) -> float:
        times = self._process.cpu_times()
        return float(times.user + times.system)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=384, help=f"{NUM_PROMPT} of them the prompt")
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of a turn of one kind")
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=list(KINDS))
    parser.add_argument("--serve", action="store_true", help="be the server")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    args = parser.parse_args()
    if args.serve:
        import uvicorn

        # The same options as in vLLM.
        uvicorn.run(make_app(), host=args.host, port=args.port, log_level="warning", loop="uvloop")
        return
    shape = [args.layers, args.tokens, args.width]
    rows_mb = args.layers * args.tokens * args.width * 2 / 1e6
    print(
        f"{args.layers} layers, {args.tokens} tokens, {args.width} wide: {rows_mb:.3f} MB of rows"
    )
    kinds = [k for k in KINDS if k in args.kinds or k in {KINDS[x][0] for x in args.kinds}]
    command = [sys.executable, "-m", "benchmarks.answers", "--serve"]
    with tempfile.TemporaryDirectory() as folder:
        # This limit is so large that answers in JSON have all rows too.
        env = {"VLLM_SCOPE_RESULTS_DIR": folder, "VLLM_SCOPE_INLINE_KIB": str(1 << 20)}
        with running(command, env, Path(folder) / "log", 300, 20) as (url, process):
            client = Client(url, process, shape)
            found: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
            for turn in range(args.turns + 1):
                for kind in order(kinds, turn):
                    told = client.measure(kind, args.seconds if turn else 0.1)
                    if turn:  # the first turn warms up
                        found[kind].append(told)
    print(
        f"{'':18} {'ms a request':>12} {'ms a MB of rows':>15} {'MB sent':>8} {'loop busy, ms':>13}"
    )
    middle = {
        kind: {name: statistics.median(t[name] for t in turns) for name in turns[0]}
        for kind, turns in found.items()
    }
    for kind, one in middle.items():
        of_rows = (one["ms"] - middle[KINDS[kind][0]]["ms"]) / rows_mb
        print(
            f"{kind:18} {one['ms']:12.2f} {of_rows:15.2f} {one['mb']:8.2f} {one['late_ms']:13.1f}"
        )


if __name__ == "__main__":
    main()
