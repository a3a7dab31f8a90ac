"""vLLM's HTTP server."""
