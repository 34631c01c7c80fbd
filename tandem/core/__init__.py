"""The words every room uses: types, configuration, errors, hashing, events, clock. Imports nothing of ours."""
