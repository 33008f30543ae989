# Sourced by the scripts: install_packages installs the Debian or Ubuntu packages that are missing.
#
# Needs root or sudo, but only if something is missing. Anything else than apt is left to the reader: the list below
# says what the build wants.

lockstep_packages=(
  build-essential cmake ninja-build ccache lld git
  openmpi-bin libopenmpi-dev
  libdnnl-dev libhwloc-dev libssl-dev zlib1g-dev libzip-dev libpcre2-dev libutf8proc-dev libturbojpeg0-dev libspng-dev
  libcxxopts-dev libspdlog-dev libfmt-dev nlohmann-json3-dev libtomlplusplus-dev
  libgtest-dev libgmock-dev libbenchmark-dev
)

# install_packages PACKAGE…: prints nothing if all of them are there.
install_packages() {
  if ! command -v dpkg-query >/dev/null; then
    echo "no dpkg on this system; the build needs what these Debian packages bring: $*" >&2
    return 0
  fi
  local package missing=()
  for package in "$@"; do
    [[ $(dpkg-query -W -f='${db:Status-Status}' "$package" 2>/dev/null) == installed ]] || missing+=("$package")
  done
  ((${#missing[@]})) || return 0

  local as_root=()
  if ((EUID != 0)); then
    if ! command -v sudo >/dev/null; then
      echo "missing packages, and neither root nor sudo to install them: ${missing[*]}" >&2
      return 1
    fi
    as_root=(sudo)
  fi
  echo "installing ${missing[*]}"
  local log
  log=$(mktemp)
  if ! { "${as_root[@]}" apt-get -qq update &&
         "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -qq -o DPkg::Lock::Timeout=300 \
           install --yes --no-install-recommends "${missing[@]}"; } </dev/null >"$log" 2>&1; then
    cat "$log" >&2
    rm -f "$log"
    echo "could not install ${missing[*]}" >&2
    return 1
  fi
  rm -f "$log"
}
