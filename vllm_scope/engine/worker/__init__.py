"""The code that runs in vLLM's workers.

attach.py     seams on vLLM's worker and its model runner
worker.py     ScopeWorker: load, requests, close, remote calls
loading.py    installs taps on a loaded model, and checks that each tap writes
attention.py  which attention layers can be tapped, and the width of their rows
mlp.py        which down projections can be tapped, and the width of their rows
blocks.py     the attention and MLP blocks, whose inputs can be tapped
router.py     which routers of experts can be tapped, and the width of their rows
proving.py    a dummy forward that proves the model's anatomy
replies.py    the types of a worker's answers to the front-end's remote calls
sizes.py      sizes of the arena, the ring and the tables; limits of one request
canary.py     reads one row at every tap before the worker serves
runners.py    finds what a forward computes, for Model Runner V1 and V2
steps.py      plans one forward, and delivers its rows
sampling.py   log-probabilities of named tokens in a step with other requests, on V1
scaling.py    applies new scales of policies
carrying.py   sends values to EngineCore with a step's output
faults.py     reports edits whose result is not finite
holding.py    encoders of SAEs and maps of lenses that the device holds
own_lens.py   the lens of a worker's own model
unembedding.py  makes a lens of the final norm and the unembedding
vocabulary.py   gathers the ranks' parts of the unembedding
delivery.py   ring, drain and sinks of a worker
sums.py       the remote calls about the sums of Moments
"""
