# Sourced by the scripts: where things are, and configuring and building.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
build=$root/build
export LC_ALL=C.UTF-8

# ccache wants a directory that it may write; a home directory may be read-only or missing.
if [[ -z ${CCACHE_DIR:-} ]] && ! { [[ -n ${HOME:-} ]] && mkdir -p "$HOME/.cache/ccache" 2>/dev/null && [[ -w $HOME/.cache/ccache ]]; }; then
  export CCACHE_DIR=$root/.cache/ccache
fi

# configure [OPTION…]: a Release build in build/, or build/ anew as it was configured before.
configure() {
  local options=("$@" -DCMAKE_BUILD_TYPE=Release)
  [[ ! -f $build/build.ninja ]] || options=("$@")
  mkdir -p "$build"
  cmake -S "$root" -B "$build" -G Ninja "${options[@]}" | tee "$build/configure.log"
}

# build_targets TARGET…: configures before if need be.
build_targets() {
  [[ -f $build/build.ninja ]] || configure
  cmake --build "$build" --target "$@"
}
