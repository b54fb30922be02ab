"""CUDA used for real, inside the image of the run: the last word on whether a node can train."""

from __future__ import annotations

import re
import shlex

from cluster.checks.check import Check
from cluster.checks.finding import Finding
from cluster.checks.gpu_view import GpuView
from cluster.survey.section import Question
from engine.config.cluster import ContainerConfig
from engine.config.errors import ConfigError

SMOKE_SECTION = "gpu.smoke"
_SECONDS = 120
_WORD = re.compile(r"[A-Za-z0-9_./:@%+=-]+")
_PROGRAM = (
    "import torch; n = torch.cuda.device_count(); "
    "s = [float((torch.ones(256, 256, device=f'cuda:{i}') @ torch.ones(256, 256, device=f'cuda:{i}')).sum()) "
    "for i in range(n)]; assert all(x == 256.0 ** 3 for x in s), s; print('cuda works on', n)"
)


def cuda_smoke_question(container: ContainerConfig) -> Question:
    """Multiplies a matrix on every GPU inside the image of the ranks, which must be on the node already.

    Raises ConfigError when they run in none, and for an image or a command that is no plain word: the text goes through
    a shell.
    """
    if container.runtime != "docker" or not container.image:
        raise ConfigError("CUDA is tried inside an image: set cluster.container.runtime=docker and .image=NAME:TAG")
    words = [*container.command.split(), "run", "--rm", "--gpus", "all", "--network", "none", "--pull", "never"]
    words += ["--entrypoint", "python", container.image]
    for word in words:
        if not _WORD.fullmatch(word) or word == "END":
            raise ConfigError(f"cluster.container cannot be used for trying CUDA: not a word for a shell: {word!r}")
    return Question(SMOKE_SECTION, _SECONDS, f"{shlex.join(words)} -c {shlex.quote(_PROGRAM)}")


def check_cuda_smoke(check: Check, view: GpuView) -> list[Finding]:
    """A matrix product on every GPU inside the run image; only with --cuda-smoke."""
    section = view.probe.sections.get(SMOKE_SECTION)
    if section is None:
        return [check.skip("CUDA was not tried inside an image")]
    last = section.output.strip().splitlines()[-1:] or [""]
    evidence = last[0][:200]
    found = re.fullmatch(r"cuda works on (\d{1,3})", evidence)
    if section.exit_code is None:
        return [check.unknown(section.trouble(), evidence=evidence)]
    if not section.ok or found is None:
        remedy = "run the image by hand on the node: `docker run --rm --gpus all IMAGE nvidia-smi`"
        return [check.expecting("it works").fail(f"CUDA fails in the image: {section.trouble()}", remedy, evidence)]
    if view.gpus and int(found[1]) != len(view.gpus):
        remedy = "check the container runtime (nvidia-container-toolkit, CDI) and CUDA_VISIBLE_DEVICES in the image"
        return [check.expecting(f"{len(view.gpus)} GPUs").fail(f"{found[1]} GPUs in the image", remedy)]
    return [check.ok(evidence)]
