"""What a caller asks for. Runs everywhere, with numpy and without torch.

actions/         Read, Probe, Add, ...: one class each, and their JSON
selectors.py     which tokens
sites.py         which streams of which layers
spec.py          all actions of one request, as JSON on the wire
schema.py        the JSON Schema of a spec
resolve.py       what the actions mean on one engine
arrays.py        vectors and rows: float32 with a shape and a digest
encoding.py      the codec of a read
bounded_json.py  JSON of strangers, counted before it is parsed
remembered.py    a cache that is bounded in bytes
"""
