"""Settings of NCCL that lie around on a node."""

from __future__ import annotations

from cluster.checks.finding import Check, Finding
from cluster.checks.group import CheckGroup
from cluster.env.live import LIVE, live_sources
from cluster.survey.facts import NodeFacts

# Left behind after debugging, each of these makes a run slow without a word.
CRIPPLING = {
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_IB_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_NET_GDR_LEVEL": "LOC",
    "NCCL_IGNORE_NET_MISMATCH": "1",
    "NCCL_DEBUG": "TRACE",
}


def check_nccl_conf(check: Check, facts: NodeFacts) -> list[Finding]:
    """No setting of NCCL that lies around (/etc/nccl.conf, ~/.nccl.conf, the session) switches a fast path off."""
    bad = {
        f"{name}={value} ({source.place})": name
        for source in facts.section(LIVE).read(live_sources)
        for name, value in sorted(source.values.items())
        if not source.is_process and CRIPPLING.get(name) == value.strip()
    }
    if not bad:
        return [check.ok("none")]
    names = ", ".join(dict.fromkeys(bad.values()))
    return [check.expecting("none").warn(", ".join(bad), f"remove {names}, or know why it is there")]


GROUP = CheckGroup("host", (check_nccl_conf,), questions=(LIVE,))
