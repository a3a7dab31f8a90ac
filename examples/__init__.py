"""Programs that show vllm-scope at work: `python -m examples.demo`, `python -m
examples.faces.NAME`, `python examples/sinks/run.py FOLDER`."""
