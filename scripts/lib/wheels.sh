# Sourced by the scripts: packages of PyPI, of which nothing is installed.

# fetch_wheel NAME==VERSION DIRECTORY: puts it there.
fetch_wheel() {
  command -v pip3 >/dev/null || install_packages python3-pip
  pip3 download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --dest "$2" "$1" >&2
}

# unpack_wheel PATTERN DIRECTORY WHEEL…: unpack_wheel.py.
unpack_wheel() {
  command -v python3 >/dev/null || install_packages python3
  python3 "$(dirname "${BASH_SOURCE[0]}")/unpack_wheel.py" "$@"
}

# addresses_of_wheels NAME==VERSION…: where they can be had, one a line.
addresses_of_wheels() {
  command -v pip3 >/dev/null || install_packages python3-pip
  pip3 install --quiet --disable-pip-version-check --dry-run --ignore-installed --no-deps --only-binary=:all: --report - "$@" |
    python3 -c 'import json, sys
for package in json.load(sys.stdin)["install"]: print(package["download_info"]["url"])'
}
