"""A Kubernetes cluster on one machine: a real control plane, and kubelets whose containers are podman's."""
