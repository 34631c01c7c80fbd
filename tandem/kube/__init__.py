"""The Kubernetes API, as far as Tandem uses it. The only package that imports the `kubernetes` client.

`api.open_api(access.find_access(os.environ))` opens it. The client is imported only then, so that deployments without
Kubernetes do not need it.
"""
