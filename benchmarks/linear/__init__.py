"""Gated DeltaNet over ranks: states passed between spans, against an all-to-all over heads."""
