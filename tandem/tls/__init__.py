"""TLS between the processes of a deployment: certificates from a directory, and what they say of a process."""
