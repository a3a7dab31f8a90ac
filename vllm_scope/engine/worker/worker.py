"""A worker's life with taps: load, requests, close, and what it answers remote calls.

Owns:  ScopeWorker, one per vLLM worker.
Runs:  in every worker process, on its main thread.

Promise: with nothing asked, a step costs a few attribute tests; it uploads nothing
and looks at no request. A request whose reads or edits fail is answered with the
reason; its neighbours and the engine go on.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import msgspec

from vllm_scope.config import ScopeConfig
from vllm_scope.core.registry import Registry
from vllm_scope.engine.functions import StepFunctions
from vllm_scope.engine.model import anatomy_of, sites_of
from vllm_scope.engine.params import handle_of
from vllm_scope.engine.worker import runners
from vllm_scope.engine.worker.attention import attention_of, kernel_of
from vllm_scope.engine.worker.canary import silent_taps
from vllm_scope.engine.worker.delivery import IDLE_COUNTERS, NOBODY, Delivery
from vllm_scope.engine.worker.faults import Faults
from vllm_scope.engine.worker.sizes import Limits, Sizes
from vllm_scope.engine.worker.steps import Steps
from vllm_scope.errors import CapacityError, CompatError, ScopeError, SpecError
from vllm_scope.graph.anatomy.attention import install_attention_taps
from vllm_scope.graph.anatomy.layers import Anatomy
from vllm_scope.graph.anatomy.tapped import install_taps
from vllm_scope.graph.tap import op
from vllm_scope.graph.tap.tables import Tables, capacity
from vllm_scope.program.compiler import RequestProgram
from vllm_scope.program.layout import Widths
from vllm_scope.request.resolve import Resolved
from vllm_scope.request.sites import kind_of
from vllm_scope.request.spec import Spec
from vllm_scope.sinks.request import Ended
from vllm_scope.transport.messages import Address
from vllm_scope.vectors import load_vectors
from vllm_scope.worker.arena import Arena
from vllm_scope.worker.plan import Planner

logger = logging.getLogger("vllm.vllm_scope")


class ScopeWorker:
    """The taps of one worker: what they are attached to and what they do next.

    Verbs: `load`, `check_canary`, `close`; the scheduler's news come in through
    `add_requests` and `finish_requests`, what forwards do is `steps`.
    """

    def __init__(self, worker: Any, config: ScopeConfig) -> None:
        self._worker = worker
        self._vllm_config = worker.vllm_config
        self.config = config
        self.reason: str | None = None
        self.runner_version = "unknown"
        self._planner: Planner | None = None
        self._delivery: Delivery | None = None
        #: Requests' Python, where this engine runs any.
        self._functions: StepFunctions | None = None
        #: None where the model cannot be tapped.
        self.steps: Steps | None = None
        self._faults: Faults | None = None

    # Load

    def load(self) -> None:
        """Install taps on the loaded model, or remember why not."""
        from vllm.distributed.parallel_state import get_pp_group, get_tp_group

        self.stage = get_pp_group().rank_in_group
        self.num_stages = get_pp_group().world_size
        self.drains = get_tp_group().rank_in_group == 0
        self.sites = sites_of(self._vllm_config, self.config)
        self.registry = Registry(self.sites)
        try:
            self._tap_model(self._worker.model_runner)
        except CompatError as error:
            self.reason = str(error)
            logger.warning("vllm-scope: no taps on this model: %s.", error)
            return
        for name, path in self.config.modules.items():
            self.registry.register_module(name, load_vectors(path))

    def _tap_model(self, runner: Any) -> None:
        """Raises CompatError for a model that is served without taps."""
        anatomy = anatomy_of(runner.get_model(), self._vllm_config)
        if self.sites.heads is not None:
            attention = attention_of(anatomy, self.sites)
            anatomy = replace(anatomy, attention=attention)
            kernels = {layer: kernel_of(module) for layer, module in attention.items()}
            self.sites = replace(self.sites, kernels=kernels)
        self.runner_version = runners.version_of(runner)
        self._functions = StepFunctions(anatomy, runner.get_model())
        self._install(anatomy)
        runners.attach(
            runner, self.has_requests, lambda *step: self._tapped.begin(*step), self._clear
        )

    def _install(self, anatomy: Anatomy) -> None:
        device, dtype = self._worker.device, self._vllm_config.model_config.dtype
        scheduler = self._vllm_config.scheduler_config
        captured = self._vllm_config.compilation_config.cudagraph_capture_sizes or [0]
        widths = Widths(tuple(size * dtype.itemsize for size in self.sites.row_sizes))
        sizes = Sizes(
            widths, self.sites.boundaries,
            int(scheduler.max_num_batched_tokens), max(captured), device.type == "cuda",
        )  # fmt: skip
        self._tables = Tables(
            self.sites.boundaries,
            # A captured graph may be padded past the scheduler's own limit.
            max(sizes.max_rows, sizes.graph_rows),
            self.sites.hidden_size, widths, device, self.config.vectors_mib,
            reports=self.is_last,
        )  # fmt: skip
        num_slots = sizes.arena_slots(self.config)
        if not self.drains:
            num_slots = sizes.slots_of_all  # the canary's
        self._arena = Arena(num_slots, dtype, device)
        self.limits = sizes.limits(
            num_slots,
            capacity(self.sites.hidden_size, self.config.vectors_mib),
            runners.is_optimistic(self._worker.model_runner, self.runner_version),
        )
        op.register()
        tap_of = {boundary: tap for tap, boundary in enumerate(self.sites.boundaries)}
        if device.type == "cuda":
            from vllm_scope.graph.tap.kernel import load_variants

            # Now: inside a graph capture it could not be.
            load_variants(self._arena.slots, self._tables, self.sites.row_sizes)
        where = (anatomy, tap_of, self._arena.slots, self._tables)
        self.here = (*install_taps(*where), *install_attention_taps(*where, self.sites))
        if self.drains:
            self._delivery = Delivery.open(
                self.config, self._arena, sizes, self.sites, self.here,
                (self.stage, self.num_stages), str(self._vllm_config.model_config.model),
            )  # fmt: skip
            if device.type == "cuda":
                self._tables.host[0] = self._delivery.ring.slots.data_ptr()
        self._begin_steps()
        logger.info(
            "vllm-scope: %d taps on %s (%s), runner %s, arena %.1f MiB, vectors %.1f MiB.",
            len(self.here), anatomy.path, anatomy.convention.value, self.runner_version,
            self._arena.num_bytes / 2**20, self._tables.vectors.numel() * 4 / 2**20,
        )  # fmt: skip

    def _begin_steps(self) -> None:
        self._planner = Planner(self._tables)
        self._faults = Faults(self._tables, self._planner, self.sites) if self.is_last else None
        self.steps = Steps(
            self._planner, self._tables, self._arena, self.sites.boundaries, self.limits.widths,
            self._delivery, self._functions, self._fail,
        )  # fmt: skip
        op.connect(self._tables.numbers, self.steps)

    def check_canary(self) -> None:
        """Read one row at every tap of a dummy forward.

        Raises:
            CompatError: some tap wrote nothing; the engine does not start.
        """
        from vllm.config import set_current_vllm_config

        steps = self.steps
        if steps is None or not self.here:
            return

        def forward(plan: Any) -> None:
            steps.active = True
            with set_current_vllm_config(self._vllm_config):
                runners.dummy_forward(self._worker.model_runner, self.runner_version, plan)

        widths = self.limits.widths
        num_slots = sum(widths.row_slots[kind_of(boundary)] for boundary in self.here)
        silent: set[int] = set()
        try:
            region = self._arena.acquire(num_slots)
            where = (self._arena.view(region), region.start, False)
            silent |= set(silent_taps(self.here, widths, self._tables, *where, forward))
            self._arena.give_back(region)
            if self._delivery is not None and self._arena.slots.is_cuda:
                lease = self._delivery.ring.acquire(num_slots)
                where = (lease.slots.view(self._arena.slots.dtype), lease.start, True)
                silent |= set(silent_taps(self.here, widths, self._tables, *where, forward))
                lease.release()
            elif self._arena.slots.is_cuda:
                # The ranks of a layer compute together: as many forwards as on the first.
                forward(lambda: None)
        finally:
            steps.active = False
        if silent:
            raise CompatError(
                f"{len(silent)} of {len(self.here)} taps wrote nothing: the compiled graph has "
                "no taps. Remove vLLM's compile cache (VLLM_CACHE_ROOT) and start again."
            )

    @property
    def is_last(self) -> bool:
        """Of the last pipeline stage, whose outputs alone EngineCore reads."""
        return self.stage == self.num_stages - 1

    @property
    def _tapped(self) -> Steps:
        """Of a worker that has requests."""
        assert self.steps is not None
        return self.steps

    def _clear(self) -> None:
        if self.steps is not None:
            self.steps.clear()

    # What requests may name

    @property
    def holding(self) -> Registry:
        """The registry of a worker with taps.

        Raises:
            SpecError: the model cannot be tapped; what is registered would do nothing.
        """
        if self.reason is not None:
            raise SpecError(f"this model cannot be tapped: {self.reason}.")
        return self.registry

    def set_edits(self, text: str | None) -> str | None:
        return (self.registry if text is None else self.holding).set_edits(text)

    # Requests

    def has_requests(self) -> bool:
        return bool(self._planner)

    def add_requests(self, new_requests: list[Any]) -> None:
        if self._planner is None:
            return
        for request in new_requests:
            handle = handle_of(request.sampling_params)
            # V2 sends a preempted request anew; what it read so far stays valid.
            if handle is not None and request.req_id not in self._planner:
                self._add_request(request, handle)

    def _add_request(self, request: Any, handle: dict[str, Any]) -> None:
        assert self._planner is not None
        # Without a key nobody waits for anything: server-wide edits and global sinks.
        key = handle.get("key", NOBODY)
        params = request.sampling_params
        try:
            delivery = self._expect(request, handle)
            spec = Spec.from_json(params.extra_args["scope"]) if key >= 0 else None
            asked = self.registry.resolve(spec, handle.get("modules", {}), handle.get("server"))
            prompt_ids = request.prompt_token_ids
            most = len(prompt_ids) + (params.max_tokens or 1)
            program = None
            if delivery is not None:
                try:
                    whole, key = delivery.add_request(request.req_id, prompt_ids, handle, asked)
                    program = self._compile(whole, prompt_ids, True)
                    if self._unchecked(handle, asked, whole):
                        self.limits.check(program, most)
                except CapacityError as error:
                    logger.warning("vllm-scope: request %s: %s", request.req_id, error)
                    self._finish(key, str(error))
                    program, key = None, NOBODY
            if program is None:
                # Its edits stay: ranks that deliver nothing know of no lack of room.
                program = self._compile(asked, prompt_ids, False)
            if delivery is not self._delivery:
                key = NOBODY
            if self._functions is not None:
                self._functions.add_request(request.req_id, params, handle)
            if key != NOBODY or not program.empty:
                self._planner.add_request(request.req_id, key, program, most)
        except Exception as error:
            reason = str(error)
            if isinstance(error, ScopeError):
                logger.warning("vllm-scope: request %s is left alone: %s", request.req_id, error)
            else:
                # A fault of ours: this request fails, its neighbours and the engine go on.
                logger.exception("vllm-scope: request %s is left alone.", request.req_id)
                reason = (
                    f"vllm-scope failed on this request ({type(error).__name__}); the log says why."
                )
            if self._functions:
                self._functions.finish_request(request.req_id)
            if self._faults is not None and (handle.get("vectors") or handle.get("server")):
                self._faults.fail(request.req_id, reason)
            self._finish(key, reason)

    @staticmethod
    def _unchecked(handle: dict[str, Any], asked: Resolved, whole: Resolved) -> bool:
        """Whether it may deliver what its front-end did not see: edits make points differ
        that were one, names may have changed, global sinks read, and codecs enlarge."""
        if not (whole.reads or whole.probes):
            return False
        changed = whole is not asked or handle.get("server") is not None or handle.get("modules")
        return bool(changed) or any(read.encoding is not None for read in whole.reads)

    def _expect(self, request: Any, handle: dict[str, Any]) -> Delivery | None:
        """Where the request delivers to; None where nothing waits for what it delivers."""
        if self._delivery is not None:
            try:
                self._delivery.expect(handle)
            except CapacityError as error:
                logger.warning("vllm-scope: request %s: %s", request.req_id, error)
                return None
        return self._delivery

    def _compile(self, asked: Resolved, prompt_ids: Sequence[int], drains: bool) -> RequestProgram:
        here = frozenset(self.here)
        return RequestProgram.compile(asked, self.sites, here, len(prompt_ids), prompt_ids, drains)

    def finish_requests(self, req_ids: Any, ended: Mapping[str, Ended] | None = None) -> None:
        """The scheduler's news that requests are over.

        Args:
            ended: what it knows of those that have sinks.
        """
        if self._planner is None or not (len(self._planner) or self._functions):
            return
        for req_id in req_ids:
            error = self._functions.finish_request(req_id) if self._functions else None
            key = self._planner.finish_request(req_id)
            if key is not None:
                self._finish(key, error, (ended or {}).get(req_id))

    def told(self, output: Any) -> Any:
        """A step's output, which says whose edits made rows that are not finite."""
        return output if self._faults is None else self._faults.told(output)

    def _fail(self, req_id: str, reason: str) -> None:
        """A request that cannot be planned; its neighbours go on."""
        assert self._planner is not None
        if self._faults is not None and req_id in self._planner.owners.values():
            self._faults.fail(req_id, reason)
        key = self._planner.finish_request(req_id)
        if key is not None:
            self._finish(key, reason)

    def _finish(self, key: int, error: str | None = None, ended: Ended | None = None) -> None:
        if key != NOBODY and self._delivery is not None:
            self._delivery.finish_request(key, error, ended)

    def close(self) -> None:
        if self._planner is not None:
            op.disconnect(self._tables.numbers)
            if self._delivery is not None:
                self._delivery.close()

    # Remote calls (`collective_rpc` finds them on the worker)

    def connect(self, address: dict[str, Any]) -> dict[str, Any]:
        """Learn of a front-end; answer what can be read here, and by which road.

        Called a second time, with an address on TCP, where some worker answered
        `needs_tcp`.
        """
        body = self.describe() | {"road": None, "needs_tcp": False}
        if self._delivery is not None:
            try:
                body["road"] = self._delivery.memory.connect(msgspec.convert(address, Address))
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
            "limits": msgspec.to_builtins(Limits((1,), 0, 0, 0, 0, 0)),
            "modules": self.registry.modules(),
            "sinks": self._delivery.describe() if self._delivery is not None else {},
        }
        if self._planner is not None:
            body["taps_here"] = list(self.here)
            body["arena_mib"] = self._arena.num_bytes / 2**20
            body["limits"] = msgspec.to_builtins(self.limits)
        return body

    def counters(self) -> dict[str, Any]:
        """Work done so far, for tests and metrics."""
        planner = self._planner
        return {
            "pid": os.getpid(),
            "steps": self.steps.num_steps if self.steps is not None else 0,
            "steps_planned": self.steps.num_planned if self.steps is not None else 0,
            "requests_planned": planner.num_requests_planned if planner is not None else 0,
            "uploads": self._tables.num_uploads if planner is not None else 0,
            "requests": len(planner) if planner is not None else 0,
            **(self._delivery.counters() if self._delivery is not None else IDLE_COUNTERS),
        }

    def flush(self) -> dict[str, str | None]:
        """Make what has ended visible at every sink; sink -> why it is not, or None."""
        return self._delivery.flush() if self._delivery is not None else {}
