"""Programs that show how to use vllm-scope: `python -m examples.demo`, `python -m
examples.faces.NAME`, `python examples/sinks/run.py FOLDER`."""
