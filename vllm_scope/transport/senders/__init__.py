"""The worker's end of a connection: one sender for each front-end.

base.py    Sender, the interface that the memory sink uses
shared.py  sends to a front-end that maps this worker's ring
tcp.py     sends to a front-end that cannot map the ring; rows are encrypted and follow their header

From:  sinks.memory.   To: receiver.

Promise: the constructor of a sender tests the transport. The constructor returns only after the
front-end has mapped the ring, or has answered over TCP. A span of the ring stays leased until the
front-end has read the span. Therefore the ring bounds the worker's memory, and a slow front-end
loses no rows. If the front-end's process ends, the worker releases the leases of its rows. If the
front-end runs but does not read, and the worker has waited `deliver_timeout_s` for room in the
ring, the worker revokes the front-end.
"""

from vllm_scope.transport.senders.base import Road, Sender
from vllm_scope.transport.senders.shared import SharedSender
from vllm_scope.transport.senders.tcp import TcpSender

__all__ = ["Road", "Sender", "SharedSender", "TcpSender"]
