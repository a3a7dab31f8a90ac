"""What a worker does around each forward. Does not import vLLM.

plan.py        from a batch to the program of each token
planned.py     the requests with taps, as columns
step_plan.py   the programs of a step's rows and their slots in the arena
arena.py       a ring of rows in device memory
drain.py       from the arena to host memory and labelled batches, on its own thread and stream
packer.py      rows gathered, and worked on by heads, on their way out of the arena
slot_views.py  views of the arena's slots, for packer and summing
probe_bank.py  the probes of one place, computed for many rows at once
held_saes.py   the encoders of SAEs, and the strongest features of many rows at once
maxima.py      kernels of held_saes: the largest feature of each group, and in topk.py the strongest
summing.py     rows that are added to sums on the device; squares.py has its kernels
lens.py        the model's norm and unembedding, and the likeliest tokens of many rows at once
score_store.py scores of KV blocks, for requests that use the prefix cache
watch.py       which running requests a probe stops, where a next stage begins, what policies decide
"""
