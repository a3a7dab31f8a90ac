"""The way back: from a worker to the front-end process that asked.

ring.py      host memory for rows, of a worker; front-ends map it
messages.py  what travels, and to which address
senders/     a worker's end: shared memory, TCP
receiver.py  a front-end's end
folders.py   folders that end with their process
"""
