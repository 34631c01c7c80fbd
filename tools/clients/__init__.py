"""Other people's clients against a running system: `make clients`. Each in a virtual environment of its own.

`scripts` run there and import nothing of ours but `checks`; everything else runs in ours.
"""
