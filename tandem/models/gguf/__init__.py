"""GGUF files, read and converted to Hugging Face directories. Free of torch: gateways read tokenizers from them too."""

VERSION = "3"
"""Of what is made of a file."""
