"""The op in the model's compiled graph: its definition, its kernel, its tables.

definition.py  what a tap does, in torch and numpy: the definition of the kernel's results
kernel.py      what a tap does, in Triton: one program instance per token row
states.py      how a tap advances the states of gates, and where the states are stored
tables.py      the device tables that say what each tap does in a step
program_tables.py  the part of the tables with programs and vectors of running requests
places.py      assigns rows of tables to programs, vectors and operations
staging.py     host memory from which a step's table is uploaded
op.py          the registered op, which runs the definition or the kernel
graphs.py      CUDA graphs without the taps that do nothing in a step
driver.py      the calls of the CUDA driver for graphs.py
"""
