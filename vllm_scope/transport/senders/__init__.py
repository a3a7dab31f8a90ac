"""A worker's end of the road: one sender for each front-end that connected.

base.py     what a sink needs of a sender
shared.py   to a front-end that maps this worker's ring
tcp.py      to one that cannot: rows follow their header, encrypted

From:  sinks.memory.   To: receiver.

Promise: a sender exists only where its road was tried: the front-end has mapped the
ring, or has answered over TCP. A span of the ring stays leased until the front-end
has read it, so a worker's memory is bounded by the ring and nothing is lost to a slow
front-end. A dead one is noticed, and its leases released; one that lives and does not
read is given up when the ring has waited long enough for it.
"""

from vllm_scope.transport.senders.base import Road, Sender
from vllm_scope.transport.senders.shared import SharedSender
from vllm_scope.transport.senders.tcp import TcpSender

__all__ = ["Road", "Sender", "SharedSender", "TcpSender"]
