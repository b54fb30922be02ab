"""The decoder, its rotary embedding and its initialisation."""
