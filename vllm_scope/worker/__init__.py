"""What a worker does around each forward. Does not import vLLM.

plan.py        from a batch to the program of each token
planned.py     the requests with taps, as columns
step_plan.py   the programs of a step's rows and their slots in the arena
arena.py       a ring of rows in device memory
drain.py       takes what leaves the arena, and has a thread that delivers it
pace.py        when this thread looks, sleeps and rests
drain_items.py what waits for it, and which steps go on their way together
filler.py      from the arena to the ring; side_stream.py is the GPU's stream for that
deliverer.py   from the ring to the sink, as labelled batches
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
