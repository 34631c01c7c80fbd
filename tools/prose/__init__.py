"""Checks of the repository's language: first lines of docstrings, commit subjects, lengths of sentences.

`python -m tools.prose` reports what breaks a rule. Findings listed in `known.txt`, which may only shrink, are warnings.
All others are errors.
"""
