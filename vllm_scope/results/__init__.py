"""Rows that arrive in a front-end, until the caller has them.

inbox.py   all requests of this process whose rows arrive
buffer.py  the rows of one request
table.py   a request's values by column, in order of arrival; what a snapshot sees of them
allocator.py  memory for values, which is used again
copiers.py    the threads that copy values into this memory
budget.py  how many bytes all requests, and the requests of one key, may hold
result.py  ScopeResult, which the caller reads
snapshot.py   where the values of a snapshot are
streams.py the rows of a result's streams
scores.py  the scores of a result's probes
features.py  the features of a result's SAEs
lens.py      the tokens of a result's lenses
column.py  one stream or probe of a result, for the server
cursor.py  the new values of a request that streams
following.py  how far a stream or a probe of such a request was followed
"""
