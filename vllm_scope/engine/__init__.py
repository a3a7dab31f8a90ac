"""All code that uses vLLM's internals.

frontend/         the front-end: sends requests to EngineCore, and returns results to the caller
core/             EngineCore: resolves requests, makes keys of KV blocks, extends the scheduler
worker/           the workers: add taps to the model, plan each forward, deliver rows
http/             `vllm serve`: adds results to vLLM's answers, and adds this package's routes
plugin.py         the entry point by which vLLM loads this package
seams.py          lists every symbol of vLLM that this package wraps or uses
vllm_types.py     the parts of vLLM's objects that this package uses, for mypy
beside.py         stores this package's data about vLLM's objects
heap.py           makes garbage collections rarer while many requests run
wrapping.py       replaces a symbol of vLLM, after a check that the symbol fits its wrapper
digests.py        compares symbols of the installed vLLM with the releases that the authors read
environment.py    makes this package's environment variables known to vLLM
params.py         handles this package's fields in a request's SamplingParams
refusals.py       carries an error from EngineCore to the caller
rust_frontend.py  refuses requests with a scope that come from vLLM's Rust front-end
model.py          finds whether a model can be tapped, and where its decoder layers are
monitors.py       an operator's probes on every request
judge.py          counts the findings of monitors, and sends them to webhooks and the controller
webhook.py        sends verdicts to an operator's HTTP address
control.py        lets a controller read and change an engine's server-wide edits
moments.py        reads or drops the sums of Moments in the workers
offline.py        an engine that computes the prompts of a harvest
describe.py       finds which sites of a model can be read, without an engine (`vllm-scope doctor`)
functions.py      runs Python functions of requests between layers, without compilation
"""
