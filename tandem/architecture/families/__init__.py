"""Model families, one file each: a Hugging Face configuration is read into a `ModelSpec` or refused.

A module whose docstring begins with an architecture's name has its `FAMILY`, which `tandem.architecture.registry` finds
by that name. The other modules have parts that families share, or a part of one family.
"""
