"""Controls the taps of one worker: installs taps, plans requests, and answers remote calls.

Owns:  ScopeWorker, one for each of vLLM's workers.
Runs:  in every worker process, on its main thread.
From:  attach (vLLM's calls).   To: loading, steps, delivery.

Promise: if no request has taps, the ScopeWorker adds only a few attribute tests to a step. In such
a step, it uploads no data and examines no request. If the reads or edits of a request fail, the
request gets an error with the reason. All other requests and the engine continue.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import TypeVar

import msgspec
from torch import Tensor

from vllm_scope.config import ScopeConfig
from vllm_scope.control.policy import Changes
from vllm_scope.control.policy_options import check_engine
from vllm_scope.core.news import Entrant, Heard, StepNews
from vllm_scope.core.registry import Registry
from vllm_scope.core.score_index import ScoreKey
from vllm_scope.engine.core.verdicts import with_lost, with_verdicts
from vllm_scope.engine.functions import StepFunctions
from vllm_scope.engine.model import global_reads, sites_of
from vllm_scope.engine.monitors import check as check_monitors
from vllm_scope.engine.monitors import configured, untapped
from vllm_scope.engine.vllm_types import ModelRunner, NewRequestData, Worker
from vllm_scope.engine.worker import runners
from vllm_scope.engine.worker.attention import kernel_of
from vllm_scope.engine.worker.canary import Forward
from vllm_scope.engine.worker.delivery import IDLE_COUNTERS, NOBODY, WorkerDelivery
from vllm_scope.engine.worker.faults import Faults
from vllm_scope.engine.worker.holding import held_saes
from vllm_scope.engine.worker.loading import check_taps, compiled_rows, last_rows, load_taps
from vllm_scope.engine.worker.own_lens import OwnLens
from vllm_scope.engine.worker.proving import Proved, agreed, proved_anatomy
from vllm_scope.engine.worker.replies import Connected, Described
from vllm_scope.engine.worker.scaling import Scaling
from vllm_scope.engine.worker.sizes import Limits
from vllm_scope.engine.worker.steps import Steps
from vllm_scope.errors import CapacityError, CompatError, ConfigError, ScopeError
from vllm_scope.graph.anatomy.supposed import compare_compiled
from vllm_scope.graph.tap import op
from vllm_scope.program.compiler import RequestProgram
from vllm_scope.program.held import Held
from vllm_scope.request.heads import LensKey
from vllm_scope.request.resolved import Resolved
from vllm_scope.request.ticket import Recipient
from vllm_scope.sinks.request import Ended
from vllm_scope.transport.messages import Address
from vllm_scope.vectors import load_vectors
from vllm_scope.worker.held_saes import PairMaker
from vllm_scope.worker.plan import Planner
from vllm_scope.worker.score_store import Filled
from vllm_scope.worker.summing import Summing

logger = logging.getLogger("vllm.vllm_scope")

T = TypeVar("T")


class ScopeWorker:
    """The taps of one worker, and the worker's requests with taps.

    Attributes:
        reason: why the model cannot be tapped; None if it can be tapped.
        steps: plans each forward; None if the model cannot be tapped.
        lens: the worker's OwnLens; None if the model cannot be tapped.
        here: boundaries with a tap on this worker.
    """

    def __init__(self, worker: Worker, config: ScopeConfig) -> None:
        self._worker = worker
        self._vllm_config = worker.vllm_config
        self.config = config
        self.reason: str | None = None
        self.lens: OwnLens | None = None
        self.runner_version = "unknown"
        self.here: tuple[int, ...] = ()
        self._planner: Planner | None = None
        self._delivery: WorkerDelivery | None = None
        self._functions: StepFunctions | None = None
        self.steps: Steps | None = None
        self._connected: Tensor | None = None
        self._proved: Proved | None = None
        self._faults: Faults | None = None
        self._scaling: Scaling | None = None
        self._pair_makers: dict[str | LensKey, PairMaker] = {}
        self._heard = Heard()
        #: The ids of all requests that entered with EngineCore's news and have not ended. Requests
        #: that failed on this worker are included.
        self._entered: set[str] = set()
        #: For each request whose scores the workers store with its KV blocks: the request's key,
        #: and the digest of its probes.
        self._keeping: dict[str, tuple[int, bytes]] = {}
        #: True if the running step, and all later steps until the next news, need nothing from this
        #: object.
        self.resting = False

    # Load

    def load(self) -> None:
        """Install taps on the loaded model. If the model cannot be tapped, set `reason`."""
        from vllm.distributed.parallel_state import get_pp_group, get_tp_group

        self.stage = get_pp_group().rank_in_group
        self.num_stages = get_pp_group().world_size
        self.drains = get_tp_group().rank_in_group == 0
        self.sites = sites_of(self._vllm_config, self.config)
        try:
            self._tap_model(self._worker.model_runner, (get_tp_group(), get_pp_group()))
        except CompatError as error:
            self._go_without_taps(str(error))
            return
        # Some parts of the configuration are used only when requests come. These parts are checked
        # now. If one of them is wrong, the engine does not start.
        if global_reads(self.config, self.sites) != global_reads(
            self.config, replace(self.sites, moved=())
        ):
            moved = ", ".join(map(str, self.sites.moved))
            raise ConfigError(
                f"a global sink reads resid_pre of layer {moved}, and this model changes the "
                "stream before that layer; name the other layers."
            )
        monitors = configured(self._vllm_config)
        check_monitors(monitors, self.sites, self.num_stages, self.limits)
        drafts = self._vllm_config.speculative_config is not None
        check_engine(self.config.policy_configs(), self.num_stages, drafts)
        checking = Registry(self.sites)
        for name, path in self.config.modules.items():
            checking.register_module(name, load_vectors(path))

    def _tap_model(self, runner: ModelRunner, groups: Sequence[object]) -> None:
        """Install taps. Raises CompatError if the model must be served without taps."""
        self.runner_version = runners.version_of(runner)
        proved = self._proved = proved_anatomy(runner, self._vllm_config, self.sites, groups)
        anatomy = proved.anatomy
        split = anatomy.splits.get("q")
        gather = None if split is None else split.gather
        kernels = {layer: kernel_of(one, gather) for layer, one in anatomy.attention.items()}
        self.sites = replace(self.sites, kernels=kernels, moved=proved.moved)
        loaded = load_taps(
            self._worker, self.config, self.sites, anatomy, self.drains, self.is_last,
            runners.is_optimistic(runner, self.runner_version),
        )  # fmt: skip
        self.here, self.limits = loaded.here, loaded.limits
        self._tables, self._arena = loaded.tables, loaded.arena
        self._functions = StepFunctions(anatomy, runner.get_model())
        device, dtype = self._worker.device, self._vllm_config.model_config.dtype
        self.lens = OwnLens(
            runner.get_model(), anatomy.norm_here, self._vllm_config, self.config, self.sites,
            self.here, self.drains, self.is_last,
        )  # fmt: skip
        self.lens.load(groups[0], device)
        if self.drains:
            self._pair_makers |= held_saes(self.config, self.here, dtype, device)
            self._delivery = WorkerDelivery.open(
                self.config, self._arena, loaded.sizes, self.sites, self.here,
                (self.stage, self.num_stages), str(self._vllm_config.model_config.model),
                self._vllm_config.speculative_config is not None,
                int(bool(self._vllm_config.scheduler_config.async_scheduling)), self._pair_makers,
            )  # fmt: skip
            if self._arena.slots.is_cuda:
                self._tables.host[0] = self._delivery.ring.slots.data_ptr()
        steps = self._begin_steps()
        runners.attach(runner, self.has_requests, steps.begin, steps.clear)
        logger.info(
            "vllm-scope: %d taps on %s (%s), runner %s, arena %.1f MiB, vectors %.1f MiB.",
            len(self.here), anatomy.path, anatomy.convention.value, self.runner_version,
            self._arena.num_bytes / 2**20, self._tables.vectors.numel() * 4 / 2**20,
        )  # fmt: skip

    def settle(self) -> None:
        """Wait until the lens has been applied to all rows that were computed with the current
        weights. Each worker calls this method before its weights change, because the lens reads
        the weights."""
        if self._delivery is not None:
            self._delivery.drain.settle()

    def renew(self, failed: str | None = None) -> None:
        """Copy the model's current weights into the lens. Every worker must call this method after
        a change of the weights, even if the change failed.

        Args:
            failed: the error, if the change of weights failed on this worker; otherwise None.
        """
        from vllm.distributed.parallel_state import get_tp_group

        if self.lens is not None:
            self.lens.renew(get_tp_group(), failed)

    def _begin_steps(self) -> Steps:
        self._planner = Planner(self._tables)
        self._scaling = Scaling(self._planner, self._compile)
        self._faults = Faults(self._tables, self._planner, self.sites) if self.is_last else None
        self.steps = Steps(
            self._planner, self._tables, self._arena, self.sites.boundaries, self.limits.widths,
            self._delivery, self._functions, self._fail,
        )  # fmt: skip
        op.connect(self._tables.taps, self.steps)
        self._connected = self._tables.taps
        return self.steps

    def check_canary(self) -> None:
        """Check in dummy forwards that every tap writes a row, and prepare the model's lens.

        Raises:
            CompatError: a tap wrote nothing. In this case, the engine does not start.
        """
        from vllm.config import set_current_vllm_config

        steps = self.steps
        if steps is None or not self.here:
            return

        def forward(plan: Callable[[], None]) -> object:
            steps.active = True
            with set_current_vllm_config(self._vllm_config):
                return runners.dummy_forward(self._worker.model_runner, plan)

        ring = None if self._delivery is None else self._delivery.ring
        try:
            check_taps(self.here, self._tables, self._arena, ring, forward)
            self._check_rows(forward)
            if self.reason is None and self.lens is not None:
                self._begin_lens(self.lens, forward)
        finally:
            steps.active = False

    def _check_rows(self, forward: Forward) -> None:
        """If the stream was found from numbers, compare the rows of the compiled graph with the
        rows of an uncompiled forward. If the rows differ, the model is served without taps."""
        from vllm.distributed.parallel_state import get_pp_group, get_tp_group

        proved, reason = self._proved, None
        if proved is None or proved.anatomy.unread is None:
            return
        try:
            rows = compiled_rows(self.here, self._tables, self._arena, forward)
            dtype = self._vllm_config.model_config.dtype
            compare_compiled(rows, proved.rows, proved.anatomy.unread, dtype)
        except CompatError as error:
            reason = str(error)
        reason = agreed(reason, (get_tp_group(), get_pp_group()))
        if reason is not None:
            self._go_without_taps(reason)
            # The taps stay in the compiled graph, but no step is planned any more.
            self._planner = self.steps = None

    def _go_without_taps(self, reason: str) -> None:
        """Set `reason`, so that the model is served without taps. Raises ConfigError if there are
        configured monitors, because every request would then be refused."""
        self.reason = reason
        if configured(self._vllm_config):
            raise ConfigError(f"additional_config['scope'].monitors: {untapped(reason)}")
        logger.warning("vllm-scope: no taps on this model: %s.", reason)

    def _begin_lens(self, lens: OwnLens, forward: Forward) -> None:
        """If the model's lens can be applied, add this worker's lenses to the pair makers, which
        the drain uses."""
        delivery = self._delivery
        self._pair_makers |= lens.begin(
            lambda: last_rows(self.sites, self._tables, self._arena, forward),
            (lambda call: None) if delivery is None else delivery.drain.warm,
        )

    @property
    def is_last(self) -> bool:
        """True on the last pipeline stage. EngineCore reads only the outputs of the last stage."""
        return bool(self.stage == self.num_stages - 1)

    # Requests

    def has_requests(self) -> bool:
        return bool(self._planner)

    @property
    def _is_quiet(self) -> bool:
        """True if no request has taps, and no data of earlier requests must be sent with an
        output."""
        if self._entered or self._planner or self._faults:
            return False
        delivery = self._delivery
        return delivery is None or not (delivery.watch.has_steps or delivery.store.has_missing)

    def rests(self) -> bool:
        """Set and return `resting`, before a step that has no news."""
        if not self.resting:
            quiet = self._is_quiet
            if quiet and self.steps is not None:
                self.steps.clear()
            self.resting = quiet
        elif self._delivery is not None and self._delivery.store.has_missing:
            # The drain thread could not store some scores.
            self.resting = False
        if self.resting and self.steps is not None:
            self.steps.num_steps += 1
        return self.resting

    def add_requests(self, new_requests: Sequence[NewRequestData], news: StepNews) -> None:
        """Plan the new requests that have taps.

        Args:
            new_requests: vLLM's NewRequestData.
        """
        if self._planner is None:
            return
        self._heard.take(news)
        for req_id, num_tokens in news.resumed.items():
            self._planner.resume_request(req_id, num_tokens)
        for request in new_requests:
            entrant = news.entrants.get(request.req_id)
            # Model Runner V2 sends a preempted request again. The earlier rows of such a request
            # stay valid.
            if entrant is not None and request.req_id not in self._entered:
                self._entered.add(request.req_id)
                self._add_request(request, entrant, news.held.get(request.req_id))
        self._heard.forget(news)

    def _add_request(self, request: NewRequestData, entrant: Entrant, made: Held | None) -> None:
        """Plan one request. If the request cannot be planned, answer the request with the reason.

        Args:
            made: the request's programs, if EngineCore runs in this process; otherwise None.
        """
        assert self._planner is not None
        recipient, vectors = entrant.recipient, True
        # A request can have no recipient, or a recipient that awaits nothing. In both cases, no
        # front-end gets an answer, but server-wide edits and global sinks still apply. A recipient
        # has the request's names, which the global sinks use.
        told = recipient if recipient is not None and recipient.awaits else None
        key = NOBODY if told is None else told.key
        try:
            asked = self._heard[entrant.spec]
            if entrant.scores and any(
                cell.place.boundary in self.here
                for one in asked.banked if one.after is None for cell in one.cells
            ):  # fmt: skip
                # EngineCore expects that this worker stores these scores. If the worker refuses the
                # request, the worker reports the scores as lost.
                self._keeping[request.req_id] = key, entrant.scores
            vectors = bool(asked.edits or asked.banked)
            delivery = self._expect(request, told, asked)
            prompt_ids, program = request.prompt_token_ids, None
            if delivery is not None:
                try:
                    key = delivery.add_request(request.req_id, prompt_ids, recipient, asked)
                    program = self._compile(asked, prompt_ids, True)
                    if entrant.unchecked:
                        self._check_size(asked, program, entrant.columns)
                except CapacityError as error:
                    logger.warning("vllm-scope: request %s: %s", request.req_id, error)
                    self._end_unwatched(request.req_id, asked, str(error))
                    self._finish(key, str(error))
                    program, key = None, NOBODY
            if program is None:
                # A rank without room must still apply the edits, as all other ranks do.
                program = self._compile(asked, prompt_ids, False)
            if delivery is not self._delivery:
                key = NOBODY
            if self._functions is not None and recipient is not None:
                child = recipient.child
                self._functions.add_request(request.req_id, request.sampling_params, child)
            if key != NOBODY or not program.empty:
                held = None
                if program.has_vectors:
                    held = made
                    # The programs that EngineCore made deliver rows. If this worker has no room for
                    # the rows, the request needs programs that deliver no rows.
                    if held is None or not program.made(held):
                        held = program.held(entrant.columns, self._heard.digest_of(entrant.spec))
                self._planner.add_request(request.req_id, key, program, held, entrant.logged)
                assert self._scaling is not None
                drains = key != NOBODY and self._delivery is not None
                self._scaling.add_request(
                    request.req_id, asked, prompt_ids, entrant.columns, drains
                )
            if request.req_id in self._keeping and key != NOBODY and self._delivery is not None:
                every = program.generated_superset()
                if every is not None:
                    self._delivery.keep_scores(key, entrant, every.layout)
        except Exception as error:
            self._refuse(request.req_id, vectors, key, error)

    def accept(self, accepted: Mapping[str, int]) -> None:
        """Give the drain the number of accepted tokens of each request with Moments. The worker
        calls this method before these requests end or continue."""
        if self._planner is None or self._delivery is None:
            return
        keys = {req_id: self._planner.key_of(req_id) for req_id in accepted}
        self._delivery.drain.accept(
            {key: accepted[req_id] for req_id, key in keys.items() if key is not None}
        )

    def begin_stages(self, begun: Mapping[str, Sequence[str]]) -> None:
        """Begin the later stages of requests.

        Args:
            begun: for each request, the names of the first stages that now have a verdict.
        """
        for req_id, firsts in begun.items():
            try:
                if self._planner is not None:
                    self._planner.begin_stages(req_id, firsts)
            except CapacityError as error:
                # In the request's result, the scores of the stage count as missing.
                logger.warning("vllm-scope: request %s: %s", req_id, error)
            except Exception:
                logger.exception("vllm-scope: a later stage of %s could not begin", req_id)

    def change_scales(self, scales: Mapping[str, Changes]) -> None:
        """Apply the policies' new scales before the step's forward."""
        for req_id, error in self._scaling.begin_step(scales) if self._scaling else ():
            logger.error("vllm-scope: scales of %s cannot be changed", req_id, exc_info=error)
            self._fail(req_id, f"new scales of the request's policy could not be applied: {error}")

    def _end_unwatched(self, req_id: str, asked: Resolved, reason: str) -> None:
        """If a probe or a policy can stop a request, end the request. The worker calls this method
        if it cannot compute the request's scores."""
        if (asked.stopping or asked.policy) and self._faults is not None:
            self._faults.fail(req_id, reason)

    def _refuse(self, req_id: str, vectors: bool, key: int, error: Exception) -> None:
        """Answer a request that could not be added. All other requests and the engine continue."""
        reason = str(error)
        if isinstance(error, ScopeError):
            logger.warning("vllm-scope: request %s could not be added: %s", req_id, error)
        else:
            logger.error("vllm-scope: request %s could not be added.", req_id, exc_info=error)
            reason = (
                f"vllm-scope failed on this request ({type(error).__name__}); the log says why."
            )
        if self._functions:
            self._functions.finish_request(req_id)
        if self._faults is not None and vectors:
            self._faults.fail(req_id, reason)
        self._finish(key, reason)

    def _expect(
        self, request: NewRequestData, recipient: Recipient | None, asked: Resolved
    ) -> WorkerDelivery | None:
        """This worker's delivery. None if there is no delivery, or if the front-end is not
        connected. In the second case, the request ends if a probe or a policy can stop it."""
        if self._delivery is not None and recipient is not None:
            try:
                self._delivery.expect(recipient)
            except CapacityError as error:
                logger.warning("vllm-scope: request %s: %s", request.req_id, error)
                self._end_unwatched(request.req_id, asked, str(error))
                return None
        return self._delivery

    def _check_size(
        self, asked: Resolved, program: RequestProgram, columns: tuple[bytes, ...]
    ) -> None:
        """Run `Limits.check`, unless the last checked request of this spec had the same columns."""
        known = asked.__dict__.get("_fits")
        if known is None or known[0] is not self.limits or known[1] != columns:
            self.limits.check(program.held(columns).layouts)
            asked.__dict__["_fits"] = self.limits, columns

    def _compile(self, asked: Resolved, prompt_ids: Sequence[int], drains: bool) -> RequestProgram:
        here = frozenset(self.here)
        return RequestProgram.compile(asked, self.sites, here, len(prompt_ids), prompt_ids, drains)

    def finish_requests(
        self, req_ids: Iterable[str], ended: Mapping[str, Ended] | None = None
    ) -> None:
        """Remove ended requests.

        Args:
            ended: for each request with sinks, the tokens that the scheduler accepted, and why the
                request ended. The keys are request ids.
        """
        if self._planner is None or not self._entered:
            return
        for req_id in req_ids:
            if req_id not in self._entered:
                continue
            self._entered.remove(req_id)
            self._keeping.pop(req_id, None)
            if self._scaling is not None:
                self._scaling.finish_request(req_id)
            error = self._functions.finish_request(req_id) if self._functions else None
            key = self._planner.finish_request(req_id)
            if key is not None:
                self._finish(key, error, (ended or {}).get(req_id))
        if not self._planner and self._delivery is not None:
            # The drain thread can now deliver at full speed, because no request with taps runs.
            self._delivery.drain.hurry()

    def begin_launch(self) -> None:
        """Announce that this thread will launch the model. See Drain.begin_launch."""
        if self._delivery is not None:
            self._delivery.drain.begin_launch()

    def end_launch(self) -> None:
        if self._delivery is not None:
            self._delivery.drain.end_launch()

    def deliver_soon(self) -> None:
        """Start to deliver the stored scores of new requests' prompts. The worker calls this method
        after the forward of these requests is enqueued."""
        if self._delivery is not None:
            self._delivery.drain.nudge()

    def keep_blocks(self, filled: Mapping[str, tuple[int, Sequence[bytes]]]) -> None:
        """Store the scores of KV blocks. The forwards that compute these scores are already
        enqueued.

        Args:
            filled: for each request with new full blocks, the number of the first of these blocks
                and the hashes of all of them (StepNews.filled).
        """
        known = ((self._keeping.get(req_id), *blocks) for req_id, blocks in filled.items())
        some = [
            Filled(keeping[0], first, hashes, keeping[1])
            for keeping, first, hashes in known if keeping is not None
        ]  # fmt: skip
        if some and self._delivery is not None:
            self._delivery.drain.keep(some)

    def forget_scores(self, keys: Sequence[ScoreKey]) -> None:
        """Drop the stored scores that EngineCore no longer needs."""
        if self._delivery is not None:
            self._delivery.drain.forget(keys)

    def with_endings(self, output: object) -> object:
        """Adds to a step's output the worker's data for EngineCore: faults of edits, verdicts of
        probes, new scales of policies, and lost scores."""
        if self._faults is None:  # EngineCore does not see the outputs of this stage
            if self._delivery is not None:
                self._delivery.store.take_missing()
            return output
        if self._delivery is not None:
            output = with_verdicts(output, self._delivery.watch)
            output = with_lost(output, self._delivery.store)
        return self._faults.with_faults(output)

    def _fail(self, req_id: str, reason: str) -> None:
        """End a request that cannot be planned. Other requests continue."""
        assert self._planner is not None
        watched = self._delivery is not None and req_id in self._delivery.watch
        if self._faults is not None and (watched or req_id in self._planner.owners.values()):
            self._faults.fail(req_id, reason)
        key = self._planner.finish_request(req_id)
        if key is not None:
            self._finish(key, reason)

    def _finish(self, key: int, error: str | None = None, ended: Ended | None = None) -> None:
        if key != NOBODY and self._delivery is not None:
            self._delivery.finish_request(key, error, ended)

    def close(self) -> None:
        if self._connected is not None:
            op.disconnect(self._connected)
        if self._delivery is not None:
            self._delivery.close()

    # Remote calls (`collective_rpc` finds these methods on the worker)

    def connect(self, address: dict[str, object]) -> Connected:
        """Connect to a front-end. Returns the result of `describe`, and two more fields.

        `road` is the transport by which the front-end gets rows. If `needs_tcp` is True, the
        front-end must call again with a TCP address.
        """
        body: Connected = {**self.describe(), "road": None, "needs_tcp": False}
        if self._delivery is not None:
            try:
                body["road"] = self._delivery.memory.connect(msgspec.convert(address, Address))
                body["needs_tcp"] = body["road"] is None
            except ScopeError as error:
                body["reason"] = str(error)
        return body

    def describe(self) -> Described:
        """The sites that can be read and edited on this worker, and the limits of a request."""
        tapped = self._planner is not None
        limits = self.limits if tapped else Limits((1,), 0, 0, 0, 0, 0)
        return {
            "reason": self.reason,
            "runner": self.runner_version,
            "stage": self.stage,
            "num_stages": self.num_stages,
            "drains": self.drains,
            "sites": {**asdict(self.sites), "boundaries": list(self.sites.boundaries)},
            "taps_here": list(self.here) if tapped else [],
            "arena_mib": self._arena.num_bytes / 2**20 if tapped else 0.0,
            "limits": msgspec.to_builtins(limits),
            "sinks": self._delivery.router.takes if self._delivery is not None else {},
            "lens": None if self.lens is None else self.lens.reason,
            "lenses": {} if self.lens is None else self.lens.describe(),
        }

    def counters(self) -> dict[str, object]:
        """The counts of the worker since it started, for tests and metrics."""
        planner, steps = self._planner, self.steps
        return {
            "pid": os.getpid(),
            "steps": steps.num_steps if steps is not None else 0,
            "steps_planned": steps.num_planned if steps is not None else 0,
            "requests_planned": planner.num_requests_planned if planner is not None else 0,
            "uploads": self._tables.num_uploads if planner is not None else 0,
            "requests": len(planner) if planner is not None else 0,
            **(self._delivery.counters() if self._delivery is not None else IDLE_COUNTERS),
        }

    def of_sums(self, call: Callable[[Summing], T], none: T) -> T:
        """The result of `call` for this worker's sums. If the worker has no drain, the result is
        `none`."""
        return none if self._delivery is None else self._delivery.drain.of_sums(call)

    def flush(self) -> dict[str, str | None]:
        """Make ended requests visible at every sink. Returns the error or None for each sink, by
        name."""
        return self._delivery.router.flush() if self._delivery is not None else {}
