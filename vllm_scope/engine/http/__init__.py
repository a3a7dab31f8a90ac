"""In vLLM's HTTP server.

serving.py  a scope in each answer, and our routes beside vLLM's
"""
