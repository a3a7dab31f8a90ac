"""The code that runs in vLLM's front-end: it sends requests to EngineCore, and returns results.

connection.py   asks the workers once what they support, and uses the answers to check requests
checks.py       checks the tokens, sinks, lenses and room of a request
requests.py     adds requests to vLLM with a ticket, and makes their buffers
ahead.py        sends vectors to EngineCore once, before the requests that use them
prepared.py     checks a request, with AsyncLLM on another thread if the request is large
translators.py  translates other systems' keys to actions
running.py      stores the requests that have entered, and their completions
outputs.py      gives each output the rows that have arrived
alike.py        makes requests for which one check is enough
sweeping.py     makes the requests of a sweep, and turns their answers into cells
sweep_bounds.py checks which texts, tokens and log-probabilities a sweep can use
sweep_runs.py   sends the requests of a sweep, and receives the answers
"""
