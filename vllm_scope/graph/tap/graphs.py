"""CUDA graphs that are replayed without the taps that do nothing in a step.

Owns:  TappedGraph; the context managers `captured` (capture of graphs) and `noted` (capture of
       taps).
Runs:  in workers on NVIDIA GPUs, on the main thread.
From:  op.   To: driver.

A reduced graph is a copy of a captured graph, without some of the captured graph's taps.

Promise: a replay of a reduced graph computes the same values as a replay with all taps. A GPU needs
1.0 to 1.7 us to start a tap that does nothing (measured on an H100). If all sites of 32 layers have
taps, such starts take 0.4 ms or more of each step.
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

#: After PAYS * num_nodes starts of taps that do nothing, a reduced graph without these taps is
#: made. num_nodes is the number of nodes of the captured graph. All these starts together take
#: about as long as making the reduced graph: 12 to 20 us for each node (measured on an H100).
PAYS = 12
#: If the device has fewer free bytes than LEAST_FREE, no reduced graph is made. A reduced graph
#: takes 4 KiB per node.
LEAST_FREE = 1 << 30
#: For one captured graph, at most this many reduced graphs are kept. When one more is made, the
#: least recently used reduced graph is dropped.
MOST = 4
#: A captured graph with fewer taps than LEAST_TAPS (such as a piece of a prefill) is always
#: replayed whole.
LEAST_TAPS = 4


class Route(Protocol):
    """The data of a step that TappedGraph needs to choose a graph."""

    @property
    def acting(self) -> NDArray[np.bool_] | None:
        """bool [num_taps], True for taps that do something in the next forward. None if every tap
        does nothing. If the values change, the property returns a new array object."""


class Kept(NamedTuple):
    """A reduced graph.

    Attributes:
        acting: bool [number of taps of the captured graph], True for the taps of the reduced graph.
        made: the graph that `make` returned.
    """

    acting: NDArray[np.bool_]
    made: Any


class Variants:
    """Chooses the graph for a replay: the whole captured graph, or a reduced graph.

    Args:
        taps: the numbers of the captured graph's taps.
        num_nodes: the number of nodes of the captured graph.
        drop: a function that frees a reduced graph.
    """

    def __init__(self, taps: list[int], num_nodes: int, drop: Callable[[Any], None]) -> None:
        self._taps = np.array(taps, np.int64)
        self._pays = PAYS * num_nodes
        self._drop = drop
        self._kept: dict[bytes, Kept] = {}
        self._in_vain: dict[bytes, int] = {}
        self._none = np.zeros(len(taps), bool)
        #: `_last`: the argument `acting` of the last call of `of`. `_found`: the result of this
        #: call. If a later call with the same argument can have another result, `_last` is `_none`.
        self._last: NDArray[np.bool_] | None = self._none
        self._found: Any = None

    def of(
        self, acting: NDArray[np.bool_] | None, make: Callable[[NDArray[np.bool_]], Any | None]
    ) -> Any:
        """The graph to replay for a step: a reduced graph from `make`, or None for the whole graph.

        Args:
            acting: the value of Route.acting for the step.
            make: a function that makes a reduced graph. The function's argument is bool
                [len(taps)], True for the taps that the reduced graph must have. The function
                returns None if no reduced graph can be made.
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
            self._kept[key] = kept  # the last entry is the most recently used graph
            self._last, self._found = acting, kept.made
            return kept.made
        self._last = self._none
        return self._least(here)

    def _paid(
        self, key: bytes, here: NDArray[np.bool_],
        make: Callable[[NDArray[np.bool_]], Any | None],
    ) -> Kept | None:  # fmt: skip
        """Make a reduced graph with only the taps in `here`, if this saves time. None if no graph
        is made."""
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
        """The smallest kept graph that has all taps in `here`. None if no kept graph has all these
        taps."""
        fit = [kept for kept in self._kept.values() if not (here & ~kept.acting).any()]
        return min(fit, key=lambda kept: int(kept.acting.sum())).made if fit else None

    def clear(self) -> None:
        for kept in self._kept.values():
            self._drop(kept.made)
        self._kept.clear()
        self._last, self._found = self._none, None


class TappedGraph(torch.cuda.CUDAGraph):
    """A captured CUDA graph that is replayed without the taps that do nothing in the step."""

    #: The graph that vLLM captures now. vLLM captures only one graph at a time.
    capturing: TappedGraph | None = None
    #: Maps a tap's number to the node of the tap's kernel. None if a tap has several kernels or
    #: none.
    _nodes: dict[int, int] | None = None
    _route: Route | None = None
    _variants: Variants | None = None
    _uses_random: bool | None = None
    #: True if the driver could not make a reduced graph.
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
            with suppress(driver.DriverError):  # if this fails, the graph is always replayed whole
                num_nodes = driver.num_nodes(self.raw_cuda_graph())
                # `_drop` is a function, not a method. A method would refer to this graph, and this
                # cycle would delay the graph's deletion.
                self._variants = Variants(list(self._nodes), num_nodes, _drop)

    @contextmanager
    def noted(self, route: Route, tap: int) -> Iterator[None]:
        """A context manager that stores the node of the kernel captured in its `with` block."""
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
            # This private function returns the current stream faster than
            # `torch.cuda.current_stream`, which takes 3 us.
            found.launch(torch._C._cuda_getCurrentRawStream(self._device))

    def _replay_first(self) -> None:
        """Replay the whole graph, and find out whether the graph draws random numbers. Before each
        replay of such a graph, torch must write the generator's offset. torch does not do this for
        a reduced graph. Therefore a graph that draws random numbers is always replayed whole."""
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
    torch.cuda.synchronize()  # wait, because the graph can still run
    executable.destroy()


def noted(route: Route, tap: int) -> AbstractContextManager[None]:
    """A context manager for the capture of a tap's kernel. If vLLM captures a TappedGraph now, this
    graph stores the node of the kernel."""
    graph = TappedGraph.capturing
    return nullcontext() if graph is None else graph.noted(route, tap)


class _Made(type):
    """The metaclass of a class whose constructor returns TappedGraphs."""

    def __call__(cls, keep_graph: bool = True) -> TappedGraph:
        # torch must keep the captured graph, from which reduced graphs are made.
        return TappedGraph(keep_graph=True)

    def __instancecheck__(cls, one: object) -> bool:
        return isinstance(one, torch.cuda.graphs.CUDAGraph)

    def __getattr__(cls, name: str) -> Any:
        return getattr(torch.cuda.graphs.CUDAGraph, name)


class _Captured(metaclass=_Made):
    """Replaces torch.cuda.CUDAGraph. This must be a class, because modules that are imported inside
    `captured` can use the name `torch.cuda.CUDAGraph` in type hints."""


@contextmanager
def captured() -> Iterator[None]:
    """A context manager. If the CUDA driver has the functions that a TappedGraph needs, graphs that
    are captured inside the `with` block are TappedGraphs."""
    if torch.version.cuda is None or not torch.cuda.is_available() or not driver.is_there():
        yield
        return
    with patch.object(torch.cuda, "CUDAGraph", _Captured):
        yield
