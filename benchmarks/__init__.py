"""Speed, always as a ratio to plain vLLM in the same run.

throughput.py   starts the engines, takes turns between them, prints the table
engine.py       one engine in a process of its own, told by lines of JSON what to run
shapes.py       models by their shape, with random weights
"""
