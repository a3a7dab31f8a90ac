"""vLLM's front-end: requests in, results out.

connection.py   what the workers can read, asked once
requests.py     LLMEngine and AsyncLLM: a request's spec, checked and opened
prepared.py     what its check costs is done off the event loop where it is much
translators.py  requests in other systems' words
outputs.py      an output, with what has arrived of its rows
"""
