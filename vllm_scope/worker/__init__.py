"""What happens in a worker around each forward, without a line of vLLM.

plan.py    batch -> which row gets which program, and where in the arena it goes
arena.py   a ring of rows on the device
drain.py   arena -> host ring -> labelled batches, on a thread and a stream of its own
packer.py  rows gathered and encoded on their way out of the arena
"""
