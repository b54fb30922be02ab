# An image that runs burst as an ordinary user.
#
#   docker build -t burst .                               # for NVIDIA GPUs: torch from PyPI brings its CUDA libraries
#   docker build -t burst --build-arg TORCH_INDEX=URL .   # another index of torch: PyTorch's CPU one is much smaller
#
#   mkdir -p runs && docker run --rm --init --gpus all --ipc=host --user "$(id -u):$(id -g)" \
#       -v "$PWD/runs:/burst/runs" burst burst launch exp=tiny
#
# --init collects orphans and passes signals on. --ipc=host: NCCL exchanges data of ranks on one machine through shared
# memory, of which containers have 64 MiB by default. --user: files in the mounted runs/ then belong to you.
FROM python:3.12-slim-bookworm

# An extra package index for torch, such as the CPU index that pytorch.org names.
ARG TORCH_INDEX=""
# Packages of Debian to add, such as "g++" for train.compile=true.
ARG APT_PACKAGES=""

RUN if [ -n "$APT_PACKAGES" ]; then \
        apt-get update && apt-get install -y --no-install-recommends $APT_PACKAGES && rm -rf /var/lib/apt/lists/*; \
    fi

# Before the sources, so that a change of code does not install torch again.
COPY constraints.txt /opt/burst/
RUN pip install --no-cache-dir ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} -c /opt/burst/constraints.txt torch

COPY . /opt/burst/src
RUN pip install --no-cache-dir -c /opt/burst/constraints.txt "/opt/burst/src[parquet,tensorboard]" && \
    install -m 755 /opt/burst/src/docker/entrypoint.sh /usr/local/bin/entrypoint.sh && \
    rm -rf /opt/burst/src

# World-writable, for user ids that are only known when the container starts.
RUN useradd --create-home --uid 1000 burst && install -d -m 1777 /burst /cache
ENV BURST_CACHE_DIR=/cache PYTHONUNBUFFERED=1
USER burst
WORKDIR /burst
ENTRYPOINT ["entrypoint.sh"]
CMD ["burst", "--help"]
