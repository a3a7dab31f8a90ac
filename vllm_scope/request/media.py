"""The media type of binary answers, for servers and clients.

docs/http.md describes the format: a safetensors file whose tensor `answer` has the JSON.
"""

#: A client sends this type in `Accept`; a server that knows the type answers in it.
BINARY = "application/vnd.vllm-scope+safetensors"
#: The tensor with the JSON of the answer, or of an event of a stream: uint8, [bytes].
ANSWER = "answer"


def prefix_of(choice: int) -> str:
    """The prefix of a choice's tensor names; the rest of a name is as in a result's file."""
    return f"choices.{choice}."
