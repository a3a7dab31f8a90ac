"""Starts Ray actors on the hosts of a cluster, one actor for each engine.

Owns:  RayPool.
Runs:  in the harvesting process, which is the cluster's driver.
To:    several.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import Any

from vllm_scope.errors import ConfigError, ScopeError, reason_of
from vllm_scope.harvests.member import Member
from vllm_scope.harvests.pools import EngineLostError, Handle
from vllm_scope.harvests.processes import MOST_CALLS


class RayPool:
    """A Pool that starts Ray actors.

    Args:
        address: the address of a cluster, or None for the address in RAY_ADDRESS. If RAY_ADDRESS is
            not set, the pool starts a cluster on this host, and `close` ends this cluster. If this
            process is already connected to Ray, the pool uses the existing connection.
        count: the number of engines. None means the largest number for which the cluster has GPUs
            and CPUs. In a cluster without GPUs, None means one engine.
        gpus: the number of GPUs of each engine. All GPUs of an engine are on one host.

    Attributes:
        count: the number of engines.

    Raises:
        ConfigError: Ray is not installed, or the cluster does not answer or has too few resources.
    """

    def __init__(self, address: str | None, count: int | None, gpus: int) -> None:
        self._ray: Any = _imported()
        self._own = not self._ray.is_initialized()
        if self._own:
            # With None, Ray would join the newest cluster that `ray start` started on this host.
            address = address or os.environ.get("RAY_ADDRESS") or "local"
            try:
                self._ray.init(address=address)
            except (ConnectionError, RuntimeError, ValueError) as error:
                where = "a new cluster on this host" if address == "local" else address
                raise ConfigError(
                    f"Ray cannot reach {where}: {reason_of(error)}; `ray status` says more."
                ) from None
        try:
            self.count, self._gpus = self._fitting(count, gpus)
        except BaseException:
            self.close()
            raise

    def _fitting(self, count: int | None, gpus: int) -> tuple[int, int]:
        """The number of engines, and the number of GPUs for each engine. Raises ConfigError.

        In a cluster without GPUs, the number of GPUs for each engine is 0.
        """
        hosts = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        gpus = gpus if any(host.get("GPU", 0) for host in hosts) else 0
        most = room(hosts, gpus)
        wanted = (most if gpus else 1) if count is None else count
        if not 1 <= wanted <= most:
            each = f"{gpus} GPUs of one host and a CPU" if gpus else "a CPU"
            raise ConfigError(
                f"the cluster has room for {most} engines with {each} each, and {max(wanted, 1)} "
                "are asked for; take fewer engines, fewer GPUs for each, or more hosts."
            )
        return wanted, gpus

    def start(self, number: int) -> Handle:
        actor = self._ray.remote(Member).options(
            num_cpus=1, num_gpus=self._gpus, max_concurrency=MOST_CALLS,
            scheduling_strategy="SPREAD",
        )  # fmt: skip
        return _Actor(self._ray, actor.remote())

    def close(self) -> None:
        if self._own:
            self._ray.shutdown()


def room(hosts: Sequence[Mapping[str, float]], gpus: int) -> int:
    """The number of engines for which hosts with these resources have room. Each engine needs a CPU
    and `gpus` GPUs of one host."""
    return sum(
        int(min(host.get("CPU", 0), host.get("GPU", 0) // gpus if gpus else host.get("CPU", 0)))
        for host in hosts
    )


def _imported() -> Any:
    try:
        import ray
    except ImportError:
        raise ConfigError(
            "a harvest over Ray needs the package ray; pip install 'vllm-scope[ray]' on every "
            "host, or leave ray out."
        ) from None
    return ray


class _Actor:
    def __init__(self, ray: Any, actor: Any) -> None:
        self._ray, self._actor = ray, actor

    def call(self, method: str, *args: object) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            answer = getattr(self._actor, method).remote(*args).future()
        except self._ray.exceptions.RayError as error:
            future.set_exception(EngineLostError(reason_of(error)))
            return future
        answer.add_done_callback(partial(self._settle, future))
        return future

    def _settle(self, future: Future[Any], answer: Future[Any]) -> None:
        error = answer.exception()
        if error is None:
            future.set_result(answer.result())
        elif isinstance(error, self._ray.exceptions.RayTaskError):  # the method raised an error
            cause = error.cause
            named = f"{type(cause).__name__}: {cause}"
            future.set_exception(cause if isinstance(cause, ScopeError) else ScopeError(named))
        else:
            future.set_exception(
                EngineLostError(f"its process ended: {reason_of(Exception(error)).rstrip('.')}")
            )

    def kill(self) -> None:
        with suppress(self._ray.exceptions.RayError):
            self._ray.kill(self._actor)
