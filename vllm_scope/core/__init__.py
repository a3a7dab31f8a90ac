"""What EngineCore keeps, without a line of vLLM.

registry.py   what the names of modules and the server's own edits mean
admission.py  which requests have places in the workers' tables, and which wait for room
"""
