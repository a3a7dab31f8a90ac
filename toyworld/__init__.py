"""A small invented world, and a language model trained on nothing else.

Every document is written from latent variables that we choose (a review's
sentiment, a speaker's honesty), so a probe on the model has labels that are
known rather than judged.
"""
