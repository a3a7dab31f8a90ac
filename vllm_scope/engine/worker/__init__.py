"""The code that runs in vLLM's workers.

attach.py     seams on vLLM's worker and its model runner
worker.py     ScopeWorker: requests, close, remote calls
loading.py    installs taps on a loaded model, and checks that they write
attention.py  which attention layers can be tapped, and how wide their rows are
mlp.py        which down projections can be tapped, and how wide their rows are
blocks.py     the attention and MLP blocks, whose inputs can be tapped
router.py     which routers of experts can be tapped, and how wide their rows are
proving.py    a dummy forward by which the model's anatomy is proved
replies.py    what a worker answers to the front-end's remote calls
sizes.py      sizes of the arena, the ring and the tables; limits of one request
canary.py     reads one row at every tap before the worker serves
runners.py    what a forward computes, for Model Runner V1 and V2
steps.py      one forward: plans it, and delivers its rows
sampling.py   log-probabilities of named tokens in a step with other requests, on V1
scaling.py    new scales that policies decide
carrying.py   what travels with a step's output to EngineCore
faults.py     reports edits whose result is not finite
holding.py    encoders of SAEs and maps of lenses that the device holds
own_lens.py   the lens of a worker's own model
unembedding.py  the final norm and the unembedding, as a lens
vocabulary.py   the parts of the unembedding that ranks hold
delivery.py   ring, drain and sinks of a worker
sums.py       the remote calls about the sums of Moments
"""
