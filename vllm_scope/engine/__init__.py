"""All code that uses vLLM's internals.

frontend/         the front-end: sends requests to EngineCore, and returns results to the caller
core/             EngineCore: what a request means, keys of KV blocks, the scheduler
worker/           the workers: add taps to the model, plan each forward, deliver rows
http/             `vllm serve`: adds results to vLLM's answers, and adds our routes
plugin.py         the entry point by which vLLM loads this package
seams.py          the contract: every symbol of vLLM that is wrapped or used
vllm_types.py     the parts of vLLM's objects that this package uses, for mypy
beside.py         keeps this package's state of vLLM's objects
heap.py           makes garbage collections rarer while many requests run
wrapping.py       replaces a symbol of vLLM after a check that it has not changed
digests.py        compares symbols of the installed vLLM with the releases that the authors read
environment.py    makes our environment variables known to vLLM
params.py         our fields in a request's SamplingParams
refusals.py       carries an error from EngineCore to the caller
rust_frontend.py  refuses requests with a scope that come from vLLM's Rust front-end
model.py          whether this model can be tapped, and where its decoder layers are
monitors.py       an operator's probes on every request
judge.py          counts what monitors found, and sends it to webhooks and the controller
webhook.py        sends verdicts to an operator's HTTP address
control.py        gives a controller access to an engine's server-wide edits
moments.py        reads the sums of Moments from the workers, and drops them
offline.py        an engine that computes the prompts of a harvest
describe.py       finds which sites of a model can be read, without an engine (`vllm-scope doctor`)
functions.py      Python functions that requests run between layers, in one process without graphs
"""
