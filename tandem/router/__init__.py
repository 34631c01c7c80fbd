"""The router process: pairs each request with workers by predicted milliseconds. No token of an answer passes through
it.
"""
