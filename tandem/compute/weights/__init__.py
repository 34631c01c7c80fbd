"""Weights of linear maps as objects, one class per storage format, and products with them. See `base`."""
