"""`python -m cluster.agent`: what runs on a node, from the code that lies there or was sent.

burst-agent                        answers the launcher at the other end of stdin and stdout
burst-supervisor RUN_ID NODE       owns a run, as stdin says; the words are for lists of processes
"""

import sys

from cluster.agent.messages import serve
from cluster.agent.serve import Agent
from cluster.agent.start import supervise


def main() -> None:
    """Be what the first word says."""
    if sys.argv[1] == "burst-supervisor":
        supervise()
    else:
        serve(Agent().answer)


if __name__ == "__main__":
    main()
