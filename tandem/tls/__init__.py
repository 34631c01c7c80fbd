"""TLS between the processes of a deployment: certificates from a directory, and the identities in them."""
