"""Reading of GGUF files and their conversion to Hugging Face directories. Free of torch: gateways use it, too."""

VERSION = "3"
"""Of what is made of a file."""
