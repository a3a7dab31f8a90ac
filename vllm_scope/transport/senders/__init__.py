"""The worker's end: one sender for each front-end.

base.py    Sender, the interface that the memory sink uses
shared.py  sends to a front-end that maps this worker's ring
tcp.py     sends to a front-end that cannot map it: rows follow their header, encrypted

From:  sinks.memory.   To: receiver.

Promise: a sender exists only after a test of its transport: the front-end has mapped the
ring, or has answered over TCP. A span of the ring stays leased until the front-end has
read it, so a worker's memory is bounded by the ring and a slow front-end loses nothing.
The leases of a dead front-end are released. A front-end that is alive but does not read is
revoked when the ring has waited `deliver_timeout_s` for it.
"""

from vllm_scope.transport.senders.base import Road, Sender
from vllm_scope.transport.senders.shared import SharedSender
from vllm_scope.transport.senders.tcp import TcpSender

__all__ = ["Road", "Sender", "SharedSender", "TcpSender"]
