"""Speed, always as a ratio to plain vLLM in the same run.

throughput.py   starts the engines, takes turns between them, prints the table
engine.py       one engine in a process of its own, told by lines of JSON what to run
shapes.py       models by their shape, with random weights
"""

from __future__ import annotations

import os

# As the Makefile has them: with its own default for a CPU's cache vLLM takes most of the memory.
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
