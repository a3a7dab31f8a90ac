"""Scripts that use the names and arguments of other systems, on the toy model.

Start a script with `python -m examples.faces.NAME`.
"""
