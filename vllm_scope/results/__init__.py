"""Receives the rows of requests in a front-end, and makes the results for callers.

inbox.py   all requests of this process whose rows arrive
buffer.py  the rows of one request
table.py   a request's values by column, in order of arrival
allocator.py  memory for values, which the allocator uses again
copiers.py    the threads that copy values into this memory
budget.py  the limits of bytes for all requests, and for the requests of one API key
result.py  ScopeResult, which the caller reads
snapshot.py   the interface through which values of a snapshot are read
streams.py the rows of a result's streams
scores.py  the scores of a result's probes
features.py  the features of a result's SAEs
lens.py      the tokens of a result's lenses
column.py  one stream or probe of a result, for the server
cursor.py  the new values of a streaming request
following.py  the positions of a stream or a probe that are already returned
"""
