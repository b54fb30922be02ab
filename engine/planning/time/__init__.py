"""FLOPs, devices, and the time that a plan takes."""
