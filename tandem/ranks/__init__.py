"""Processes of one worker that compute parts of its model: started, led, watched and ended by the worker's own."""
