"""Tokens to text and back: tokenizer, chat template, incremental detokeniser, stop strings. Imports no tensors."""
