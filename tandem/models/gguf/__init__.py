"""GGUF files, read and converted to Hugging Face directories. Free of torch: gateways read tokenizers from them too."""
