# Sourced by the scripts: packages of PyPI, of which nothing is installed.

# fetch_wheel NAME==VERSION DIRECTORY: puts it there.
fetch_wheel() {
  command -v pip3 >/dev/null || install_packages python3-pip
  pip3 download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --dest "$2" "$1" >&2
}

# unpack_wheel WHEEL PREFIX DIRECTORY: its files below PREFIX, wherever that is in it (include/), or all (""). A wheel is a zip
# file; python3 reads it where there is no unzip.
unpack_wheel() {
  command -v python3 >/dev/null || install_packages python3
  python3 - "$@" <<'END'
import pathlib, shutil, sys, zipfile
wheel, prefix, target = zipfile.ZipFile(sys.argv[1]), sys.argv[2], pathlib.Path(sys.argv[3])
for entry in wheel.infolist():
    _, found, below = f"/{entry.filename}".partition(f"/{prefix}")
    if found and below and not entry.is_dir():
        file = target / below
        file.parent.mkdir(parents=True, exist_ok=True)
        with wheel.open(entry) as source, open(file, "wb") as copy:
            shutil.copyfileobj(source, copy, 1 << 20)
        if "/bin/" in entry.filename:
            file.chmod(0o755)
END
}

# files_of_wheels PATTERN DIRECTORY NAME==VERSION…: those of their files whose path matches the regular expression, under what
# its first group says. Of a large wheel only what is taken is transferred, where the server gives parts of files.
files_of_wheels() {
  local pattern=$1 directory=$2 report
  shift 2
  command -v pip3 >/dev/null || install_packages python3-pip
  report=$(pip3 install --quiet --disable-pip-version-check --dry-run --ignore-installed --no-deps --only-binary=:all: --report - "$@") || return 1
  python3 - "$pattern" "$directory" "$report" <<'END'
import io, json, pathlib, re, sys, urllib.request, zipfile

class Remote(io.RawIOBase):
    def __init__(self, url):
        self.url, self.at = url, 0
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD")) as reply:
            self.size = int(reply.headers["Content-Length"])

    def readable(self):
        return True

    def seekable(self):
        return True

    def seek(self, offset, whence=io.SEEK_SET):
        self.at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.at, io.SEEK_END: self.size}[whence]
        return self.at

    def tell(self):
        return self.at

    def readinto(self, buffer):
        count = min(len(buffer), self.size - self.at)
        if count <= 0:
            return 0
        part = {"Range": f"bytes={self.at}-{self.at + count - 1}"}
        with urllib.request.urlopen(urllib.request.Request(self.url, headers=part)) as reply:
            if reply.status != 206:
                raise OSError("the server does not give parts of files")
            data = reply.read()
        buffer[:len(data)] = data
        self.at += len(data)
        return len(data)

def opened(url):
    try:
        return zipfile.ZipFile(io.BufferedReader(Remote(url), 1 << 20))
    except OSError:
        return zipfile.ZipFile(io.BytesIO(urllib.request.urlopen(url).read()))

for package in json.loads(sys.argv[3])["install"]:
    wheel = opened(package["download_info"]["url"])
    for entry in wheel.infolist():
        found = re.search(sys.argv[1], entry.filename)
        if found and not entry.is_dir():
            file = pathlib.Path(sys.argv[2]) / found[1]
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(wheel.read(entry))
            if "/bin/" in entry.filename:
                file.chmod(0o755)
END
}
