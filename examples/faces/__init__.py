"""Scripts that users of other systems will recognise, on the toy world.

Each runs as `python -m examples.faces.NAME`.
"""
