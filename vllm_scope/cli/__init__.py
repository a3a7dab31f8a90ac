"""The command `vllm-scope`.

main.py     the commands and their options
doctor.py   finds which sites and layers of a model can be read, without a server
harvest.py  writes the rows of a data set into shards
read.py     completes one prompt, shows a table of the rows, and can save the rows
steer.py    completes one prompt without and with a steering module
watch.py    shows an answer while it streams, each token with its probe scores
monitor.py  shows the findings of a server's monitors, live
display.py  how `watch` shows tokens: coloured, or one line each
remote.py   calls the server for `read`, `steer` and `watch`, and shows errors
"""

from vllm_scope.cli.main import app

__all__ = ["app"]
