"""Descriptions of models, free of torch: specs of layers, the model families that build them from a `config.json`, and
the cost of running a model.
"""
