"""Rows that arrive in a front-end, until the caller has them.

inbox.py   all requests of this process whose rows arrive
buffer.py  the rows of one request
table.py   its values by column, in order of arrival; what a snapshot sees of them
allocator.py  memory for its values, which is used again
copiers.py    the threads that copy values there
budget.py  how many bytes all requests, and the requests of one key, may hold
result.py  ScopeResult, which the caller reads
snapshot.py   where the values of one are
streams.py the rows of its streams
scores.py  the scores of its probes
features.py  the features of its SAEs
lens.py      the tokens of its lenses
column.py  one stream or probe of a result, for the server
cursor.py  what is new in a request that streams
following.py  how far a stream of it was followed
"""
