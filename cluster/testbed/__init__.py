"""A virtual cluster on one Linux machine: network namespaces with an sshd, a Docker engine and fake hardware each."""
