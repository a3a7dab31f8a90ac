"""The work of a worker around each forward. This folder does not import vLLM.

plan.py        finds the program of each token of a batch
planned.py     the requests with taps, as columns
walks.py       the gates' states with which the rows of a step begin
step_plan.py   the programs of a step's rows and their slots in the arena
arena.py       a ring of rows in device memory
drain.py       takes regions of the arena, and owns the thread that delivers their rows
pace.py        decides when the drain thread looks, sleeps and rests
drain_items.py the items that wait for the drain thread, and which steps it joins
filler.py      copies rows from the arena to the ring; on a GPU, on the stream of side_stream.py
deliverer.py   gives rows in the ring to the sink, as labelled batches
packer.py      gathers rows, and applies heads to them, on their way out of the arena
slot_views.py  views of rows in slots, for packer and summing
probe_bank.py  the probes of one place, computed for many rows at once
held_saes.py   the encoders of SAEs, and the strongest features of many rows at once
maxima.py      kernel of held_saes: the largest feature of each group; topk.py finds the strongest
summing.py     adds rows to sums on the device; squares.py has its kernels
summed_rows.py rows of requests with Moments, on their way into sums
kept_sums.py   all sums of a worker, in memory reserved at the start
device_sums.py the sums of one name, place and label
lens.py        the model's norm and unembedding, and the likeliest tokens of many rows at once
score_store.py scores of KV blocks, for requests that use the prefix cache
watch.py       the scores of running requests: probes that stop them, later stages, policies
"""
