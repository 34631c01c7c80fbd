"""The prefill service: one worker process."""
