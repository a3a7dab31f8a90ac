"""What `vllm serve` gains: a scope in each answer, results to fetch, operators' routes.

settings.py  limits and the operator's key, from the environment
answer.py    the results of one HTTP request, put into its answer or its chunks
encode.py    results as JSON
store.py     results that are too large for an answer: files with an end
limits.py    bodies that are refused before they are read
routes.py    /v1/scope
changes.py   one operator's change at a time, in all of a server's processes
access.py    who may use routes, and what they can ask; for faces' routes too
faces.py     what faces register: words of requests, fields of answers, routes
schemas.py   what the routes take and give, for OpenAPI

Nothing here knows vLLM; engine/http.py does.
"""
