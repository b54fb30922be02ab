"""Whether nodes can carry a run: asked once, judged here, all problems at once."""
