"""What surrounds training: processes, states and errors of ranks, events, records on disk, provenance, summaries."""
