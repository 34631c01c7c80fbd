"""Drafts: guesses of the next tokens, which one step checks together. Nothing here can change an answer."""
