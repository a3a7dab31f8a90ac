"""What is inside the model's compiled graph.

anatomy/  where a model has its streams, and the subclasses with taps
tap/      the definition, the kernel and the tables of the op
"""
