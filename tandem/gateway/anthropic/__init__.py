"""Anthropic's API: `/v1/messages` and its token count."""
