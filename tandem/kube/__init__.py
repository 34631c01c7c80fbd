"""The Kubernetes API, as far as Tandem uses it. The only room that knows the `kubernetes` client."""
