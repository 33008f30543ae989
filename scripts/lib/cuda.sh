# Sourced by the scripts: what a build with CUDA takes, where there is a GPU for it.

# nvidia_driver: its version, "580.65.06", or nothing where it does not say; fails where there is no driver.
nvidia_driver() {
  local library
  nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | grep -m 1 -E '^[0-9]+\.[0-9.]+$' && return
  library=$(PATH=$PATH:/usr/sbin:/sbin ldconfig -p 2>/dev/null | awk '$1 == "libcuda.so.1" { print $NF; exit }')
  [[ -n $library ]] || return 1
  readlink -f "$library" | sed -n 's/.*libcuda\.so\.\([0-9]*\.[0-9.]*\)$/\1/p'
}

has_nvcc() { command -v nvcc >/dev/null || [[ -x /usr/local/cuda/bin/nvcc ]]; }

cpu_only() { echo "warning: $1; this build computes on the CPU only" >&2; }

# provide_cuda: configures a build with CUDA, and fetches what it lacks: cudnn-frontend; where there is a driver, too, the
# toolkit, cuDNN and NCCL. Without a driver, a build that has no CUDA yet compiles device code for one kind of GPU only, since
# each takes as long as the first, and without optimization, which takes two thirds of the time: no GPU will run it.
provide_cuda() {
  local driver missing youngest quickly=()
  "$root/scripts/get-cudnn-frontend" || {
    cpu_only "cudnn-frontend could not be fetched → scripts/get-cudnn-frontend FILE.whl takes it from a file"
    return 0
  }
  grep -qs '^CMAKE_CUDA_COMPILER:' "$build/CMakeCache.txt" || nvidia_driver >/dev/null ||
    quickly=(-DCMAKE_CUDA_ARCHITECTURES=90-real "-DCMAKE_CUDA_FLAGS=-Xcicc -O0 -Xptxas -O0")
  configure "${quickly[@]}"
  missing=$(sed -n 's/.*  without CUDA: //p' "$build/configure.log")
  [[ -n $missing ]] && driver=$(nvidia_driver) || return 0

  youngest=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | grep -E '^[0-9]+\.[0-9]+$' | sort -V | tail -1) || true
  if [[ -n $youngest && ${youngest%.*} -lt 8 ]]; then
    cpu_only "this machine's GPUs have compute capability $youngest and the program takes 8.0 (A100) or later"
  elif [[ -n $driver && ${driver%%.*} -lt 580 ]]; then
    cpu_only "CUDA: $missing. scripts/get-cuda could fetch CUDA 13, but the driver, $driver, is too old for it → install driver 580 or newer, or with 525 or newer the CUDA Toolkit 12.4 to 12.9, cudnn9-cuda-12 and libnccl-dev"
  elif ! "$root/scripts/get-cuda"; then
    cpu_only "CUDA: $missing, and it could not be fetched → scripts/get-cuda DIRECTORY takes wheels from files"
  else
    configure -U 'CUDA*' -U 'CUDNN_INCLUDE_DIR' -U 'NCCL_*'
  fi
}
