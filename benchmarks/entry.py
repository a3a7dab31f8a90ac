"""The host's time for a monitored or probed request, stage by stage, without a model.

    python -m benchmarks.entry                # a monitor of 8 layers, prompts of 864 tokens
    python -m benchmarks.entry --probes 64    # named probes on one layer, prompts of 128 tokens

The shape is 8B's: rows of 4096 numbers. The stages are vllm-scope's own functions and vLLM's
encoder and decoder of messages, with the engine's arguments. The parts of vLLM between these stages
are left out. All stages run on one thread, and each stage is run for all requests before the next
stage. A figure is the median in microseconds of one request, or of one step of several requests.

The drain thread and the front-end's receiver thread run at the same time as the steps, as in an
engine. After a step, this thread sleeps for `--step-ms`. The last table also has the CPU times of
other threads for one request: of the drain and receiver threads from the first step on, and of the
thread that counts verdicts. The drain thread's time leaves out heads, which a GPU would compute.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from benchmarks.shapes import make_shape

LAYERS = [4 * i + 2 for i in range(8)]
#: Numbers of prompt and generated tokens: with a monitor, and with named probes.
MONITORED, PROBED = (864, 128), (128, 256)
#: The layer of named probes.
MIDDLE = 16


class Road:
    """The front-end, EngineCore and the worker of an engine without a model, all in this process.

    Args:
        num_layers: number of layers of the monitor.
        num_probes: number of named probes of each request. If 0, requests have the monitor instead.
        most_rows: the largest number of rows of a step.
    """

    def __init__(
        self, folder: Path, num_layers: int, num_probes: int = 0, most_rows: int = 2048
    ) -> None:
        from vllm import EngineArgs
        from vllm.v1.engine import EngineCoreRequest
        from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

        from vllm_scope.core.admission import Admission
        from vllm_scope.core.news import Told
        from vllm_scope.core.score_index import ScoreIndex
        from vllm_scope.engine import monitors
        from vllm_scope.engine.core.entry import CoreScope
        from vllm_scope.engine.frontend.connection import Connection, connections
        from vllm_scope.request.packed import pack
        from vllm_scope.request.ticket import encode_arrays

        options: dict[str, Any] = {"skip_tokenizer_init": True, "load_format": "dummy"}
        made = EngineArgs(str(make_shape("8b", folder)), max_model_len=2048, **options)
        self.config = made.create_engine_config()
        self.core = CoreScope(self.config)
        self.sites, self.most_rows = self.core.sites, most_rows
        self.num_prompt, self.num_generated = PROBED if num_probes else MONITORED
        self._open_worker()
        self.processor = _thing()
        engine = self.engine = _thing(vllm_config=self.config, output_processor=self.processor)
        self.connection = Connection(self.sites, None, 1, 60.0, self.worker.limits, {}, {})
        connections.put(self.processor, self.connection)
        self.encoder, self.decoder = MsgpackEncoder(), MsgpackDecoder(EngineCoreRequest)
        self.admission: Any = Admission(self.core.most, 0)
        self.told, self.index = Told(self.core.widths is not None), ScoreIndex(16, 256 << 20)
        self.held: list[bytes] = []
        self.asked: dict[str, Any] | None = None
        if num_probes:
            self._name_probes(num_probes)
            return
        weight = np.random.default_rng(0).normal(size=(num_layers, self.sites.hidden_size))
        body = {
            "weight": (weight / 4096).tolist(), "layers": LAYERS[:num_layers],
            "aggregate": "max", "threshold": 1e6,
        }  # fmt: skip
        monitors.set_monitors(engine, {"eight": body}, self.connection)
        _, arrays = pack(tuple(one.probe for one in monitors.monitors_of(self.config)))
        self.held = self.core.registry.hold("", encode_arrays(arrays.values()))

    def _name_probes(self, num_probes: int) -> None:
        """Register the probes' weights. Each request then has all probes."""
        from vllm_scope import Probe, scope
        from vllm_scope.vectors import SteeringModule

        rng = np.random.default_rng(0)
        for i in range(num_probes):
            vector = rng.normal(size=self.sites.hidden_size).astype(np.float32) / 4096
            module = SteeringModule({("resid_post", MIDDLE): vector})
            self.core.registry.register_module(f"probe-{i}", module)
        known: Any = self.core.registry.modules()
        self.connection.learn_modules(known)
        probes = [Probe(f"probe-{i}", layer=MIDDLE, name=f"p{i}") for i in range(num_probes)]
        self.asked = scope(*probes)

    def _open_worker(self) -> None:
        """Open a worker, in the state in which `ScopeWorker.load` leaves it, with room for steps of
        `most_rows` rows."""
        import torch

        from vllm_scope.config import ScopeConfig
        from vllm_scope.engine.worker.delivery import WorkerDelivery
        from vllm_scope.engine.worker.sizes import Sizes
        from vllm_scope.engine.worker.worker import ScopeWorker
        from vllm_scope.graph.tap import op
        from vllm_scope.graph.tap.program_tables import capacity
        from vllm_scope.graph.tap.tables import Tables
        from vllm_scope.program.layout import Widths
        from vllm_scope.results.inbox import inbox
        from vllm_scope.worker.arena import Arena

        sites, cpu, config = self.sites, torch.device("cpu"), ScopeConfig()
        widths = Widths(tuple(2 * size for size in sites.row_sizes))
        sizes = Sizes(widths, sites.boundaries, self.most_rows, 0, False)
        worker = ScopeWorker(_thing(vllm_config=self.config), config)
        worker.sites, worker.here, worker.drains = sites, sites.boundaries, True
        worker.stage, worker.num_stages = 0, 1
        worker._tables = Tables(
            sites.boundaries, self.most_rows, sites.hidden_size, widths, cpu, config.vectors_mib
        )
        num_slots = sizes.arena_slots(config)
        worker._arena = Arena(num_slots, torch.bfloat16, cpu)
        most = capacity(sites.vector_size, config.vectors_mib)
        worker.limits = sizes.limits(num_slots, most, False, 0)
        worker._delivery = WorkerDelivery.open(
            config, worker._arena, sizes, sites, sites.boundaries, (0, 1), "8b", False, 1
        )
        worker._delivery.memory.connect(inbox().address)
        op.register()
        worker._begin_steps()
        self.worker = worker

    # The stages of one request

    def params(self) -> Any:
        from vllm import SamplingParams

        return SamplingParams(
            temperature=0, max_tokens=self.num_generated, ignore_eos=True, extra_args=self.asked
        )

    def translate(self, params: Any) -> Any:
        from vllm_scope.engine.frontend import requests, translators
        from vllm_scope.engine.params import dedicated

        applied = translators.applying(params, self.config)
        params = dedicated(translators.translated(params, applied, self.sites, {}))
        assert not requests._unknown_modules(self.engine, params)
        return params.clone()

    def request(self, i: int, params: Any) -> Any:
        from vllm.v1.engine import EngineCoreRequest

        ids = np.random.default_rng(i).integers(5, 1000, self.num_prompt).tolist()
        return EngineCoreRequest(str(i), ids, None, params, None, 0.0, None, None, None)

    def prepare(self, request: Any) -> tuple[Any, Any]:
        from vllm_scope.engine.frontend.prepared import prepare

        return request, prepare(self.connection, request)

    def open(self, given: tuple[Any, Any]) -> tuple[Any, Any, Any]:
        from vllm_scope.engine.frontend import requests, translators

        request, prepared = given
        decorators = translators.decorators_of(request.sampling_params)
        pending = requests._open(self.connection, prepared, request, None, 0, self.held)
        return request, pending, decorators

    def encode(self, given: tuple[Any, Any, Any]) -> list[bytes]:
        return [bytes(each) for each in self.encoder.encode(given[0])]

    def decode(self, message: list[bytes]) -> Any:
        return self.decoder.decode(message)

    def enter(self, request: Any) -> tuple[Any, Any]:
        from vllm_scope.engine.params import ticket_of, without_ticket

        found = self.core.enter(request, ticket_of(request.sampling_params))
        request.sampling_params = without_ticket(request.sampling_params)
        return request, found

    def admit(self, given: tuple[Any, Any]) -> tuple[Any, Any]:
        from vllm_scope.core.news import Entrant, StepNews

        request, found = given
        assert self.admission.enter(request, found.held, found.logged.size, found.reserve)
        news = StepNews()
        number = self.told.number_of(found.asked, news)
        news.entrants[request.request_id] = Entrant(
            found.recipient, number, found.columns, found.unchecked, found.logged,
            found.asked.scores_alone or b"", (), 16,
        )  # fmt: skip
        if self.core.widths is not None and found.held is not None:
            news.held[request.request_id] = found.held
        return request, news

    def look_up(self, given: tuple[Any, Any]) -> None:
        """Find the prompt's blocks whose scores the workers hold. Record the prompt's blocks."""
        name, (_, found) = given[0].request_id, given
        hashes = [bytes([i]) * 32 for i in range(self.num_prompt // 16)]
        probes, token_bytes = found.asked.scores_alone, found.asked.score_bytes
        self.index.begin(name, self.index.num_known(hashes, probes))
        self.index.fill(name, hashes, self.num_prompt, probes, token_bytes)

    def add(self, given: tuple[Any, Any]) -> None:
        request, news = given
        sent = SimpleNamespace(
            req_id=request.request_id, prompt_token_ids=request.prompt_token_ids,
            sampling_params=request.sampling_params,
        )  # fmt: skip
        self.worker.add_requests([sent], news)

    # Steps

    def step(self, names: list[str], first: int, count: int) -> tuple[float, float]:
        """Seconds of CPU of this thread, before the forward and after it."""
        import torch

        from vllm_scope.batch.labels import StepBatch

        starts = np.arange(len(names) + 1, dtype=np.int64) * count
        batch = StepBatch(names, starts, np.full(len(names), first, np.int64), False)
        positions = torch.zeros(int(starts[-1]), dtype=torch.int64)
        steps = self.worker.steps
        assert steps is not None
        started = time.thread_time()
        steps.begin(batch, positions)
        between = time.thread_time()
        for tap in range(len(self.sites.boundaries)):  # as the taps of a graph do
            if steps.begin_tap(tap) is not None:
                steps.end_tap(tap)
        steps.end()
        return between - started, time.thread_time() - between

    # The end of one request

    def finish(self, name: str) -> None:
        self.worker.finish_requests([name])
        self.admission.release(name)
        self.index.finish_request(name, None)

    def settle(self, given: tuple[Any, Any, Any]) -> None:
        request, pending, decorators = given
        output = SimpleNamespace(request_id=request.request_id)
        completion: Any = SimpleNamespace(index=0, finish_reason="length")
        completion.scope = pending.snapshot([7] * self.num_generated, "length")
        for decorate in decorators:
            decorate(output, completion)


def whole(given: tuple[Any, Any, Any]) -> None:
    """Fail if the result is not complete. Callers of an engine can do the same check."""
    result = given[1].snapshot([7] * given[0].sampling_params.max_tokens, "length")
    assert result.status == "complete", result


def _thing(**fields: Any) -> Any:
    """A substitute for an object of vLLM. The object can have weak references."""
    return type("Thing", (), fields)()


def timed(name: str, call: Callable[..., Any], given: Iterable[Any]) -> list[Any]:
    """Call `call` for each item. Print the median time in microseconds, without the first call."""
    found, times = [], []
    for one in given:
        started = time.perf_counter()
        found.append(call(one))
        times.append(time.perf_counter() - started)
    first, rest = 1e6 * times[0], 1e6 * statistics.median(times[1:])
    print(f"{name:44} {rest:9.1f}   (the first: {first:.0f})", flush=True)
    return found


def cpu_of(name: str) -> float:
    """Seconds of CPU of the thread with this name."""
    (thread,) = (one for one in threading.enumerate() if one.name == name)
    text = Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text()
    return int(text.split()[0]) / 1e9


class HeadTimes:
    """Seconds of CPU in which the worker's heads work on rows, on any thread."""

    def __init__(self, worker: Any) -> None:
        self.total = 0.0
        packer = worker._delivery.drain.filler.packer
        original = packer._packed

        def packed(*args: Any) -> Any:
            started = time.thread_time()
            found = original(*args)
            self.total += time.thread_time() - started
            return found

        packer._packed = packed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=128)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--probes", type=int, default=0)
    parser.add_argument("--rows", type=int, default=2048, help="of a step of prompts")
    parser.add_argument("--step-ms", type=float, default=8.0)
    args = parser.parse_args()

    from vllm_scope.control import backlog
    from vllm_scope.engine import judge

    with tempfile.TemporaryDirectory() as folder:
        road = Road(Path(folder), args.layers, args.probes, args.rows)
        heads = HeadTimes(road.worker)
        given = range(args.requests)
        print(f"{'microseconds of a request':44}")
        asking = (road.params() for _ in given)
        params = timed("front-end: monitors added, params copied", road.translate, asking)
        requests = [road.request(i, one) for i, one in enumerate(params)]
        prepared = timed("front-end: checked", road.prepare, requests)
        opened = timed("front-end: buffer and ticket", road.open, prepared)
        messages = timed("message: encoded", road.encode, opened)
        print(f"{'  its bytes':44} {sum(map(len, messages[-1])):9}")
        came = timed("message: decoded", road.decode, messages)
        entered = timed("EngineCore: entered", road.enter, came)
        timed("EngineCore: scores of blocks looked up", road.look_up, entered)
        admitted = timed("EngineCore: admitted, news", road.admit, entered)
        timed("worker: added", road.add, admitted)
        names = [str(i) for i in given]
        begun = {name: cpu_of(name) for name in ("vllm-scope-drain", "vllm-scope-inbox")}

        def step(names: list[str], first: int, count: int) -> tuple[float, float]:
            found = road.step(names, first, count)
            time.sleep(args.step_ms / 1e3)
            return found

        print("microseconds of a step")
        at_once = max(1, args.rows // road.num_prompt)
        some = [names[i : i + at_once] for i in range(0, len(names), at_once)]
        prompts = [step(each, 0, road.num_prompt) for each in some]
        tokens = [step(names, road.num_prompt + i, 1) for i in range(road.num_generated - 1)]
        for called, times in ((f"{at_once} prompts", prompts), (f"{len(names)} tokens", tokens)):
            for part, each in zip(("before", "after"), zip(*times, strict=True), strict=True):
                middle = 1e6 * statistics.median(each[min(2, len(each) - 1) :])
                print(f"{f'worker: {called}, {part} the forward':44} {middle:9.1f}")
        print("microseconds of a request")
        started = time.perf_counter()
        timed("worker and EngineCore: ended", road.finish, names)
        for _, pending, _ in opened:
            pending.done.result(60)
        waited = time.perf_counter() - started
        timed("front-end: result", road.settle, opened)
        timed("the caller: asks whether it is complete", whole, opened)
        while judge.backlog.waiting:
            time.sleep(0.01)
        judge.backlog.work_off()  # counts the last verdict too
        in_heads = 1e6 * heads.total / len(names)
        for called, name, less in (
            ("drain thread, all of its rows", "vllm-scope-drain", in_heads),
            ("receiver thread, all of its rows", "vllm-scope-inbox", 0.0),
            *([] if args.probes else [("verdicts, on a thread", backlog.NAME, 0.0)]),
        ):
            spent = 1e6 * (cpu_of(name) - begun.get(name, 0.0)) / len(names)
            print(f"{called:44} {spent - less:9.1f}")
        print(f"{'milliseconds from the first end to the last':44} {1e3 * waited:9.1f}")
        road.worker.close()


if __name__ == "__main__":
    main()
