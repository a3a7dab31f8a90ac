"""Sends rows from a worker to the front-end process that requested the rows.

spans.py     a ring of slots; allocates adjacent slots together, in the order of the ring
ring.py      host memory for rows: HostRing in the worker, RingReader in front-ends
messages.py  the messages, and the address of a front-end
senders/     the worker's end of a connection: shared memory or TCP
receiver.py  the front-end's end of all connections
mapped.py    the rings that the front-end maps
listener.py  the front-end's TCP socket, and the check of the peers that connect
folders.py   folders that are removed when their process ends
"""
