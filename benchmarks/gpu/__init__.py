"""What `make gpu` measures: parts planned as values, run one measurement at a time in worker processes, and reported.

    plan       parts and measurements as values with expected seconds; nothing is run
    worker     a process that measures, and is replaced when it fails
    runner     the budget: which measurement still fits, what became of it, the document after each
    checks     figures that no device can reach become errors
    targets    what the figures say about the goals
    report     the document as Markdown
    overlap, tiles, blocked, others, loss, steps, parity    the parts: `plan(...)` gives measurements,
                                                            `measure(...)` rows

A row is a dictionary of plain values; its `status` is measured, failed, skipped, not available or above peak.
"""
