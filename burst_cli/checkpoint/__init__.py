"""`burst checkpoint`: what a run has saved, here and on its nodes."""
