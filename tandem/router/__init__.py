"""The router's process: pairs each request with workers by predicted milliseconds. It sees no token of an answer."""
