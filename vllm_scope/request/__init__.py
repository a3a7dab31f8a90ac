"""What a caller requests. This folder runs in every process, with numpy and without torch.

actions/         Read, Probe, Add, ...: one class each, and their JSON
selectors.py     rules that pick tokens
sites.py         the sites and layers of a model, and where taps are
read_features.py the features of an SAE that a result can have
streams.py       iteration over the streams of a result
spec.py          all actions of one request, as JSON on the wire
schema.py        the JSON Schema of a spec
resolve.py       resolves the actions for one engine; resolve_edits.py resolves the edits
resolved.py      a resolved spec: the spec as one engine understands it
ticket.py        the data that a front-end sends to EngineCore with a request
packed.py        actions as bytes between the processes of one engine
answers.py       the answer to one request that stands for several variants
outline.py       makes specs that differ only in the layers, vectors and numbers of their edits
arrays.py        vectors and rows: float32 with a shape and a digest
nets.py          the functions that a probe computes from a row, and the aggregates of scores
cascade.py       the first position that a probe scores after another probe's verdict
heads.py         computations on rows on the device: encodings, probes, features, lenses, sums
bounded_json.py  counts the items of a caller's JSON text, and then parses the text
options.py       checks an operator's options, and makes the error text for a wrong option
remembered.py    a cache with a limit in bytes
media.py         the media type of binary answers
"""
