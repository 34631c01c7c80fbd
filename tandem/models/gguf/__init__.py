"""Reading of GGUF files and their conversion to Hugging Face directories. Free of torch: gateways use it, too."""

VERSION = "4"
"""Version of conversions, part of the names of converted directories; raised when they would get another content."""
