"""The HTTP side of vllm-scope: the `scope` in answers, results to fetch, operators' routes.

limits.py    the first check of every request: size of the body, Authorization, path
rpc.py       the check of vLLM's development routes: vllm-scope's methods need the operator's key
exchange.py  one HTTP request and its answer, while the server processes the request
options.py   the fields of `vllm_xargs` that say in which form a request wants its tensors
answer.py    puts the results of one HTTP request into its answer or its chunks
choice.py    makes the `scope` of one choice, for the whole answer or for each chunk
tokens.py    the tokens of a choice, with text and scores
encode.py    results as JSON, and as named tensors
body.py      the body of an answer: JSON, or a safetensors file with the JSON
store.py     results that are too large for an answer: files with an expiry time
held_folder.py  the folder of the results' files, which the processes of a server share
room.py      counts the bytes of the results' files, for each API key
faces.py     the faces: their keys in requests, their fields in answers, and their routes
routes.py    adds all routes to an app
reading.py   GET /v1/scope and the routes below it
operating.py operators' routes of /v1/scope
sweeps.py    /v1/scope/sweeps
pages.py     the operator's page: a live display of what monitors have found
access.py    the guards of routes, and the engine's methods that routes call
changes.py   a lock with which the processes of a server make operators' changes one at a time
shared.py    the monitors that one process has set, for the other processes
peers.py     what monitors have found in each process, for the other processes
edits.py     server-wide edits: the check of a body, and the JSON that shows the edits
schemas.py   the bodies that routes take and return, for OpenAPI
settings.py  limits and the operator's key, from the environment

No file of this folder imports vLLM. engine/http/serving.py connects the folder to vLLM.
"""
