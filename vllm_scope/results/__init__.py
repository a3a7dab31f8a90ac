"""What arrives in a front-end, until the caller has it.

inbox.py   all requests whose rows are on their way
buffer.py  the rows of one of them
budget.py  how much all of them may hold, and each caller
result.py  what the caller holds
column.py  one stream or probe of a result, to pass on
cursor.py  what is new of a request that streams
"""
