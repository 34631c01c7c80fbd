"""Descriptions of models, free of torch: specs of layers, the families that make them, and the cost of running them."""
