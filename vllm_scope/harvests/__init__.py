"""Computes the rows of whole data sets, and writes the rows to shards. A killed harvest can resume.

Runs:  in the harvesting process. The engine runs in vLLM's processes.

The code of `vllm_scope.harvest` begins in start.py.

start.py       checks a harvest's arguments, locks its folder, and starts its engine
documents.py   reads data sets as documents with ids, and computes fingerprints of data sets
contexts.py    makes prompts (contexts): truncates, splits or packs documents
skipped.py     counts the documents and contexts that a harvest skips, with the reasons
computing.py   computes the rows of documents with an engine
engines.py     protocols of the engine that computes rows and of the store that writes the rows
job.py         the loop from documents to shards
storing.py     writes the rows of one engine to shards
several.py     divides contexts among several engines, and replaces lost engines
member.py      one of several engines, in a separate process
pools.py       protocols of the pools that start members
processes.py   a pool of processes on this host
ray_pool.py    a pool of Ray actors on a cluster
guard.py       ends an engine's processes after the process that started them has ended
shards.py      the contexts, hashes and figures of the visible shards
statistics.py  figures of a stream's rows
manifest.py    `harvest.json`, and the lock of a folder
progress.py    the progress line on standard error
"""
