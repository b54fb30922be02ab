"""The checks by subject: what nodes are asked, how answers are read and judged, what it means; one file each."""
