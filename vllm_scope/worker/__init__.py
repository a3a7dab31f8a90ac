"""The work of a worker before and after each forward. This folder does not import vLLM.

plan.py        finds the program of each token of a batch
planned.py     holds the requests with taps, as arrays
walks.py       finds where the states of gates are, for each row of a step
step_plan.py   finds the program and the arena slots of each row of a step
arena.py       a ring of slots for rows in device memory
drain.py       takes regions of the arena, and owns the thread that delivers their rows
pace.py        decides when the drain thread works, sleeps and rests
drain_items.py the items that wait for the drain thread, and the rules by which steps are joined
filler.py      copies rows from the arena to the ring
side_stream.py the CUDA stream on which these copies run
deliverer.py   gives rows in the ring to the sink, as labelled batches
packer.py      gathers the rows of a region, and applies heads to the rows
slot_views.py  views of rows in slots, for packer and summing
probe_bank.py  computes the probes of one place for many rows together
held_saes.py   holds encoders of SAEs; computes the strongest features of many rows together
maxima.py      finds the largest feature of each group, in a kernel for held_saes
topk.py        finds the strongest features of each row, in a kernel for held_saes
summing.py     adds rows to sums on the device
summed_rows.py the rows of requests with Moments, before they are added to sums
kept_sums.py   all sums of a worker, in memory that is reserved at the start
device_sums.py the sums of one name, place and label
squares.py     kernels for these sums
lens.py        computes the likeliest tokens of many rows together, with the model's unembedding
score_store.py scores of KV blocks, for requests that use the prefix cache
watch.py       scores of running requests, for policies, cascades, and probes that stop requests
"""
