"""Every line that knows a vLLM internal.

plugin.py       the entry point
seams.py        how vLLM's functions are wrapped, and that they are there
environment.py  our variables, which vLLM would call unknown
connection.py   what an engine can do, and what a request may ask of it
frontend.py     LLMEngine and AsyncLLM: requests in, results out
translators.py  requests in other words: keys of extra_args that stand for actions
http.py         `vllm serve`: a scope in each answer, our routes beside vLLM's
core.py         EngineCore: what names mean for a request, keys of KV blocks
scheduler.py    who waits for room, what a request may hit of the KV cache, how it ends
refusals.py     what EngineCore refuses, back to the caller with its sentence
attach.py       a worker of vLLM gets ours beside it, and remote calls
worker.py       a worker's life: load, requests, close
steps.py        what its taps do in each forward: planned before, sent on their way behind
runners.py      what a forward computes, for Model Runner V1 and V2
delivery.py     a worker's drain, sinks and roads
functions.py    Python of requests between layers, in this process, without graphs
model.py        may this model be tapped, and where
sizes.py        how large arena and tables are, and what a token may deliver
canary.py       every tap of a loaded model, tried before it serves
describe.py     a model's workers without an engine, asked what they can read
"""
