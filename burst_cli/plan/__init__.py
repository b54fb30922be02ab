"""What will happen, before it does: `burst plan` and `burst model`, what a launch shows and asks of memory."""
