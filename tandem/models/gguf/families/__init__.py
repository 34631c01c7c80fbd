"""GGUF's architectures by family: a table of each one's tensors in a checkpoint, and a reader of its own keys. Each
`Architecture` here is a row of the table in `tandem.models.gguf.architectures`.
"""
