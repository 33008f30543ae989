# PyTorch for CPUs with the torch.distributed backend "lockstep". docs/docker.md says how to build and run it.
#
#   docker build -f docker/pytorch.Dockerfile -t lockstep:pytorch .
#   docker run --rm lockstep:pytorch
ARG BASE=debian:bookworm-slim

FROM ${BASE} AS python
RUN apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install --yes --no-install-recommends \
      python3 python3-venv && rm -rf /var/lib/apt/lists/*
# TORCH: the version that the wheel is for. INDEX: where PyTorch for CPUs is; PyPI's needs several GB more, for GPUs.
ARG TORCH=2.15.0 INDEX=https://download.pytorch.org/whl/cpu
RUN python3 -m venv /opt/torch && \
    /opt/torch/bin/pip install --quiet --no-cache-dir --extra-index-url "$INDEX" "torch==$TORCH" numpy
ENV PATH=/opt/torch/bin:$PATH

FROM python AS build
WORKDIR /src
RUN apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install --yes --no-install-recommends \
      build-essential cmake ninja-build python3-dev libfmt-dev libspdlog-dev nlohmann-json3-dev libhwloc-dev libssl-dev
COPY . .
RUN scripts/build-wheel /opt/torch/bin/python && mkdir /wheels && mv build/wheels/*.whl /wheels

FROM python
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    /opt/torch/bin/pip install --quiet --no-cache-dir --no-deps /wheels/*.whl && \
    useradd --create-home --uid 1000 torch
COPY examples/pytorch /opt/examples
ARG REVISION=unknown VERSION=0.4.0 SOURCE=unknown
LABEL org.opencontainers.image.title="lockstep-c10d" \
      org.opencontainers.image.description="PyTorch for CPUs with the torch.distributed backend lockstep" \
      org.opencontainers.image.version="$VERSION" \
      org.opencontainers.image.revision="$REVISION" \
      org.opencontainers.image.source="$SOURCE" \
      org.opencontainers.image.licenses="Apache-2.0"
USER torch
WORKDIR /home/torch
CMD ["torchrun", "--standalone", "--nproc-per-node=2", "/opt/examples/ddp.py"]
