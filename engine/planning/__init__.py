"""What a run will do, before it does it: who holds what, in which order, how long, with how much memory. No torch."""
