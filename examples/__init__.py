"""Programs that show vllm-scope at work, each run as `python -m examples.<name>`."""
