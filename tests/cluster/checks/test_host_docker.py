"""Group host against a real container engine, on a node of a testbed."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile

from host_sections import DOCKER, GROUP
from testkit.connecting import connect
from testkit.testbed_fixture import MakeTestbed

from cluster.checks.finding import Verdict
from cluster.checks.groups.engine import read_engine, read_image
from cluster.ssh.pool import SshConnection
from cluster.survey.ask import survey_node
from cluster.survey.facts import NodeFacts
from cluster.survey.section import NodeProbe

PAYLOAD = b"x" * 100_000


def tar_of_one_file() -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        entry = tarfile.TarInfo("file")
        entry.size = len(PAYLOAD)
        archive.addfile(entry, io.BytesIO(PAYLOAD))
    return packed.getvalue()


def ask(connection: SshConnection) -> tuple[NodeProbe, dict[str, Verdict]]:
    probe = survey_node(connection, GROUP.questions, settings=GROUP.settings(DOCKER))
    return probe, {one.check: one.severity for one in GROUP.check(probe, DOCKER)}


def test_engine_and_image_of_a_real_daemon(make_testbed: MakeTestbed) -> None:
    testbed = make_testbed(nodes=1, docker=True)
    with connect(testbed.host(testbed.node_names[0])) as connection:
        probe, without = ask(connection)
        version = connection.run(["docker", "version", "-f", "{{.Server.Version}}"]).stdout.decode().strip()
        assert version == read_engine(NodeFacts(probe, DOCKER)).version
        assert without["host.docker_disk"] is not Verdict.UNKNOWN
        assert (without["host.docker"], without["host.image"]) == (Verdict.OK, Verdict.WARN)
        assert connection.run(["docker", "import", "-", "burst:cuda"], stdin=tar_of_one_file()).ok
        probe, having = ask(connection)
        image = read_image(NodeFacts(probe, DOCKER))
        told = json.loads(connection.run(["docker", "inspect", "burst:cuda"]).stdout)[0]
        assert having["host.image"] is Verdict.OK
        assert image.size_bytes == told["Size"] >= len(PAYLOAD)
        made_of = [told["Architecture"], told["Os"], told["Created"], told["RootFS"]["Layers"]]
        assert image.identity == hashlib.sha256(json.dumps(made_of).encode()).hexdigest()
        testbed.nodes[0].stop_docker()
        _, dead = ask(connection)
        assert (dead["host.docker"], dead["host.image"]) == (Verdict.FAIL, Verdict.UNKNOWN)
