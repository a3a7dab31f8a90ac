"""What a caller asks for. Runs everywhere, with numpy and without torch.

actions/         Read, Probe, Add, ...: one class each, and their JSON
selectors.py     which tokens
sites.py         which streams of which layers
read_features.py which features of an SAE were read
streams.py       iteration over the streams of a result
spec.py          all actions of one request, as JSON on the wire
schema.py        the JSON Schema of a spec
resolve.py       what the actions mean on one engine
packed.py        actions as bytes between the processes of one engine
outline.py       specs that differ in the layers, vectors and numbers of their edits alone
arrays.py        vectors and rows: float32 with a shape and a digest
nets.py          what a probe computes of a row, and its aggregates
cascade.py       where a probe begins that waits for another one's verdict
heads.py         what is computed of rows on the device: codecs, and the probes of one place
bounded_json.py  JSON of strangers, counted before it is parsed
options.py       an operator's options, and one sentence for what is wrong with them
remembered.py    a cache that is bounded in bytes
media.py         the media type of binary answers
"""
