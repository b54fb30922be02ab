"""The launcher's side of a run: links to its nodes, the controller that watches them, and the judgement at the end."""
