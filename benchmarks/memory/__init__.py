"""Memory policies side by side: what each keeps, what it computes again, and the time that costs."""
