"""In vLLM's front-end: sends requests to EngineCore, and returns results to the caller.

connection.py   asks the workers once what they can do, and checks specs against their answers
checks.py       checks what a request asks of an engine
requests.py     seams on LLMEngine and AsyncLLM: a request's ticket and buffer
ahead.py        sends vectors to EngineCore once, before the requests that use them
prepared.py     the check of a request, off the event loop if the request is large
translators.py  translates other systems' keys to actions
running.py      requests that have entered, and their completions
outputs.py      gives each output the rows that have arrived
alike.py        requests for which one check is enough
sweeping.py     the requests of a sweep
sweep_bounds.py which texts, tokens and log-probabilities of a sweep an engine's model allows
sweep_runs.py   sends the requests of a sweep, and receives the answers
"""
