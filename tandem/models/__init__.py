"""Models in memory: reads a Hugging Face directory (configuration and weights) and computes hidden states with one
decoder that serves every model family.
"""
