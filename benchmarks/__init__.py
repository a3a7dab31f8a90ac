"""Speed, always as a ratio to plain vLLM in the same run.

turns.py         modes that take turns, and what their turns say of a ratio
throughput.py    starts the engines, takes turns between them, prints the table
systems.py       how each system of the table starts, in a process of its own
engine.py        one engine in such a process, told by lines of JSON what to run
interp_engine.py interp-engine's static backend, told the same way
huggingface.py   Hugging Face's model, told the same way
values.py        rows that an engine delivered, beside Hugging Face's
causal_maps.py   a causal map by a sweep, by TransformerLens and by hooks
shapes.py        models by their shape, with random weights
budget.py        where a step's time on the host goes
entry.py         what a monitored request costs on the host, without a model
delivery.py      how fast rows reach the caller, without an engine
taps.py          what a tap costs on a GPU
codecs.py        what codecs lose
disk.py          how fast files are written
http.py          a server's clients: throughput
soak.py          a server's clients: half an hour of mixed load
server.py        a server in a process of its own

The environment's OUT is a folder for the logs of engines and servers.
"""

from __future__ import annotations

import os

# As the Makefile has them: with its own default for a CPU's cache vLLM takes most of the memory.
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
