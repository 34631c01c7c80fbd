"""The HTTP side: clients' dialects in, requests to the router and decode workers out. Imports no torch."""
