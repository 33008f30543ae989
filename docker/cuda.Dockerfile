# lockstep on NVIDIA GPUs, over NCCL. docs/docker.md says how to build and run it.
#
#   docker build -f docker/cuda.Dockerfile -t lockstep:cuda --build-arg REVISION=$(git rev-parse --short=12 HEAD) .
#   docker run --rm --gpus all lockstep:cuda
#
# Without NVIDIA's images, from plain Debian and a CUDA tree that has cuDNN and NCCL:
#
#   docker build -f docker/cuda.Dockerfile -t lockstep:cuda --build-arg DEVEL=debian:bookworm-slim \
#     --build-arg RUNTIME=debian:bookworm-slim --build-context cuda=/usr/local/cuda-13.0 .
ARG DEVEL=nvidia/cuda:13.0.2-cudnn-devel-ubuntu24.04
ARG RUNTIME=nvidia/cuda:13.0.2-cudnn-runtime-ubuntu24.04

# Nothing, unless --build-context puts a CUDA tree in its place.
FROM scratch AS cuda

FROM ${DEVEL} AS build
WORKDIR /src
COPY scripts/lib/deps.sh scripts/lib/
RUN bash -euo pipefail -c 'source scripts/lib/deps.sh && install_packages "${lockstep_packages[@]}" python3-pip'
COPY . .
# ARCHITECTURES: as CMAKE_CUDA_ARCHITECTURES ("90-real"); left out, those of docs/gpu.md.
ARG REVISION=unknown ARCHITECTURES=
RUN --mount=type=bind,from=cuda,target=/mnt/cuda \
    scripts/get-cudnn-frontend && \
    if [ -x /mnt/cuda/bin/nvcc ]; then export CUDAToolkit_ROOT=/mnt/cuda; fi && \
    cmake -S . -B /build -G Ninja -DCMAKE_BUILD_TYPE=Release -DBUILD_TESTING=OFF -DLOCKSTEP_CCACHE=OFF \
      -DLOCKSTEP_REVISION="$REVISION" -DCMAKE_REQUIRE_FIND_PACKAGE_MPI=ON -DCMAKE_REQUIRE_FIND_PACKAGE_CUDAToolkit=ON \
      ${ARCHITECTURES:+-DCMAKE_CUDA_ARCHITECTURES="$ARCHITECTURES"} && \
    cmake --build /build --target lockstep && \
    docker/rootfs/collect /build/lockstep /stage /mnt/cuda

FROM ${RUNTIME}
COPY --from=build /stage/ /
RUN /usr/local/lib/lockstep/install
ARG REVISION=unknown VERSION=0.4.0 SOURCE=unknown
LABEL org.opencontainers.image.title="lockstep" \
      org.opencontainers.image.description="Data-parallel training over several processes, on NVIDIA GPUs" \
      org.opencontainers.image.version="$VERSION" \
      org.opencontainers.image.revision="$REVISION" \
      org.opencontainers.image.source="$SOURCE" \
      org.opencontainers.image.licenses="Apache-2.0 AND LicenseRef-NVIDIA-CUDA"
# What NVIDIA's container runtime brings into the container: all GPUs, and of the driver CUDA and NVML.
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
# Processes in different containers cannot read each other's memory, and seccomp profiles may forbid it in one.
ENV OMPI_MCA_btl_vader_single_copy_mechanism=none HWLOC_COMPONENTS=-gl
USER mpiuser
WORKDIR /home/mpiuser
EXPOSE 2222
ENTRYPOINT ["/usr/bin/tini", "-s", "--", "/usr/local/lib/lockstep/entrypoint"]
CMD ["lockstep", "launch", "--", "lockstep", "train", "cnn", "--data", "digits", "--epochs", "20", "--global-batch", "64"]
