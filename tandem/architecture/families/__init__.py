"""Model families, one file each: a Hugging Face configuration is read into a `ModelSpec` or refused."""
