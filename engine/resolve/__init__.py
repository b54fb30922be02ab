"""From a checked configuration and what is known of its machines to what every rank does: decided once, never torch."""
