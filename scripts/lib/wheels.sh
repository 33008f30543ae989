# Sourced by the scripts: packages of PyPI, of which nothing is installed.

# fetch_wheel NAME==VERSION DIRECTORY: puts it there.
fetch_wheel() {
  command -v pip3 >/dev/null || install_packages python3-pip
  pip3 download --quiet --disable-pip-version-check --no-deps --only-binary=:all: --dest "$2" "$1" >&2
}

# unpack_wheel PATTERN DIRECTORY WHEEL…: of each, a file or an address, those files whose path matches the regular expression,
# under what its first group says. A wheel is a zip file; python3 reads it where there is no unzip, and of one that has an
# address only the parts that it needs, where the server gives parts of files.
unpack_wheel() {
  command -v python3 >/dev/null || install_packages python3
  python3 - "$@" <<'END'
import io, pathlib, re, shutil, sys, urllib.request, zipfile

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

def opened(source):
    if "://" not in source:
        return zipfile.ZipFile(source)
    try:
        return zipfile.ZipFile(io.BufferedReader(Remote(source), 1 << 20))
    except OSError:
        return zipfile.ZipFile(io.BytesIO(urllib.request.urlopen(source).read()))

pattern, target, *sources = sys.argv[1:]
for source in sources:
    wheel = opened(source)
    for entry in wheel.infolist():
        found = re.search(pattern, entry.filename)
        if found and not entry.is_dir():
            file = pathlib.Path(target) / found[1]
            file.parent.mkdir(parents=True, exist_ok=True)
            with wheel.open(entry) as packed, open(file, "wb") as copy:
                shutil.copyfileobj(packed, copy, 1 << 20)
            if "/bin/" in entry.filename:
                file.chmod(0o755)
END
}

# addresses_of_wheels NAME==VERSION…: where they can be had, one a line.
addresses_of_wheels() {
  command -v pip3 >/dev/null || install_packages python3-pip
  pip3 install --quiet --disable-pip-version-check --dry-run --ignore-installed --no-deps --only-binary=:all: --report - "$@" |
    python3 -c 'import json, sys
for package in json.load(sys.stdin)["install"]: print(package["download_info"]["url"])'
}
