"""Weights as objects: how the numbers of a linear map are stored, and the products with them. See `base`."""
