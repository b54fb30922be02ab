"""From a configuration to a run that may start: every broken rule is named before ranks exist. No torch."""
