"""The recipe of the built-in model: data, tokenizer, training on one GPU, export and evaluation.

Nothing here is shipped in the wheel and nothing here is imported by ``deltaserve``.
"""
