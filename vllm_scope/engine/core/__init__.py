"""vLLM's EngineCore: what requests mean, when they run, which KV they share.

entry.py      a request that enters
scheduler.py  when it may run, and the news of its end
clearing.py   KV that is not fit for reuse
"""
