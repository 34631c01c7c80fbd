"""Definitions shared by all packages: types, configuration, errors, hashing, events, clock. Imports none of them."""
