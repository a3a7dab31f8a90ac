"""The op that is traced into the model's graph: meaning, kernel, tables.

definition.py   what a tap does, in torch and numpy; the CPU runs it, the kernel must equal it
kernel.py       the same in Triton, one program instance per token row
tables.py       the device tables that tell a tap what to do, refilled between steps
places.py       which row of a table belongs to what
staging.py      host memory from which a step's table is uploaded
op.py           the registered op, which picks one of the two
"""
