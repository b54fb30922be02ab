"""The NCCL and gloo environment of every node, planned from what the node has, each choice with its reason."""
