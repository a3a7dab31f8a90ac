"""What a caller asks for. Runs everywhere, with numpy and without torch.

actions/         Read, Probe, Add, ...: one class each, and their JSON
selectors.py     which tokens
sites.py         which streams of which layers
read_features.py which features of an SAE were read
streams.py       iteration over the streams of a result
spec.py          all actions of one request, as JSON on the wire
schema.py        the JSON Schema of a spec
resolve.py       resolves the actions for one engine; resolve_edits.py resolves the edits
resolved.py      the result: a spec as one engine understands it
ticket.py        what travels with a request from its front-end to EngineCore
packed.py        actions as bytes between the processes of one engine
answers.py       the answer to one request that stands for several variants
outline.py       specs that differ only in the layers, vectors and numbers of their edits
arrays.py        vectors and rows: float32 with a shape and a digest
nets.py          what a probe computes from a row, and its aggregates
cascade.py       where a probe that waits for another probe's verdict begins to score
heads.py         what the device computes from rows: encodings, probes, strongest features, a lens
bounded_json.py  JSON that callers send: its items are counted before it is parsed
options.py       an operator's options, and the error text for a wrong option
remembered.py    a cache that is bounded in bytes
media.py         the media type of binary answers
"""
