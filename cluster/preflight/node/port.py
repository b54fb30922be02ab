"""Answers which port of this node is free. Python 3.6, standard library only."""

from cluster.preflight.node.survey import find_port


def main() -> None:
    """Read the question, answer it; a node without a free port does not answer."""
    from cluster.preflight.node.talk import answer, read_question

    question = read_question()
    answer(question, {"port": find_port(None)})
