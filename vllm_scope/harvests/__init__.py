"""Rows of whole data sets: documents in, shards of rows out. A killed harvest resumes.

Runs:  in the harvesting process; the engine runs in vLLM's processes.

`vllm_scope.harvest` begins in start.py.

start.py       arguments, folder and engine of a harvest
documents.py   data sets as documents with ids, and their fingerprints
contexts.py    documents as prompts: truncated, split or packed
skipped.py     the documents and contexts that a harvest skips, and why
computing.py   from documents to their rows, on an engine
engines.py     protocols: the engine that computes rows, and the store that writes them
job.py         the loop from documents to shards
storing.py     rows of one engine into shards
several.py     several engines: which contexts each engine gets, how a lost engine is replaced
member.py      one engine of several, in a process of its own
pools.py       protocols for starting members: processes.py on this host, ray_pool.py on a cluster
guard.py       ends an engine's processes when the process that started them is gone
shards.py      the contexts, hashes and figures of the visible shards
statistics.py  figures of a stream's rows
manifest.py    `harvest.json`, and the lock of a folder
progress.py    the progress line on standard error
"""
