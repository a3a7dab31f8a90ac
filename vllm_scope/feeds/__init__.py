"""Mixed rows of a data set for a trainer on the engine's host, through shared memory.

Runs:  the engine's front-end runs in a process that the feed starts, or, if an LLM was given, on a
       thread of the trainer's process. The trainer takes batches in its own process.

`vllm_scope.stream` calls `start_feed` in start.py.

mix.py       which rows each batch has, as a function of counts and a seed
memory.py    the shared memory: slots of rows, and two counters
messages.py  the messages between the two sides, beside the rows
feeder.py    from documents to the memory; the engine's process
start.py     starts a feed
row_feed.py  the trainer's side: batches
"""
