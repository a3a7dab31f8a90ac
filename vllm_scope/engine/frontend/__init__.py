"""In vLLM's front-end: requests in, results out.

connection.py   what the workers can do, asked once, and the check of a spec against it
checks.py       what a request may ask of an engine
requests.py     seams on LLMEngine and AsyncLLM: a request's ticket and buffer
ahead.py        vectors that travel to EngineCore once, before the requests that use them
prepared.py     the check of a request, off the event loop if the request is large
translators.py  requests in other systems' words
running.py      requests that have entered, and their completions
outputs.py      outputs, each with the rows that have arrived
alike.py        requests for which one check is enough
sweeping.py     the requests of a sweep
sweep_bounds.py which texts, tokens and log-probabilities of a sweep an engine's model allows
sweep_runs.py   sends the requests of a sweep, and takes the answers
"""
