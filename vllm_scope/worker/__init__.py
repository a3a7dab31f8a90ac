"""The work of a worker before and after each forward. This folder does not import vLLM.

plan.py        finds the program of each token of a batch
planned.py     the requests with taps, as arrays
walks.py       finds the gates' states at the start of a step
step_plan.py   the program and the arena slots of each row of a step
arena.py       a ring of slots for rows in device memory
drain.py       takes regions of the arena, and owns the thread that delivers their rows
pace.py        decides when the drain thread works, sleeps and rests
drain_items.py the items that wait for the drain thread, and the rule which steps can be joined
filler.py      copies rows from the arena to the ring
side_stream.py the CUDA stream of these copies
deliverer.py   gives rows in the ring to the sink, as labelled batches
packer.py      gathers the rows of a region, and applies heads to the rows
slot_views.py  views of rows in slots, for packer and summing
probe_bank.py  computes the probes of one place for many rows together
held_saes.py   the encoders of SAEs; computes the strongest features of many rows together
maxima.py      kernel of held_saes: the largest feature of each group
topk.py        kernel of held_saes: the strongest features
summing.py     adds rows to sums on the device; squares.py has its kernels
summed_rows.py the rows of requests with Moments, before they are added to sums
kept_sums.py   all sums of a worker, in memory that is reserved at the start
device_sums.py the sums of one name, place and label
lens.py        the model's norm and unembedding; computes the likeliest tokens of many rows together
score_store.py scores of KV blocks, for requests that use the prefix cache
watch.py       scores of running requests, for probes that stop requests, cascades and policies
"""
