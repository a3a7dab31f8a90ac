"""What is inside the model's compiled graph.

anatomy/  where a model keeps its streams, and the layers that get a tap
tap/      the op: its definition, its kernel, its tables
"""
