"""What a rank is to the outside: its log, its state, its faults, its end."""
