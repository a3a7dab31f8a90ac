"""The media type of binary answers, for servers and clients.

docs/http.md describes the format: a safetensors file whose tensor `answer` has the JSON.
"""

#: A client sends this media type in `Accept`. A server that supports it answers in this type.
BINARY = "application/vnd.vllm-scope+safetensors"
#: Name of the tensor with the JSON of an answer or of a stream's event: uint8, [number of bytes].
ANSWER = "answer"


def prefix_of(choice: int) -> str:
    """The prefix of the tensor names of one choice. The rest of a name is as in a result's file."""
    return f"choices.{choice}."
