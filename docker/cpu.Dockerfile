# lockstep on CPUs, over Open MPI. docs/docker.md says how to build and run it.
#
#   docker build -f docker/cpu.Dockerfile -t lockstep:cpu --build-arg REVISION=$(git rev-parse --short=12 HEAD) .
#   docker run --rm lockstep:cpu
ARG BASE=debian:bookworm-slim

FROM ${BASE} AS build
WORKDIR /src
COPY scripts/lib/deps.sh scripts/lib/
RUN bash -euo pipefail -c 'source scripts/lib/deps.sh && install_packages "${lockstep_packages[@]}"'
COPY . .
ARG REVISION=unknown
RUN cmake -S . -B /build -G Ninja -DCMAKE_BUILD_TYPE=Release -DBUILD_TESTING=OFF -DLOCKSTEP_CCACHE=OFF \
      -DLOCKSTEP_REVISION="$REVISION" -DCMAKE_REQUIRE_FIND_PACKAGE_MPI=ON -DCMAKE_DISABLE_FIND_PACKAGE_CUDAToolkit=ON && \
    cmake --build /build --target lockstep && \
    docker/rootfs/collect /build/lockstep /stage

FROM ${BASE}
COPY --from=build /stage/ /
RUN /usr/local/lib/lockstep/install
ARG REVISION=unknown VERSION=0.4.0 SOURCE=unknown
LABEL org.opencontainers.image.title="lockstep" \
      org.opencontainers.image.description="Data-parallel training over several processes, on CPUs" \
      org.opencontainers.image.version="$VERSION" \
      org.opencontainers.image.revision="$REVISION" \
      org.opencontainers.image.source="$SOURCE" \
      org.opencontainers.image.licenses="Apache-2.0"
# Processes in different containers cannot read each other's memory, and seccomp profiles may forbid it in one.
ENV OMPI_MCA_btl_vader_single_copy_mechanism=none HWLOC_COMPONENTS=-gl
USER mpiuser
WORKDIR /home/mpiuser
EXPOSE 2222
ENTRYPOINT ["/usr/bin/tini", "-s", "--", "/usr/local/lib/lockstep/entrypoint"]
CMD ["lockstep", "launch", "-n", "2", "--", "lockstep", "train", "cnn", "--data", "digits", "--epochs", "20"]
