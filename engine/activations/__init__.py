"""What layers save for the backward pass, where it is stored, and what backward computes again."""
