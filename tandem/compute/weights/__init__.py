"""Weights of linear maps as objects, one class per storage format, and products with them. See `base`.

A module with a function `read` is that of one quantisation method; `formats` calls it with the checkpoint's
`quantization_config`, and describes what it may raise.
"""
