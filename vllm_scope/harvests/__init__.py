"""Rows of whole data sets: documents in, shards of rows out, resumed after a kill.

Runs:  in the harvesting process; the engine in vLLM's.

`vllm_scope.harvest` begins in start.py.

start.py       arguments, folder and engine of a harvest
documents.py   data sets as documents with ids, and their fingerprints
contexts.py    documents as prompts: truncated, split or packed
skipped.py     what is passed over, and why
computing.py   from documents to their rows, on an engine
engines.py     what a harvest asks of an engine, and of what writes its rows
job.py         the loop from documents to shards
storing.py     rows of one engine into shards
several.py     several engines: who computes what, and what becomes of a lost one
member.py      one of them, in a process of its own
pools.py       what starts such processes; processes.py on this host, ray_pool.py on a cluster
guard.py       ends the processes of an engine with the one that started them
shards.py      what the visible shards hold: contexts, hashes, figures
statistics.py  figures of a stream's rows
manifest.py    `harvest.json`, and the lock of a folder
progress.py    the line that a person sees
"""
