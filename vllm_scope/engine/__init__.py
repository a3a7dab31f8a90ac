"""Every line that knows a vLLM internal.

plugin.py    the entry point; which seams are wrapped, and that they are there
frontend.py  LLMEngine and AsyncLLM: requests in, results out
http.py      `vllm serve`: a scope in each answer, our routes beside vLLM's
translators.py  requests in other words: keys of extra_args that stand for actions
functions.py Python of requests between layers, in this process, without graphs
core.py      the scheduler's prefix cache: a read is never served from it
worker.py    a worker's life: load, step, finish
runners.py   what a forward computes, for Model Runner V1 and V2
model.py     may this model be tapped, and where
"""
