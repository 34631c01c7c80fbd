"""One file a family: a Hugging Face configuration in, a `ModelConfig` out, or a refusal. No tensors, no maths."""
