"""One file a family: from a Hugging Face configuration to a `ModelSpec`, or a refusal. No tensors, no maths."""
