"""From a Hugging Face directory to hidden states: configuration, weights, and one decoder driven by configuration."""
