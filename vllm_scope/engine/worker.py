"""A worker's life with taps: load, canary, steps, requests, close.

Owns:  ScopeWorker, one per vLLM worker, and the seams on the worker.
Runs:  in every worker process, on its main thread.

Promise: with nothing asked, a step costs a few attribute tests; it uploads nothing
and looks at no request. A request whose reads fail is answered with the reason;
its neighbours and the engine go on.
"""

from __future__ import annotations

import logging
import os
from dataclasses import asdict
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from vllm_scope.anatomy.layers import Anatomy
from vllm_scope.anatomy.tapped import install_taps
from vllm_scope.arena import Arena, Region
from vllm_scope.config import ScopeConfig
from vllm_scope.drain import Drain
from vllm_scope.engine import runners
from vllm_scope.engine.core import handle_of
from vllm_scope.engine.model import anatomy_of, hidden_size_of, num_layers_of
from vllm_scope.engine.plugin import config_of, wrap_method
from vllm_scope.errors import CompatError, ConfigError, ScopeError
from vllm_scope.host_ring import HostRing
from vllm_scope.plan import Planner, StepBatch, StepPlan
from vllm_scope.program import Program, RequestProgram
from vllm_scope.road import Address
from vllm_scope.sinks.memory import MemorySink
from vllm_scope.spec import Sites, Spec
from vllm_scope.tap import op
from vllm_scope.tap.tables import Tables

logger = logging.getLogger("vllm.vllm_scope")

#: What an arena holds where no CUDA graph sets its size.
HOST_ARENA_BYTES = 64 << 20
#: Steps whose rows a graph-sized arena holds at once.
STEPS_IN_ARENA = 3
#: What the shared host memory for rows is kept to, where the arena allows.
MAX_HOST_BYTES = 1 << 30
#: Written before the canary runs; no model computes a row of it. Exact in bf16 and fp16.
POISON = -1280.0


class ScopeWorker:
    """The taps of one worker: what they are attached to and what they do next.

    Verbs: `load`, `check_canary`, `begin_step`, `end_step`, `close`; the scheduler's
    news come in through `add_requests` and `finish_requests`.
    """

    def __init__(self, worker: Any, config: ScopeConfig) -> None:
        self._worker = worker
        self._vllm_config = worker.vllm_config
        self.config = config
        self.reason: str | None = None
        self.runner_version = "unknown"
        self._planner: Planner | None = None
        self._drain: Drain | None = None
        self._step: StepPlan | None = None
        self._region: Region | None = None
        self._positions: Tensor | None = None
        #: A forward with reads is running (tap.op.StepRoute).
        self.active = False
        self.num_steps = 0
        self.num_steps_planned = 0

    # Load

    def load(self) -> None:
        """Install taps on the loaded model, or remember why not."""
        from vllm.distributed.parallel_state import get_pp_group, get_tp_group

        self.stage = get_pp_group().rank_in_group
        self.num_stages = get_pp_group().world_size
        self.drains = get_tp_group().rank_in_group == 0
        num_layers = num_layers_of(self._vllm_config)
        dtype = self._vllm_config.model_config.dtype
        self.sites = Sites(
            num_layers,
            hidden_size_of(self._vllm_config),
            str(dtype).removeprefix("torch."),
            self.config.boundaries(num_layers),
        )
        runner = self._worker.model_runner
        try:
            anatomy = anatomy_of(runner.get_model(), self._vllm_config)
            self.runner_version = runners.attach(
                runner, self.reading, self.begin_step, before_dummy=self.clear
            )
        except CompatError as error:
            self.reason = str(error)
            logger.warning("vllm-scope: no taps on this model: %s.", error)
            return
        self._install(anatomy, dtype)

    def _install(self, anatomy: Anatomy, dtype: torch.dtype) -> None:
        device = self._worker.device
        scheduler = self._vllm_config.scheduler_config
        max_rows = int(scheduler.max_num_batched_tokens)
        sizes = self._vllm_config.compilation_config.cudagraph_capture_sizes or [0]
        # A captured graph may be padded past the scheduler's own limit.
        self._tables = Tables(self.sites.boundaries, max(max_rows, *sizes), device)
        self._arena = Arena(
            self._num_slots(max_rows, max(sizes), device),
            self.sites.hidden_size, dtype, device,
        )  # fmt: skip
        op.register()
        op.connect(self._tables.numbers, self)
        tap_of = {boundary: tap for tap, boundary in enumerate(self.sites.boundaries)}
        if device.type == "cuda":
            self._compile_kernel(dtype, device)
        self.here = install_taps(anatomy, tap_of, self._arena.rows, self._tables)
        self._planner = Planner(self._tables)
        if self.drains:
            ring = HostRing(
                self._host_slots(), self.sites.hidden_size, dtype, device.type == "cuda"
            )
            self._sink = MemorySink(self.stage, ring, self.config.road)
            self._drain = Drain(self._arena, ring, self._sink)
        logger.info(
            "vllm-scope: %d taps on %s (%s), runner %s, arena %.1f MiB.",
            len(self.here), anatomy.path, anatomy.convention.value, self.runner_version,
            self._arena.num_bytes / 2**20,
        )  # fmt: skip

    def _compile_kernel(self, dtype: torch.dtype, device: torch.device) -> None:
        """Load the kernel now: inside a graph capture it could not be."""
        from vllm_scope.tap.kernel import tap_rows

        row = torch.zeros((1, self.sites.hidden_size), dtype=dtype, device=device)
        tables = self._tables
        for residual in (None, row):
            tap_rows(
                row, residual, self._arena.rows, tables.tokens,
                tables.programs, tables.ops, tables.numbers[0], 0, 1,
            )  # fmt: skip

    def _num_slots(self, max_rows: int, graph_rows: int, device: torch.device) -> int:
        num_taps = max(len(self.sites.boundaries), 1)
        if not self.drains:
            return num_taps  # the canary's
        row_bytes = self.sites.hidden_size * torch.finfo(getattr(torch, self.sites.dtype)).bits // 8
        # A larger step is drained tap by tap, so one tap of the largest must fit; a
        # captured graph cannot be, so it must fit whole.
        least = max(max_rows, graph_rows * num_taps if device.type == "cuda" else 0)
        if self.config.arena_mib is not None:
            slots = int(self.config.arena_mib * 2**20) // row_bytes
            if slots < least:
                raise ConfigError(
                    f"additional_config['scope'].arena_mib is {self.config.arena_mib:g}; with "
                    f"{num_taps} taps and steps of {max_rows} tokens at least "
                    f"{least * row_bytes / 2**20:.1f} are needed. Tap fewer layers, or raise it."
                )
            return slots
        if device.type == "cuda":
            return max(STEPS_IN_ARENA * graph_rows * num_taps, 2 * max_rows)
        return max(2 * max_rows, min(max_rows * num_taps, HOST_ARENA_BYTES // row_bytes))

    def _host_slots(self) -> int:
        """As the arena, twice, so that a front-end may lag behind; within bounds."""
        row_bytes = self._arena.num_bytes // self._arena.num_slots
        return max(
            self._arena.num_slots, min(2 * self._arena.num_slots, MAX_HOST_BYTES // row_bytes)
        )

    def check_canary(self) -> None:
        """Read one row at every tap of a dummy forward.

        A compiled graph from a cache that was made without taps computes the right
        tokens and reads nothing, silently. So it is tried before serving.

        Raises:
            CompatError: some tap wrote nothing; the engine does not start.
        """
        from vllm.config import set_current_vllm_config

        if self._planner is None or not self.here:
            return
        program = Program(self.here)
        self._tables.begin_step()
        region = self._arena.acquire(program.num_reads)
        self._arena.view(region).fill_(POISON)

        def plan_canary() -> None:
            self._tables.load_step(
                np.zeros(1, np.int64),
                np.array([self._tables.program_id(program)], np.int32),
                np.array([region.start], np.int64),
            )

        self.active = True
        try:
            with set_current_vllm_config(self._vllm_config):
                runners.dummy_forward(self._worker.model_runner, self.runner_version, plan_canary)
            rows = self._arena.view(region).float().cpu()
        finally:
            self.active = False
            self._tables.clear_step()
            self._arena.give_back(region)
        silent = [b for b, row in zip(self.here, rows, strict=True) if bool((row == POISON).all())]
        if silent:
            raise CompatError(
                f"{len(silent)} of {len(self.here)} taps wrote nothing: the compiled graph has "
                "no taps. Remove vLLM's compile cache (VLLM_CACHE_ROOT) and start again."
            )

    # Requests

    def reading(self) -> bool:
        return bool(self._planner)

    def add_requests(self, new_requests: list[Any]) -> None:
        for request in new_requests:
            handle = handle_of(request.sampling_params)
            if handle is not None:
                self._add_request(request, int(handle["key"]), str(handle["frontend"]))

    def _add_request(self, request: Any, key: int, frontend: str) -> None:
        # V2 sends a preempted request anew; what it read so far stays valid.
        if self._planner is None or self._drain is None or request.req_id in self._planner:
            return
        try:
            self._sink.add_request(key, frontend)
            spec = Spec.from_json(request.sampling_params.extra_args["scope"])
            prompt_ids = np.asarray(request.prompt_token_ids, np.int64)
            program = RequestProgram.compile(
                spec.resolve(self.sites), self.sites, frozenset(self.here),
                len(prompt_ids), prompt_ids,
            )  # fmt: skip
            self._planner.add_request(request.req_id, key, program)
        except ScopeError as error:
            logger.warning("vllm-scope: request %s reads nothing: %s", request.req_id, error)
            self._drain.finish_request(key, str(error))

    def finish_requests(self, req_ids: Any) -> None:
        if self._planner is None or self._drain is None or not len(self._planner):
            return
        for req_id in req_ids:
            key = self._planner.finish_request(req_id)
            if key is not None:
                self._drain.finish_request(key)

    # Steps

    def begin_step(self, batch: StepBatch, positions: Tensor) -> None:
        """Plan the coming forward and load the tables.

        Args:
            batch: what it computes.
            positions: [num_rows], device: the true positions.
        """
        assert self._planner is not None
        assert self._drain is not None
        plan, failures = self._planner.begin_step(batch)
        for req_id, error in failures:
            key = self._planner.finish_request(req_id)
            if key is not None:
                self._drain.finish_request(key, str(error))
        if plan is None:
            self._tables.clear_step()
            return
        self.num_steps_planned += 1
        labels = plan.labels
        if plan.num_slots <= self._arena.num_slots:
            self._region = self._arena.acquire(plan.num_slots)
            slots = self._region.start + plan.offsets
        else:
            # Drained tap by tap: a token's slot is its place in the plan.
            self._region = None
            slots = np.arange(len(labels.rows), dtype=np.int64)
        self._tables.load_step(labels.rows, plan.program_ids, slots)
        self._step = plan
        self._positions = positions if plan.optimistic else None
        self.active = True

    def begin_tap(self, tap: int) -> tuple[int, int]:
        if self._step is None or self._region is not None:
            return 0, 1
        self._tap_region = self._arena.acquire(len(self._step.labels.rows))
        return self._tap_region.start, 0

    def end_tap(self, tap: int) -> None:
        if self._step is None or self._region is not None:
            return
        assert self._drain is not None
        self._drain.submit(
            self._tap_region, self._step.labels, self.sites.boundaries[tap], self._positions
        )

    def clear(self) -> None:
        """Before a forward that nobody plans: what the last one was told must go."""
        if self._planner is not None:
            self._tables.clear_step()

    def end_step(self) -> None:
        """The forward was enqueued: send its rows on their way."""
        self.num_steps += 1
        if not self.active:
            return
        self.active = False
        plan, self._step = self._step, None
        if plan is not None and self._region is not None:
            assert self._drain is not None
            self._drain.submit(self._region, plan.labels, None, self._positions)

    def close(self) -> None:
        if self._planner is not None:
            op.disconnect(self._tables.numbers)
            if self._drain is not None:
                self._drain.close()

    # Remote calls (`collective_rpc` finds them on the worker)

    def connect(self, address: dict[str, Any]) -> dict[str, Any]:
        """Learn of a front-end; answer what can be read here, and by which road.

        Called a second time, with an address on TCP, where some worker answered
        `needs_tcp`.
        """
        body = self.describe() | {"road": None, "needs_tcp": False}
        if self._drain is not None:
            try:
                body["road"] = self._sink.connect(msgspec.convert(address, Address))
                body["needs_tcp"] = body["road"] is None
            except ScopeError as error:
                body["reason"] = str(error)
        return body

    def describe(self) -> dict[str, Any]:
        body = {
            "reason": self.reason,
            "runner": self.runner_version,
            "stage": self.stage,
            "num_stages": self.num_stages,
            "drains": self.drains,
            "sites": {**asdict(self.sites), "boundaries": list(self.sites.boundaries)},
            "taps_here": [],
            "arena_mib": 0.0,
        }
        if self._planner is not None:
            body["taps_here"] = list(self.here)
            body["arena_mib"] = self._arena.num_bytes / 2**20
        return body

    def counters(self) -> dict[str, Any]:
        """Work done so far, for tests and metrics."""
        planner = self._planner
        return {
            "pid": os.getpid(),
            "steps": self.num_steps,
            "steps_planned": self.num_steps_planned,
            "requests_planned": planner.num_requests_planned if planner is not None else 0,
            "uploads": self._tables.num_uploads if planner is not None else 0,
            "requests": len(planner) if planner is not None else 0,
            "requests_routed": self._sink.num_requests if self._drain is not None else 0,
            "roads": self._sink.roads if self._drain is not None else [],
        }


def _attach(worker: Any, config: ScopeConfig) -> None:
    """Wrap one worker instance. Its class stays free for `worker_cls`."""
    scope = ScopeWorker(worker, config)
    load_model = worker.load_model
    warm_up, shutdown = worker.compile_or_warm_up_model, worker.shutdown

    def load(*args: Any, **kwargs: Any) -> Any:
        out = load_model(*args, **kwargs)
        scope.load()
        _attach_steps(worker.model_runner, scope)
        return out

    def warm(*args: Any, **kwargs: Any) -> Any:
        out = warm_up(*args, **kwargs)
        scope.check_canary()
        return out

    def close(*args: Any, **kwargs: Any) -> Any:
        scope.close()
        return shutdown(*args, **kwargs)

    worker.load_model = load
    worker.compile_or_warm_up_model, worker.shutdown = warm, close
    worker.scope_connect, worker.scope_describe = scope.connect, scope.describe
    worker.scope_counters = scope.counters


def _attach_steps(runner: Any, scope: ScopeWorker) -> None:
    """Hear of each step, on the runner: a Ray worker of the compiled graph calls it past
    the worker's own `execute_model`. vllm 0.32, v1/executor/ray_utils.py,
    RayWorkerWrapper.execute_model_ray
    """
    execute_model = runner.execute_model

    def execute(scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        if scheduler_output.scheduled_new_reqs:
            scope.add_requests(scheduler_output.scheduled_new_reqs)
        if not scope.reading():
            scope.clear()
        try:
            return execute_model(scheduler_output, *args, **kwargs)
        finally:
            scope.end_step()
            if scheduler_output.finished_req_ids:
                scope.finish_requests(scheduler_output.finished_req_ids)

    runner.execute_model = execute


def wrap() -> None:
    from vllm.v1.worker.worker_base import WorkerBase

    def init(original: Any, self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        original(self, vllm_config, *args, **kwargs)
        config = config_of(vllm_config)
        if config is not None:
            _attach(self, config)

    wrap_method(WorkerBase, "__init__", ["vllm_config"], init)
    for name in ("load_model", "compile_or_warm_up_model", "shutdown"):
        if not hasattr(WorkerBase, name):
            raise CompatError(f"this vLLM's WorkerBase has no {name}")
