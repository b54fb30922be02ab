"""Planners: pure integer functions from (mask, layout, ring) to an AttentionPlan."""
