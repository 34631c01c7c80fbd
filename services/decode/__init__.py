"""The decode service: one worker process."""
