"""Launching through Slurm: one job, one task per node, one supervisor in each task, on storage that all nodes share."""
