"""Two hosts on one machine: network namespaces with a cable between them.

Each has its own network, process ids, host name, /dev/shm, /mnt and TMPDIR; they share the disk, as
hosts of a cluster share a file system. A process of one cannot map memory of the other.
"""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

#: What a host has for itself. /mnt, because a path of a unix socket has at most 107 bytes.
_PRIVATE = "mount -t tmpfs tmpfs /dev/shm && mount -t tmpfs tmpfs /mnt && hostname {name}"


@dataclass(frozen=True)
class Host:
    """A host.

    Attributes:
        address: its IPv4 address, by which the other one reaches it.
        pid: of its first process.
    """

    name: str
    address: str
    pid: int

    def start(self, *command: str, env: dict[str, str], **options: Any) -> subprocess.Popen[str]:
        """Start a command there."""
        own = {"TMPDIR": "/mnt", "VLLM_HOST_IP": self.address}
        inside = ["nsenter", "-t", str(self.pid), "-m", "-u", "-i", "-n", "-p", "--", *command]
        return subprocess.Popen(inside, env=env | own, text=True, **options)


def why_not() -> str | None:
    """Why this machine cannot have hosts; None if it can."""
    if missing := [name for name in ("ip", "nsenter", "unshare") if shutil.which(name) is None]:
        return f"{' and '.join(missing)} missing; Debian has them in iproute2 and util-linux"
    name = f"vs{secrets.token_hex(3)}"
    made = _run("ip", "netns", "add", name)
    if made.returncode:
        return f"network namespaces are not allowed here: {made.stderr.strip()}"
    command = ["unshare", "--mount", "--pid", "--fork", "--mount-proc", "--uts", "--ipc", "bash"]
    tried = _run("ip", "netns", "exec", name, *command, "-c", _PRIVATE.format(name="a"))
    _run("ip", "netns", "del", name)
    return f"namespaces are not allowed here: {tried.stderr.strip()}" if tried.returncode else None


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True)


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Two hosts that reach each other; all of their processes end with them."""
    token = secrets.token_hex(3)
    names = [f"vs{token}{end}" for end in "ab"]
    net = f"10.{200 + secrets.randbelow(50)}.{secrets.randbelow(250)}"
    holders: list[subprocess.Popen[bytes]] = []
    try:
        for name in names:
            _checked("ip", "netns", "add", name)
        _checked("ip", "link", "add", names[0], "type", "veth", "peer", "name", names[1])
        hosts = []
        for number, name in enumerate(names, 1):
            address = f"{net}.{number}"
            _checked("ip", "link", "set", name, "netns", name)
            inside = ("ip", "-n", name)
            _checked(*inside, "addr", "add", f"{address}/24", "dev", name)
            _checked(*inside, "link", "set", name, "up")
            _checked(*inside, "link", "set", "lo", "up")
            _checked(*inside, "route", "add", "default", "dev", name)
            holders.append(_first_process(name))
            hosts.append(Host(name, address, _child_of(holders[-1].pid)))
        yield hosts[0], hosts[1]
    finally:
        for holder in holders:
            holder.kill()  # and with it the first process, and with that all others
            holder.wait()
        for name in names:
            _run("ip", "netns", "del", name)


def _first_process(name: str) -> subprocess.Popen[bytes]:
    script = f"{_PRIVATE.format(name=name)} && touch /mnt/ready && exec sleep infinity"
    return subprocess.Popen(
        ["ip", "netns", "exec", name, "unshare", "--mount", "--pid", "--fork", "--kill-child",
         "--mount-proc", "--uts", "--ipc", "bash", "-c", script],
    )  # fmt: skip


def _child_of(pid: int) -> int:
    """The first process of a host, once it is ready."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        children = psutil.Process(pid).children()
        if children and Path(f"/proc/{children[0].pid}/root/mnt/ready").exists():
            return children[0].pid
        time.sleep(0.02)
    raise TimeoutError(f"host of process {pid} did not start")


def _checked(*command: str) -> None:
    found = _run(*command)
    assert found.returncode == 0, (command, found.stderr)


def networks_of(pids: Sequence[int]) -> set[str]:
    """The network namespaces of processes; of those that run."""
    found = set()
    for pid in pids:
        with suppress(OSError):
            found.add(os.readlink(f"/proc/{pid}/ns/net"))
    return found
