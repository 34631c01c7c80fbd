"""Drafts (speculative decoding): guesses of the next tokens, which one step verifies together. No answer changes by
them.
"""
