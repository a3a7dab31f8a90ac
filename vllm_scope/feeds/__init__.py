"""Sends mixed rows of a data set to a trainer on the engine's host, through shared memory.

Runs:  the engine's side runs in a process that the feed starts. If the caller gave an LLM instead
       of a model's name, the engine's side runs on a thread of the trainer's process.

`vllm_scope.stream` calls `start_feed` in start.py.

mix.py       computes the rows of each batch from counts and a seed
memory.py    the shared memory: slots of rows, and two counters
messages.py  the messages from the feeder to the trainer
feeder.py    the engine's side: writes rows of documents to the memory
start.py     starts a feed
row_feed.py  the trainer's side: returns batches
"""
