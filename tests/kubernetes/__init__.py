"""The chart in a real control plane whose pods are containers. Run by `make e2e-kubernetes`, not by `make test`."""
