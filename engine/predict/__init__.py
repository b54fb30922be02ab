"""What a run will cost before it does it: FLOPs, seconds and memory on machines that need not be here. No torch."""
