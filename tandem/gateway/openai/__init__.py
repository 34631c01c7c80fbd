"""OpenAI's dialect: chat completions, completions and the list of models."""
