"""Tokens per second over HTTP: the cost of a scope for the clients of one server, in turns.

The same server serves plain requests and other kinds, one kind after another. If the machine's
speed changes, the change affects all kinds. The clients are in several processes (`--processes`). A
client needs as much CPU to receive an answer of 3 MB as the server needs to send the answer.
Clients in one process could therefore be slower than the server. The first turn warms up. In this
turn the clients check that no row is missing. In later turns they parse fewer answers, because with
few cores the clients' work slows the server.

    python -m benchmarks.http                    # toy world on a CPU
    python -m benchmarks.http --gpu --shape 8b   # random weights on a GPU
    python -m benchmarks.http --gpu --shape 8b --options '["--api-server-count", "4"]'
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import statistics
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from benchmarks.server import API_KEY, ROOT, Server, serving
from benchmarks.shapes import SHAPES, make_shape, make_tokenizer
from benchmarks.turns import order, ratio_of
from vllm_scope import Probe, Read, scope
from vllm_scope.request.media import BINARY


@dataclass(frozen=True)
class Load:
    """`clients` clients send `requests` requests of `prompt` tokens, with `generate` new tokens."""

    name: str
    clients: int
    requests: int
    prompt: int
    generate: int


CPU_WORK = [Load("1 client", 1, 4, 16, 64), Load("16 clients", 16, 64, 16, 64)]
CPU_WORK += [Load("prefill, 16 clients", 16, 48, 200, 1)]
GPU_WORK = [Load("1 client", 1, 4, 128, 256), Load("64 clients", 64, 256, 128, 256)]
GPU_WORK += [Load("256 clients", 256, 768, 128, 256), Load("prefill, 64 clients", 64, 256, 1024, 1)]

#: kind -> (the plain kind to compare with, whether requests stream, read and have a probe, more
#: fields of vllm_xargs). If a kind's name contains "binary", its clients accept binary answers.
KINDS: dict[str, tuple[str, bool, bool, bool, dict[str, str]]] = {
    "plain": ("plain", False, False, False, {}),
    "1 layer": ("plain", False, True, False, {}),
    "1 layer, binary": ("plain", False, True, False, {}),
    "1 layer as a file": ("plain", False, True, False, {"scope_tensors": "handle"}),
    "1 probe": ("plain", False, False, True, {}),
    "plain, streamed": ("plain, streamed", True, False, False, {}),
    "1 probe, streamed": ("plain, streamed", True, False, True, {}),
    "1 layer, streamed": ("plain, streamed", True, True, False, {"scope_stream": "rows"}),
    "1 layer, binary, streamed": (
        "plain, streamed",
        True,
        True,
        False,
        {"scope_stream": "rows"},
    ),
}


class Clients:
    """The clients of one server, in `processes` processes."""

    def __init__(self, server: Server, config: dict[str, Any], processes: int) -> None:
        self._server, self._config = server, config
        self._seeds = itertools.count()
        self._processes = ProcessPoolExecutor(processes, get_context("spawn"))
        self._count = processes

    def close(self) -> None:
        self._processes.shutdown()

    def run(self, kind: str, load: Load, check: bool) -> dict[str, float]:
        """Tokens per second, MB of answers per second, and CPU seconds of the server."""
        spec, vocab = self.spec(kind), self._config["vocab_size"]
        before, started = self._server.cpu(), time.perf_counter()
        shares = [
            self._processes.submit(
                run_clients, self._server.url, kind, spec, share, vocab, next(self._seeds), check
            )
            for share in shares_of(load, self._count)
        ]
        size = sum(share.result() for share in shares)
        seconds = time.perf_counter() - started
        tokens = load.requests * (load.prompt if load.generate == 1 else load.generate)
        after = self._server.cpu()
        cpu = {f"{name}_cpu_s": after[name] - before[name] for name in after}
        return {"tokens_per_s": tokens / seconds, "mb_per_s": size / seconds / 1e6} | cpu

    def spec(self, kind: str) -> dict[str, Any]:
        _, _, reads, probes, more = KINDS[kind]
        middle = self._config["num_hidden_layers"] // 2
        actions: list[Any] = []
        if reads:
            actions.append(Read("resid_post", layers=[middle]))
        if probes:
            weight = np.linspace(-1, 1, self._config["hidden_size"], dtype=np.float32)
            actions.append(Probe(weight, layer=middle, name="ramp"))
        return {"vllm_xargs": scope(*actions) | more} if actions else {}


def shares_of(load: Load, count: int) -> list[Load]:
    """Split a load among at most `count` processes, so that each process has a client."""
    count = min(count, load.clients)
    return [
        replace(
            load,
            clients=len(range(i, load.clients, count)),
            requests=len(range(i, load.requests, count)),
        )
        for i in range(count)
    ]


def run_clients(
    url: str, kind: str, spec: dict[str, Any], load: Load, vocab: int, seed: int, check: bool
) -> int:
    """Send a load's requests to the server at `url`. Returns the bytes of the answers."""
    body = {"model": "model", "max_tokens": load.generate, "temperature": 0}
    body |= {"ignore_eos": True, "stream": KINDS[kind][1]} | spec
    # Prompts differ each time, so that no request hits the prefix cache.
    drawn = np.random.default_rng(seed).integers(5, vocab, (load.requests, load.prompt))
    prompts = iter(drawn.tolist())
    accept = BINARY if "binary" in kind else "*/*"

    async def run() -> int:
        headers = {"Authorization": f"Bearer {API_KEY}"}
        connector = aiohttp.TCPConnector(limit=load.clients)
        timeout = aiohttp.ClientTimeout(total=600)
        async with aiohttp.ClientSession(
            url, headers=headers, connector=connector, timeout=timeout
        ) as session:

            async def client() -> int:
                sizes = [
                    await ask(session, body | {"prompt": prompt}, check, accept)
                    for prompt in prompts
                ]
                return sum(sizes)

            return sum(await asyncio.gather(*(client() for _ in range(load.clients))))

    return asyncio.run(run())


async def ask(session: Any, body: dict[str, Any], check: bool, accept: str) -> int:
    """Send a request, and return the number of bytes in the answer."""
    headers = {"Accept": accept}
    async with session.post("/v1/completions", json=body, headers=headers) as response:
        answer = await response.read()
        assert response.status == 200, answer[:500]
        assert (response.content_type == BINARY) is (accept == BINARY)
    size = len(answer)
    if "vllm_xargs" not in body:
        return size
    if accept == BINARY:  # the JSON is last in each file
        end = answer.rindex(b'"finish_reason":"length"')
        answer = answer[answer.rindex(b'{"id":', 0, end) :].partition(b"[DONE]")[0]
        found = json.JSONDecoder().raw_decode(answer.decode("utf-8", "replace"))[0]
        found = found["choices"][0]["scope"]
        assert found["status"] == "complete", found
        assert found["expected"] == found["delivered"] > 0, found
        assert found["result"] is None, found
        return size
    if body["stream"]:
        answer = answer[answer.rindex(b"data: {") + 6 : answer.rindex(b"data: [DONE]")]
    elif not check and len(answer) < 200_000 and b'"result":null' in answer:
        return size
    found = json.loads(answer)["choices"][0]["scope"]
    assert found["status"] == "complete", found
    assert found["expected"] == found["delivered"] > 0, found
    if found["result"] is not None:
        url = found["result"]["url"] + "?delete=true"
        async with session.get(url) as response:
            assert response.status == 200
            file = await response.read()
        assert len(file) == found["result"]["num_bytes"]
        size += len(file)
    return size


def measure(
    clients: Clients, work: list[Load], kinds: list[str], turns: int
) -> list[dict[str, Any]]:
    rows = []
    for load in work:
        found: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
        for turn in range(turns + 1):
            for kind in order(kinds, turn):
                answer = clients.run(kind, load, check=turn == 0)
                if turn:  # the first turn warms up
                    found[kind].append(answer)
        for kind, answers in found.items():
            twins = found[KINDS[kind][0]]
            ratio = ratio_of(*([a["tokens_per_s"] for a in some] for some in (answers, twins)))
            row: dict[str, Any] = {"work": load.name, "kind": kind}
            row |= {name: statistics.median(a[name] for a in answers) for name in answers[0]}
            row |= {"ratio": ratio.median, "low": ratio.low, "high": ratio.high}
            cpu = [name for name in row if name.endswith("_cpu_s")]
            for name in cpu:  # if the worker is in EngineCore's process, its own time is 0 s
                row[f"{name}_ratio"] = row[name] / (statistics.median(t[name] for t in twins) or 1)
            rows.append(row)
            told = " ".join(f"{row[n]:6.2f} {row[f'{n}_ratio']:5.2f}" for n in cpu)
            print(
                f"{load.name:20} {kind:18} {row['tokens_per_s']:10,.0f} {ratio} "
                f"{row['mb_per_s']:8.1f} {told}", flush=True,
            )  # fmt: skip
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=SHAPES, help="random weights of this shape")
    parser.add_argument("--model", default=str(ROOT / "toyworld" / "model"))
    parser.add_argument("--gpu", action="store_true", help="the GPU's workloads")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--only", nargs="*", help="only workloads of these names")
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=list(KINDS))
    parser.add_argument("--processes", type=int, default=max(1, min(4, (os.cpu_count() or 1) // 4)))
    parser.add_argument("--options", type=json.loads, default=[], help="more of vllm serve, JSON")
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(args.model)
        options = ["--no-enable-prefix-caching", "--max-model-len", "2048" if args.gpu else "512"]
        if args.shape:
            model = make_shape(args.shape, Path(folder))
            make_tokenizer(model)
            options += ["--load-format", "dummy"]
        if not args.gpu:
            options += ["--gpu-memory-utilization", "0.3"]
        config = json.loads((model / "config.json").read_text())
        work = GPU_WORK if args.gpu else CPU_WORK
        work = [w for w in work if not args.only or w.name in args.only]
        kinds = [k for k in KINDS if k in args.kinds or k in {KINDS[x][0] for x in args.kinds}]
        log = Path(os.environ.get("OUT", folder)) / "server.log"
        with serving(model, [*options, *args.options], log) as server:
            print(
                f"{'':20} {'':18} {'tokens/s':>10} {'ratio':>6} {'':16} {'MB/s':>8} "
                + " ".join(f"{f'{n} CPU s':>12}" for n in ("api", "core", "worker", "all"))
            )
            with closing(Clients(server, config, args.processes)) as clients:
                rows = measure(clients, work, kinds, args.turns)
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
