"""What is inside the model's compiled graph.

anatomy/  where a model keeps its streams, and the subclasses that carry taps
tap/      the op: its definition, its kernel, its tables
"""
