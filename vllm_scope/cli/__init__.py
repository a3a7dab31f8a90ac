"""`vllm-scope`, the command for people."""

from vllm_scope.cli.main import app

__all__ = ["app"]
