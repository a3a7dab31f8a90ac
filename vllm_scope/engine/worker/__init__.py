"""The code that runs in vLLM's workers.

attach.py     wraps methods of vLLM's worker and of its model runner
worker.py     controls the taps and requests of one worker, and answers remote calls
loading.py    installs taps on a loaded model, and checks that each tap writes
attention.py  finds the attention modules that can be tapped, and the width of their rows
mlp.py        finds the down projections that can be tapped, and the width of their rows
blocks.py     finds the attention and MLP blocks whose inputs can be tapped
router.py     finds the routers of experts that can be tapped, and the width of their rows
proving.py    proves the model's anatomy with a dummy forward
replies.py    the types of a worker's answers to the front-end's remote calls
sizes.py      computes the sizes of the arena and the ring, and the limits of one request
canary.py     reads one row at every tap before the worker serves
runners.py    finds which tokens a forward computes, for Model Runner V1 and V2
steps.py      plans one forward, and delivers its rows
sampling.py   makes Model Runner V1 return the log-probabilities that each request names
scaling.py    applies the new scales that policies set
carrying.py   sends values to EngineCore with a step's output
faults.py     reports edits whose result is not finite
holding.py    loads the encoders of SAEs and the maps of lenses that the device holds
own_lens.py   makes and renews the lens of a worker's model
unembedding.py  makes a lens of the final norm and the unembedding
vocabulary.py   gathers the ranks' parts of the unembedding
delivery.py   delivers rows through the ring, the drain and the sinks of a worker
sums.py       answers the remote calls about the sums of Moments
"""
