"""The media type of binary answers, for servers and clients.

An answer is a safetensors file whose tensor `answer` contains the JSON (see docs/http.md).
"""

#: A client that can read this media type names it in `Accept`. The server then sends each answer
#: that has a `scope` in this type. Other answers, such as errors, are JSON.
BINARY = "application/vnd.vllm-scope+safetensors"
#: The name of the tensor that contains the JSON of an answer, or of one event of a stream. The
#: tensor is uint8, [number of bytes].
ANSWER = "answer"


def prefix_of(choice: int) -> str:
    """The prefix of the names of one choice's tensors. After the prefix, a tensor has the same name
    as in a result's file."""
    return f"choices.{choice}."
