"""One script a client: what its users do, checked. Run by `tools.clients` with the client's own interpreter."""
