"""OpenAI's dialect: chat completions, completions, responses and the list of models."""
