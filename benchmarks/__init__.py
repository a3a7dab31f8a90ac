"""Benchmarks, mostly of speed, and mostly as a ratio to another system in the same run.

turns.py         modes that take turns, and the ratios of their figures
throughput.py    starts the engines, takes turns between them, prints the table
systems.py       how each system of the table starts, in a process of its own
engine.py        one engine in such a process; lines of JSON say what it runs
interp_engine.py interp-engine's static backend, with the same lines
huggingface.py   Hugging Face's model, with the same lines
values.py        rows that an engine delivered, compared with Hugging Face's
causal_maps.py   a causal map by a sweep, by TransformerLens and by hooks
shapes.py        models by their shape, with random weights
budget.py        the host's time for the parts of a step
entry.py         the host's time for a monitored request, without a model
delivery.py      the speed at which rows reach the caller, without an engine
taps.py          the time of a tap on a GPU
codecs.py        the error and the size of each codec
disk.py          the speed at which files are written
http.py          a server's clients: throughput
soak.py          a server's clients: half an hour of mixed load
server.py        a server in a process of its own

The other modules of this folder describe themselves in their docstrings. The environment variable
OUT names the folder of logs.
"""

from __future__ import annotations

import os

# The Makefile sets the same values. By default, vLLM's KV cache on a CPU takes most of the memory.
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
