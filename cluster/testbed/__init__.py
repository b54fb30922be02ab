"""A virtual cluster on one Linux machine: network namespaces, each with sshd, Docker, Slurm and fake hardware."""
