"""Counts the nodes of a CUDA graph, and makes a graph without some of its nodes.

Owns:  the calls of the CUDA driver (libcuda, 12.3 or later).
Runs:  in workers on NVIDIA GPUs, on the thread that captures and replays.

Functions get graphs, nodes and streams as addresses (int). If the driver returns an error, a
function raises a DriverError. Only `last_kernel` returns None instead.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import suppress
from functools import cache
from typing import Any

_Handle = ctypes.c_void_p
_KERNEL_NODE = 0
#: The flag with which torch instantiates its graphs.
_FREE_ON_LAUNCH = ctypes.c_ulonglong(1)


class DriverError(RuntimeError):
    """The CUDA driver refused a call, or does not have the function."""


class _EdgeData(ctypes.Structure):
    _fields_ = [("bytes", ctypes.c_ubyte * 8)]


def is_there() -> bool:
    """True if this machine has a CUDA driver with all functions in _NAMES."""
    try:
        library = _library()
        return all(hasattr(library, name) for name in _NAMES)
    except OSError:
        return False


_NAMES = (
    "cuStreamGetCaptureInfo_v2", "cuGraphClone", "cuGraphNodeFindInClone", "cuGraphDestroyNode",
    "cuGraphNodeGetType", "cuGraphGetNodes", "cuGraphNodeGetDependencies_v2",
    "cuGraphNodeGetDependentNodes_v2", "cuGraphAddDependencies_v2", "cuGraphInstantiateWithFlags",
    "cuGraphDestroy", "cuGraphLaunch", "cuGraphExecDestroy",
)  # fmt: skip


@cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, *arguments: Any) -> None:
    code = getattr(_library(), name)(*arguments)
    if code:
        raise DriverError(f"{name} returned CUDA error {code}.")


def num_nodes(graph: int) -> int:
    count = ctypes.c_size_t()
    _call("cuGraphGetNodes", _Handle(graph), None, ctypes.byref(count))
    return count.value


def last_kernel(stream: int) -> int | None:
    """The graph's node for the kernel that was captured last on a stream. None if the last node is
    no kernel, if there are several last nodes or none, or if the driver returns an error."""
    status, number, count = ctypes.c_int(), ctypes.c_uint64(), ctypes.c_size_t()
    graph, nodes = _Handle(), ctypes.POINTER(_Handle)()
    kind = ctypes.c_int()
    try:
        _call(
            "cuStreamGetCaptureInfo_v2", _Handle(stream), ctypes.byref(status),
            ctypes.byref(number), ctypes.byref(graph), ctypes.byref(nodes), ctypes.byref(count),
        )  # fmt: skip
        if count.value != 1:
            return None
        _call("cuGraphNodeGetType", _Handle(nodes[0]), ctypes.byref(kind))
    except DriverError:
        return None
    return nodes[0] if kind.value == _KERNEL_NODE else None


class Executable:
    """An executable graph."""

    def __init__(self, handle: int) -> None:
        self._handle: _Handle | None = _Handle(handle)
        self._launch = _library().cuGraphLaunch

    def launch(self, stream: int) -> None:
        if code := self._launch(self._handle, _Handle(stream)):
            raise DriverError(f"cuGraphLaunch returned CUDA error {code}.")

    def destroy(self) -> None:
        """Free the graph. The caller must first wait until the graph no longer runs."""
        handle, self._handle = self._handle, None
        if handle is not None:
            _call("cuGraphExecDestroy", handle)

    def __del__(self) -> None:
        with suppress(DriverError):  # when the process ends, CUDA can be closed already
            self.destroy()


def without(graph: int, nodes: Sequence[int]) -> Executable:
    """Make an executable graph without some of the nodes of `graph`. In the new graph, the nodes
    that waited for a removed node wait for the nodes before it.

    Args:
        graph: the captured graph, which is not changed.
        nodes: the nodes of `graph` to leave out.

    Returns:
        A graph that uses the same memory as `graph`.
    """
    copy = _Handle()
    _call("cuGraphClone", ctypes.byref(copy), _Handle(graph))
    try:
        for node in nodes:
            here = _Handle()
            _call("cuGraphNodeFindInClone", ctypes.byref(here), _Handle(node), copy)
            _take_out(copy, here)
        found = _Handle()
        _call("cuGraphInstantiateWithFlags", ctypes.byref(found), copy, _FREE_ON_LAUNCH)
    finally:
        _call("cuGraphDestroy", copy)
    assert found.value is not None
    return Executable(found.value)


def _take_out(graph: _Handle, node: _Handle) -> None:
    before = _around("cuGraphNodeGetDependencies_v2", node)
    after = _around("cuGraphNodeGetDependentNodes_v2", node)
    _call("cuGraphDestroyNode", node)
    for one in before:
        have = set(_around("cuGraphNodeGetDependentNodes_v2", _Handle(one)))
        for other in set(after) - have:
            # An edge without edge data makes the later node wait for the end of the earlier node.
            _call(
                "cuGraphAddDependencies_v2", graph, ctypes.byref(_Handle(one)),
                ctypes.byref(_Handle(other)), None, ctypes.c_size_t(1),
            )  # fmt: skip


def _around(name: str, node: _Handle) -> list[int]:
    count = ctypes.c_size_t()
    _call(name, node, None, None, ctypes.byref(count))
    if not count.value:
        return []
    nodes, edges = (_Handle * count.value)(), (_EdgeData * count.value)()
    _call(name, node, nodes, edges, ctypes.byref(count))
    return [one for one in nodes if one is not None]
