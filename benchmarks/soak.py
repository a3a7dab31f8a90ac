"""Half an hour of mixed load over HTTP. Memory must not grow, and no result may be lost. Plain
requests must be as fast as on a server without the plugin, although some requests are hostile.

Two servers run at the same time, one with the plugin and one without. The servers take turns of
half a minute. If the machine's speed changes, the change affects both servers. In a turn, requests
are sent at random times (a Poisson process, independent of the answers). Times and prompts are the
same for both servers. 65 % of the requests are plain. 30 % read, score, edit by a module's name,
stream, fetch files, or disconnect before the end. 5 % are hostile (benchmarks/hostile.py). For each
hostile request, `Hostile.statuses` lists the allowed statuses of its answer. Half of the prompts
begin with text that is in the prefix cache. Two monitors score every request, and their weights
change twice in a turn. The server without the plugin gets the same requests without a scope. Of the
hostile requests, this server gets only those with `Hostile.alike`, unchanged. Latencies are of
plain requests only.

    make soak                                      # 30 minutes
    python -m benchmarks.soak --minutes 2 --turn 15

If a result was lost, a resource was not freed, or memory grew by MOST_GROWTH, the exit status is 1.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from safetensors.numpy import save

from benchmarks.hostile import Hostile, hostile
from benchmarks.server import ADMIN_KEY, API_KEY, ROOT, Server, serving
from benchmarks.shapes import SHAPES, make_shape, make_tokenizer
from vllm_scope import Add, Probe, Read, scope

#: Kind of request -> its weight among all requests.
KINDS = {
    "plain": 26, "read": 2, "file": 1, "probe": 2, "edit": 1, "stream": 2,
    "stream of rows": 2, "leaves": 1, "leaves a stream": 1, "hostile": 2,
}  # fmt: skip
#: The limit of memory's growth from the second quarter of the time to the last, as a fraction.
MOST_GROWTH = 0.02
SAMPLE_S = 2.0
MODEL_LENGTH = 512
#: The numbers of tokens of a KV block, and of the text with which half of the prompts begin.
BLOCK, BEGINNING = 32, 96


@dataclass
class Side:
    """One of the two servers, and its figures.

    Attributes:
        latencies: for each turn, the seconds of plain requests.
        seen: outcome of requests -> their number.
        memory: (seconds, bytes) over time.
    """

    server: Server
    plugin: bool
    latencies: list[list[float]] = field(default_factory=list)
    seen: Counter[str] = field(default_factory=Counter)
    memory: list[tuple[float, int]] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)


@cache
def hostile_bodies(hidden_size: int) -> list[Hostile]:
    return [make() for make in hostile("model", hidden_size, MODEL_LENGTH).values()]


class Requests:
    """The requests of one server's clients, and the checks of the answers."""

    def __init__(self, side: Side, session: Any, config: dict[str, Any]) -> None:
        self._side, self._session = side, session
        self._vocab, self._layers = config["vocab_size"], config["num_hidden_layers"]
        middle = self._layers // 2
        weight = np.linspace(-1, 1, config["hidden_size"], dtype=np.float32)
        read, probe = Read("resid_post", layers=[middle]), Probe(weight, layer=middle, name="p")
        self._module = save({f"direction.{middle}": weight})
        self._weight, self._middle = weight, middle
        self._actions: dict[str, list[Any]] = {
            "read": [read, Read("embed")], "file": [read], "probe": [probe],
            "edit": [Add("soak", scale=0.5, tokens="generated"), probe], "stream": [probe],
            "stream of rows": [read, probe], "leaves": [read, probe],
            "leaves a stream": [read, probe],
        }  # fmt: skip
        self._hostile = hostile_bodies(config["hidden_size"])

    async def one(self, kind: str, prompt: list[int], generate: int) -> None:
        try:
            if kind == "plain":
                started = time.perf_counter()
                await self._answer(self._body(kind, prompt, generate))
                self._side.latencies[-1].append(time.perf_counter() - started)
            elif kind == "hostile":
                # Each time, send the next request of the list, so that several turns send all.
                await self._harm(self._hostile[self._side.seen[kind] % len(self._hostile)])
            elif "leaves" in kind:
                await self._leave(self._body(kind, prompt, 300), kind)
            elif "stream" in kind:
                await self._stream(self._body(kind, prompt, generate))
            else:
                await self._whole(self._body(kind, prompt, generate))
            self._side.seen[kind] += 1
        except Exception as error:
            self._side.lost.append(f"{kind}: {type(error).__name__} {str(error)[:300]}")

    def _body(self, kind: str, prompt: list[int], generate: int) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": "model",
            "prompt": prompt,
            "max_tokens": generate,
            "temperature": 0,
        }
        body |= {"ignore_eos": True, "stream": "stream" in kind}
        if self._side.plugin and kind in self._actions:
            body["vllm_xargs"] = scope(*self._actions[kind])
            if kind == "file":
                body["vllm_xargs"]["scope_tensors"] = "handle"
            if kind == "stream of rows":
                body["vllm_xargs"]["scope_stream"] = "rows"
        return body

    async def _answer(self, body: dict[str, Any]) -> Any:
        async with self._session.post("/v1/completions", json=body) as response:
            text = await response.read()
            assert response.status == 200, text
            return json.loads(text)

    async def _whole(self, body: dict[str, Any]) -> None:
        choice = (await self._answer(body))["choices"][0]
        if "vllm_xargs" not in body:
            return
        found = choice["scope"]
        positions = len(body["prompt"]) + body["max_tokens"] - 1
        assert found["status"] == "complete", found
        columns = len(found["rows"]) + len(found["scores"])
        assert found["delivered"] == found["expected"] == columns * positions, found
        if found["result"] is not None:
            url = found["result"]["url"]
            async with self._session.get(url, params={"delete": "true"}) as response:
                assert response.status == 200
                assert len(await response.read()) == found["result"]["num_bytes"]

    async def _stream(self, body: dict[str, Any]) -> None:
        positions: list[int] = []
        end = None
        async with self._session.post("/v1/completions", json=body) as response:
            assert response.status == 200, await response.read()
            async for line in response.content:
                if line.startswith(b"data: {"):
                    found = json.loads(line[6:])["choices"][0].get("scope")
                    if found is not None:
                        end = found
                        for first, last in found["scores"].get("p", {"spans": []})["spans"]:
                            positions += range(first, last)
        if "vllm_xargs" in body:
            assert end is not None
            assert end["status"] == "complete", end
            assert positions == list(range(len(body["prompt"]) + body["max_tokens"] - 1))

    async def _harm(self, one: Hostile) -> None:
        if not (self._side.plugin or one.alike):
            return
        asked = self._session.request(
            one.method, one.path, data=one.content, headers=one.all_headers
        )
        async with asked as response:
            text = await response.read()
            # A server without the plugin can answer a request that the plugin refuses.
            assert not self._side.plugin or response.status in one.statuses, text[:300]

    async def _leave(self, body: dict[str, Any], kind: str) -> None:
        async def some() -> None:
            async with self._session.post("/v1/completions", json=body) as response:
                assert response.status == 200, await response.read()
                lines = 0
                async for _ in response.content:
                    lines += 1
                    if lines == 6:
                        return

        task = asyncio.ensure_future(some())
        await asyncio.wait([task], timeout=0.3)
        if task.done():
            await task
        else:
            task.cancel()

    async def change(self, count: int) -> None:
        """Register the module that requests name. Register and remove other modules. Change the
        weights of the monitors."""
        if not self._side.plugin:
            return
        headers = {"X-Scope-Admin-Key": ADMIN_KEY}
        for method, name in (
            ("PUT", "soak"), ("PUT", f"soak {count}"), ("DELETE", f"soak {count - 1}"),
        ):  # fmt: skip
            url = f"/v1/scope/modules/{name}"
            data = self._module if method == "PUT" else None
            async with self._session.request(method, url, data=data, headers=headers) as response:
                if response.status not in (200, 204) and count:
                    self._side.lost.append(f"{method} {name}: {response.status}")
        weight = (self._weight * (1 + count % 3)).tolist()
        body = {"weight": weight, "layers": [self._middle], "threshold": 1e9}
        monitors = {
            "largest": body | {"aggregate": "max"},
            "recent": body | {"layers": [0], "aggregate": {"ema": 0.9}},
        }
        async with self._session.put(
            "/v1/scope/monitors", json={"monitors": monitors}, headers=headers
        ) as response:
            if response.status != 200:
                self._side.lost.append(f"monitors: {response.status}")
        self._side.seen["changes"] += 1

    async def at_rest(self) -> dict[str, int]:
        """The server's resources in use after all requests have ended."""
        for _ in range(100):
            async with self._session.get("/v1/scope") as response:
                load: dict[str, int] = (await response.json())["load"]
            if not (load["requests"] or load["pending"]):
                break
            await asyncio.sleep(0.2)
        return load


async def turn(side: Side, config: dict[str, Any], seconds: float, rate: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    side.latencies.append([])
    weights = np.array(list(KINDS.values())) / sum(KINDS.values())
    beginnings = np.random.default_rng(0).integers(5, config["vocab_size"], (4, BEGINNING))
    headers = {"Authorization": f"Bearer {API_KEY}"}
    timeout, connector = aiohttp.ClientTimeout(total=300), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        side.server.url,
        headers=headers,
        timeout=timeout,
        connector=connector,
        read_bufsize=1 << 24,
    ) as session:
        requests = Requests(side, session, config)
        await requests.change(2 * seed)
        tasks = []
        at = begun = time.perf_counter()
        while at - begun < seconds:
            at += rng.exponential(1 / rate)
            kind = str(rng.choice(list(KINDS), p=weights))
            prompt = rng.integers(5, config["vocab_size"], rng.integers(8, 64)).tolist()
            if rng.random() < 0.5:
                prompt = [*rng.choice(beginnings).tolist(), *prompt]
            generate = int(rng.integers(8, 33))
            await asyncio.sleep(max(0.0, at - time.perf_counter()))
            tasks.append(asyncio.ensure_future(requests.one(kind, prompt, generate)))
        await requests.change(2 * seed + 1)
        await asyncio.gather(*tasks)


async def watch(sides: list[Side], started: float) -> None:
    while True:
        for side in sides:
            side.memory.append((time.perf_counter() - started, side.server.memory()))
        await asyncio.sleep(SAMPLE_S)


async def soak(sides: list[Side], config: dict[str, Any], args: argparse.Namespace) -> None:
    for side in sides:  # warm up: compile, connect, allocate pools
        await turn(side, config, args.turn, args.rate, 0)
        side.latencies.clear()
        side.seen.clear()
    started = time.perf_counter()
    watcher = asyncio.ensure_future(watch(sides, started))
    number = 0
    while time.perf_counter() - started < 60 * args.minutes:
        number += 1
        # The order alternates, so that the caches of the machine favour no server.
        for side in sides if number % 2 else sides[::-1]:
            await turn(side, config, args.turn, args.rate, number)
        told(sides)
    watcher.cancel()


def quantiles(turns: list[list[float]]) -> tuple[float, float]:
    """Median and p99, milliseconds."""
    found = np.concatenate([np.asarray(t) for t in turns]) * 1000
    return float(np.quantile(found, 0.5)), float(np.quantile(found, 0.99))


def told(sides: list[Side]) -> None:
    text = []
    for side in sides:
        p50, p99 = quantiles(side.latencies)
        name = "with" if side.plugin else "without"
        text.append(
            f"{name:8} p50 {p50:6.1f} p99 {p99:6.1f} ms, {side.memory[-1][1] / 2**20:6.0f} MiB, "
            f"{sum(side.seen.values()):6,} answered, {len(side.lost)} lost"
        )
    print(f"{side.memory[-1][0] / 60:5.1f} min  " + "   ".join(text), flush=True)


def interval(sides: list[Side], q: float) -> tuple[float, float, float]:
    """A quantile with the plugin divided by the quantile without it, and the 95 % interval."""
    with_, without = ([np.asarray(t) for t in side.latencies] for side in sides)
    rng = np.random.default_rng(0)
    found = []
    for drawn in (np.arange(len(with_)), *rng.integers(0, len(with_), (500, len(with_)))):
        ratio = [np.quantile(np.concatenate([side[i] for i in drawn]), q)
                 for side in (with_, without)]  # fmt: skip
        found.append(ratio[0] / ratio[1])
    low, high = np.quantile(found[1:], [0.025, 0.975])
    return found[0], float(low), float(high)


def growth(side: Side) -> tuple[float, float]:
    """The mean bytes of memory in the second quarter of the time, and in the last quarter."""
    times, sizes = np.array(side.memory).T
    quarter = (times / times[-1] * 4).astype(int)
    return float(sizes[quarter == 1].mean()), float(sizes[quarter >= 3].mean())


async def leftovers(side: Side, config: dict[str, Any]) -> dict[str, int]:
    headers = {"Authorization": f"Bearer {API_KEY}"}
    async with aiohttp.ClientSession(side.server.url, headers=headers) as session:
        return await Requests(side, session, config).at_rest()


def report(sides: list[Side], left: dict[str, int]) -> tuple[dict[str, Any], bool]:
    """Figures as JSON, and True if all checks passed."""
    body: dict[str, Any] = {"leftovers": left}
    well = not any(left.values())
    for side in sides:
        name = "with" if side.plugin else "without"
        before, after = growth(side)
        p50, p99 = quantiles(side.latencies)
        body[name] = {
            "p50_ms": p50, "p99_ms": p99, "plain": sum(map(len, side.latencies)),
            "seen": dict(side.seen), "lost": side.lost[:20],
            "memory_mib": [before / 2**20, after / 2**20],
        }  # fmt: skip
        grown = (after - before) / before
        well = well and not side.lost and grown < MOST_GROWTH
        print(f"\n{name} the plugin: {dict(side.seen)}")
        print(f"  lost: {len(side.lost)} {side.lost[:3]}")
        print(f"  memory: {before / 2**20:.1f} -> {after / 2**20:.1f} MiB ({grown:+.2%})")
        print(f"  plain requests: p50 {p50:.1f} ms, p99 {p99:.1f} ms")
    for q in (0.5, 0.99):
        ratio, low, high = interval(sides, q)
        body[f"p{100 * q:.0f}_ratio"] = [ratio, low, high]
        print(f"p{100 * q:.0f}, with to without: {ratio:.3f} (95 %: {low:.3f} to {high:.3f})")
    print(f"left behind: {left}")
    return body, well


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--turn", type=float, default=30.0, help="seconds")
    parser.add_argument("--rate", type=float, default=8.0, help="requests a second")
    parser.add_argument("--shape", choices=SHAPES, help="random weights of this shape")
    parser.add_argument("--model", default=str(ROOT / "toyworld" / "model"))
    parser.add_argument("--options", type=json.loads, default=[], help="more of vllm serve, JSON")
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(args.model)
        options = ["--max-model-len", str(MODEL_LENGTH), "--block-size", str(BLOCK)]
        if args.shape:
            model = make_shape(args.shape, Path(folder))
            make_tokenizer(model)
            options += ["--load-format", "dummy"]
        options += ["--gpu-memory-utilization", "0.3", *args.options]
        config = json.loads((model / "config.json").read_text())
        logs = Path(os.environ.get("OUT", folder))
        results = Path(folder) / "results"
        results.mkdir()
        os.environ["VLLM_SCOPE_RESULTS_DIR"] = str(results)
        with (
            serving(model, options, logs / "with.log") as one,
            serving(model, options, logs / "without.log", plugin=False) as other,
        ):
            sides = [Side(one, True), Side(other, False)]
            asyncio.run(soak(sides, config, args))
            left = asyncio.run(leftovers(sides[0], config))
            left["files"] = len(list(results.rglob("*.safetensors")))
            body, well = report(sides, left)
    if args.out:
        args.out.write_text(json.dumps(body, indent=1))
    sys.exit(0 if well else 1)


if __name__ == "__main__":
    main()
