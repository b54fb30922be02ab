"""The LM head and its loss, computed without the logits of the whole sequence."""
