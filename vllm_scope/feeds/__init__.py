"""Rows of a data set for a trainer on the same host, mixed, through memory that both share.

Runs:  the engine's front-end runs in a process of its own, or on a thread if an LLM was given; the
       trainer takes batches in its own process.

`vllm_scope.stream` begins in start.py.

mix.py       which rows each batch has, as a function of counts and a seed
memory.py    the shared memory: slots of rows, and two counters
messages.py  the messages between the two sides, beside the rows
feeder.py    from documents to the memory; the engine's process
start.py     starts a feed
row_feed.py  the trainer's side: batches
"""
