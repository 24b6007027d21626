"""Kubernetes manifests from the settings of the verbs."""
