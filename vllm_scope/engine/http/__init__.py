"""The code that runs in vLLM's HTTP server.

serving.py  adds scopes to answers, and adds this package's routes
calls.py    calls the engine for the routes
sweeps.py   runs the sweeps of an API server, and divides the share of a step among them
"""
