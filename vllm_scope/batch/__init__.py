"""A batch of rows, taken apart.

by_request.py   one batch -> the part of each request
by_position.py  all that came of a stream -> one row for each position
"""
