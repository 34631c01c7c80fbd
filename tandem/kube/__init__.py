"""The Kubernetes API, as far as Tandem uses it. The only room that knows the `kubernetes` client.

`api.open_api(access.find_access(os.environ))` is how to get in. The client is imported only then, so that whoever runs
without Kubernetes needs no part of it.
"""
