"""What a caller asks for. Runs everywhere, with numpy and without torch.

actions/         Read, Probe, Add, ...: one class each, and their JSON
selectors.py     which tokens
sites.py         which streams of which layers
spec.py          all of one request's actions, as JSON on the wire
resolve.py       what they mean on one engine
arrays.py        numbers that are told apart by their content
encoding.py      a read's codec, on one engine
bounded_json.py  JSON of strangers, counted before it is parsed
remembered.py    the last results of something, within a number of bytes
"""
