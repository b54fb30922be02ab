# burst in a container, as an ordinary user. `burst image build` drives this file; by hand:
#
#   docker build -t burst .                               for NVIDIA GPUs: torch from PyPI brings its CUDA libraries
#   docker build -t burst-cpu --build-arg DEVICE=cpu .    without CUDA, much smaller
#
#   mkdir -p runs && docker run --rm --init --gpus all --ipc=host --user "$(id -u):$(id -g)" \
#       -v "$PWD/runs:/burst/runs" burst burst launch exp=tiny
#
# --init collects orphans and passes signals on. --ipc=host: NCCL exchanges data of ranks on one machine through shared
# memory, of which containers have 64 MiB by default. --user: files in the mounted runs/ then belong to you.
#
# Three layers of our own, from the one that changes least: torch, other packages, burst. So a change of code moves a
# megabyte in `burst image push`. Nothing of a cluster is baked in: NCCL_SOCKET_IFNAME, say, belongs to the nodes.
ARG BASE=python:3.12.12-slim-bookworm@sha256:593bd06efe90efa80dc4eee3948be7c0fde4134606dd40d8dd8dbcade98e669c

FROM ${BASE} AS torch
ARG DEVICE=cuda
# Where torch lies without CUDA; the version is that of constraints.txt in both cases.
ARG CPU_INDEX=https://download.pytorch.org/whl/cpu
COPY constraints.txt docker/ /build/
RUN sh /build/install.sh torch "$DEVICE" "$CPU_INDEX"

FROM torch AS packages
COPY pyproject.toml /build/
RUN sh /build/install.sh packages

FROM packages AS code
COPY . /build/src
RUN sh /build/install.sh code

FROM ${BASE}
# ibverbs: without it NCCL does not see InfiniBand. g++: Triton and torch.compile compile while they run.
ARG APT_PACKAGES="g++ ibverbs-providers libibverbs1"
RUN if [ -n "$APT_PACKAGES" ]; then \
        apt-get update && apt-get install -y --no-install-recommends $APT_PACKAGES && rm -rf /var/lib/apt/lists/*; \
    fi
COPY docker/entrypoint.sh /usr/local/bin/entrypoint.sh
# World-writable, for user ids that are only known when the container starts. The script may be private in the checkout.
RUN useradd --create-home --uid 1000 burst && install -d -m 1777 /burst /cache && chmod 755 /usr/local/bin/entrypoint.sh
COPY --from=torch /opt/burst/venv /opt/burst/venv
COPY --from=packages /opt/burst/packages /opt/burst/packages
COPY --from=code /opt/burst/code /opt/burst/code
ENV PATH=/opt/burst/venv/bin:/opt/burst/code/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    BURST_CACHE_DIR=/cache PYTHONUNBUFFERED=1
USER burst
WORKDIR /burst
# An image that cannot start is not built.
RUN burst --version && python -c "import torch, engine.training.trainer"
ENTRYPOINT ["sh", "/usr/local/bin/entrypoint.sh"]
CMD ["burst", "--help"]
