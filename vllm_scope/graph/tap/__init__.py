"""The op that is traced into the model's graph: definition, kernel, tables.

definition.py  what a tap does, in torch and numpy: it runs on the CPU, and the kernel must equal it
kernel.py      what a tap does, in Triton: one program instance per token row
states.py      states of gates: how a tap advances them, and where they are kept
tables.py      the device tables that tell a tap what to do, refilled between steps
program_tables.py  the part of the tables that holds programs and vectors of running requests
places.py      which row of a table belongs to which content
staging.py     host memory from which a step's table is uploaded
op.py          the registered op, which runs the definition or the kernel
graphs.py      CUDA graphs that are replayed without the taps that do nothing
driver.py      the calls of the CUDA driver that graphs.py needs
"""
