"""The matrix: every decoder architecture of vLLM's registry, compared with Hugging Face.

checkpoint.py  a tiny random checkpoint from the architecture's configuration class
reference.py   what Hugging Face's modules get and give
one.py         one architecture: vLLM's rows beside Hugging Face's; one process each
__main__.py    all architectures; keeps a JSON line of each and goes on where it stopped
page.py        docs/models.md from the lines
"""
