"""Moderation: decides whether prompts and answers may pass."""
