"""Batches of rows, taken apart and put together.

by_request.py   splits a batch into the parts of its requests
by_position.py  makes one row per position from all rows of a stream; the last computed row holds
"""
