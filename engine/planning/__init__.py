"""What the ranks of a run will do, before they do it: who holds which rows, what is sent and when. No torch."""
