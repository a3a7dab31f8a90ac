"""The command `vllm-scope`.

main.py     the commands and their options
doctor.py   which sites and layers of a model can be read, without a server
harvest.py  rows of a data set, into shards
read.py     rows of one prompt, from a server, as a table and a file
steer.py    one prompt without and with a steering module
watch.py    an answer as it streams, each token with its probe scores
monitor.py  the findings of a server's monitors, live
display.py  how `watch` shows tokens: coloured, or one line each
remote.py   the server of `read`, `steer` and `watch`, and the server's errors
"""

from vllm_scope.cli.main import app

__all__ = ["app"]
