"""CUDA graphs that are replayed without the taps that do nothing in a step.

Owns:  TappedGraph; `captured` and `noted`, contexts in which graphs and taps are captured.
Runs:  in workers on NVIDIA GPUs, on the main thread.
From:  op.   To: driver.

Promise: a replay computes the same with and without these taps, which would return at once. A GPU
takes 1.0 to 1.7 us to begin each of them (measured on an H100), which is 0.4 ms or more of a step
if all sites of 32 layers have taps.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Any, NamedTuple, Protocol
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray

from vllm_scope.graph.tap import driver

logger = logging.getLogger("vllm.vllm_scope")

#: A graph without some taps is made once replays have begun these taps in vain PAYS * num_nodes
#: times, where num_nodes is the number of nodes of the captured graph. To make the graph takes
#: about as long as these taps took: 12 to 20 us for each node (H100).
PAYS = 12
#: No such graph is made if the device has fewer free bytes. A graph takes 4 KiB for each node.
LEAST_FREE = 1 << 30
#: The largest number of such graphs of one captured graph. Before another one is made, the least
#: recently used one is dropped.
MOST = 4
#: A captured graph with fewer taps, such as a piece of a prefill's forward, is always replayed
#: whole.
LEAST_TAPS = 4


class Route(Protocol):
    """What a captured graph needs to know of a step."""

    @property
    def acting(self) -> NDArray[np.bool_] | None:
        """[num_taps], True for taps that do something for some row of the coming forward; None if
        no tap does. Whenever the values change, the array is a new one."""


class Kept(NamedTuple):
    """A graph without some taps.

    Attributes:
        acting: [taps of the captured graph], True for taps that this graph has.
        made: the graph, as `make` returned it.
    """

    acting: NDArray[np.bool_]
    made: Any


class Variants:
    """Chooses the graph of a replay: one without the taps that do nothing, once that pays.

    Args:
        taps: numbers of the captured graph's taps.
        num_nodes: the number of nodes of the captured graph.
        drop: frees a graph that `make` returned.
    """

    def __init__(self, taps: list[int], num_nodes: int, drop: Callable[[Any], None]) -> None:
        self._taps = np.array(taps, np.int64)
        self._pays = PAYS * num_nodes
        self._drop = drop
        self._kept: dict[bytes, Kept] = {}
        self._in_vain: dict[bytes, int] = {}
        self._none = np.zeros(len(taps), bool)
        #: The array of acting taps for which the result of `of` is known, and the result.
        self._last: NDArray[np.bool_] | None = self._none
        self._found: Any = None

    def of(
        self, acting: NDArray[np.bool_] | None, make: Callable[[NDArray[np.bool_]], Any | None]
    ) -> Any:
        """The graph to replay for the taps of a step, as `make` returned it; None for the whole
        graph.

        Args:
            acting: as Route.acting.
            make: makes a graph that has only some taps, given as [len(taps)] bools; returns None if
                it cannot.
        """
        if acting is self._last:
            return self._found
        here = self._none if acting is None else acting[self._taps]
        if here.all():
            self._last, self._found = acting, None
            return None
        key = here.tobytes()
        kept = self._kept.pop(key, None) or self._paid(key, here, make)
        if kept is not None:
            self._kept[key] = kept  # at the end: it was used last
            self._last, self._found = acting, kept.made
            return kept.made
        self._last = self._none
        return self._least(here)

    def _paid(
        self, key: bytes, here: NDArray[np.bool_],
        make: Callable[[NDArray[np.bool_]], Any | None],
    ) -> Kept | None:  # fmt: skip
        """Make a graph with these taps if that pays by now. None if it does not pay, or if `make`
        fails."""
        in_vain = self._in_vain.pop(key, 0) + len(here) - int(here.sum())
        if in_vain < self._pays:
            if len(self._in_vain) >= 16 * MOST:
                del self._in_vain[next(iter(self._in_vain))]
            self._in_vain[key] = in_vain
            return None
        made = make(here)
        if made is None:
            return None
        if len(self._kept) >= MOST:
            self._drop(self._kept.pop(next(iter(self._kept))).made)
        return Kept(here, made)

    def _least(self, here: NDArray[np.bool_]) -> Any:
        """Of the kept graphs with at least these taps, the one with the fewest taps; None for the
        whole graph."""
        fit = [kept for kept in self._kept.values() if not (here & ~kept.acting).any()]
        return min(fit, key=lambda kept: int(kept.acting.sum())).made if fit else None

    def clear(self) -> None:
        for kept in self._kept.values():
            self._drop(kept.made)
        self._kept.clear()
        self._last, self._found = self._none, None


class TappedGraph(torch.cuda.CUDAGraph):
    """A captured CUDA graph that is replayed without the taps that do nothing in the step."""

    #: The graph that is captured now. vLLM captures one at a time.
    capturing: TappedGraph | None = None
    #: Tap's number -> its node; None if a tap is not one kernel of its own.
    _nodes: dict[int, int] | None = None
    _route: Route | None = None
    _variants: Variants | None = None
    _uses_random: bool | None = None
    #: True if the driver could not make a graph without some taps.
    _refused = False
    _device = 0

    def capture_begin(self, *args: Any, **kwargs: Any) -> None:
        self._nodes, self._device = {}, torch.cuda.current_device()
        super().capture_begin(*args, **kwargs)
        TappedGraph.capturing = self

    def capture_end(self) -> None:
        TappedGraph.capturing = None
        super().capture_end()
        self.instantiate()
        if self._nodes and len(self._nodes) >= LEAST_TAPS:
            with suppress(driver.DriverError):  # then the graph is always replayed whole
                num_nodes = driver.num_nodes(self.raw_cuda_graph())
                # Variants gets no reference to this graph: a cycle would delay its freeing.
                self._variants = Variants(list(self._nodes), num_nodes, _drop)

    @contextmanager
    def noted(self, route: Route, tap: int) -> Iterator[None]:
        """A context. The kernel that is captured in it is noted as the kernel of this tap."""
        stream = torch._C._cuda_getCurrentRawStream(self._device)
        before = driver.last_kernel(stream)
        yield
        node = driver.last_kernel(stream)
        if self._nodes is None or node in (None, before) or tap in self._nodes:
            self._nodes = None
            return
        self._nodes[tap], self._route = node, route

    def replay(self) -> None:
        if self._variants is None or self._route is None:
            super().replay()
            return
        if self._uses_random is None:
            self._replay_first()
            return
        found = self._variants.of(self._route.acting, self._with)
        if found is None:
            super().replay()
        else:
            # The same stream as `torch.cuda.current_stream`, which takes 3 us.
            found.launch(torch._C._cuda_getCurrentRawStream(self._device))

    def _replay_first(self) -> None:
        """Replay the whole graph, and find out whether it draws random numbers. If it does, torch
        writes their offset before each replay, but not for a graph without some taps."""
        generator = torch.cuda.default_generators[self._device]
        before = generator.get_offset()
        super().replay()
        self._uses_random = generator.get_offset() != before
        if self._uses_random:
            self._variants = None

    def _with(self, acting: NDArray[np.bool_]) -> driver.Executable | None:
        assert self._nodes is not None
        if self._refused or torch.cuda.mem_get_info(self._device)[0] < LEAST_FREE:
            return None
        left_out = [
            node for node, acts in zip(self._nodes.values(), acting, strict=True) if not acts
        ]
        try:
            return driver.without(self.raw_cuda_graph(), left_out)
        except driver.DriverError as error:
            logger.warning("vllm-scope: idle taps stay in a CUDA graph: %s", error)
            self._refused = True
            return None

    def reset(self) -> None:
        if self._variants is not None:
            self._variants.clear()
        super().reset()


def _drop(executable: driver.Executable) -> None:
    torch.cuda.synchronize()  # the graph may still run
    executable.destroy()


def noted(route: Route, tap: int) -> AbstractContextManager[None]:
    """A context in which a tap's kernel is captured: the TappedGraph, if there is one, notes it."""
    graph = TappedGraph.capturing
    return nullcontext() if graph is None else graph.noted(route, tap)


class _Made(type):
    """The metaclass of a class whose calls make TappedGraphs."""

    def __call__(cls, keep_graph: bool = True) -> TappedGraph:
        # The captured graph is kept beside its executable form, because graphs without some taps
        # are made from the captured graph.
        return TappedGraph(keep_graph=True)

    def __instancecheck__(cls, one: object) -> bool:
        return isinstance(one, torch.cuda.graphs.CUDAGraph)

    def __getattr__(cls, name: str) -> Any:
        return getattr(torch.cuda.graphs.CUDAGraph, name)


class _Captured(metaclass=_Made):
    """Stands in for torch.cuda.CUDAGraph. It is a class, because modules that are imported
    inside `captured` may use that name in type hints."""


@contextmanager
def captured() -> Iterator[None]:
    """A context. Graphs that are captured in it are TappedGraphs, if this machine's driver has the
    calls that a TappedGraph needs."""
    if torch.version.cuda is None or not torch.cuda.is_available() or not driver.is_there():
        yield
        return
    with patch.object(torch.cuda, "CUDAGraph", _Captured):
        yield
