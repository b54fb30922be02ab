"""`python -m cluster.agent`: what runs on a node, from the code that lies there or was sent.

burst-agent                                           answers the launcher at the other end of stdin and stdout
burst-supervisor RUN_ID NODE FOLDER DESCRIPTOR:LOCK...   owns a run, as nodes/<node>/spec.json says
"""

import sys

from cluster.agent.messages import serve
from cluster.agent.serve import Agent
from cluster.agent.start import supervise


def main() -> None:
    """Be what the words say."""
    verb, *words = sys.argv[1:]
    if verb == "burst-supervisor":
        supervise(words[1], words[2], words[3:])
    else:
        serve(Agent().answer)


if __name__ == "__main__":
    main()
