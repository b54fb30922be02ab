"""Which positions a rank holds, and which see which."""
