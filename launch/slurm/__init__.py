"""Slurm: the batch script, the job's state on disk, and the supervisor that runs inside the job."""
