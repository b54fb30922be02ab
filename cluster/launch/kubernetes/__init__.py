"""Jobs of Kubernetes: the manifest, what a pod runs, and the launcher that follows the pods with kubectl."""
