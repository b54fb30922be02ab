"""From parsed answers of nodes to findings, verdicts and the list of nodes that may be used."""
