"""Hosts on one machine whose network loses packets, delays them or breaks: network namespaces, each with one network
device of this process's (TUN). What a host sends comes here, and is passed to the host that it is for, or is not.

In the place of ssh, over the same network:
  hosts.py serve                   on a host: runs the commands that come to PORT, as sshd does
  hosts.py connect HOST COMMAND    runs it there, with this process's standard input and output
"""
import contextlib
import ctypes
import fcntl
import heapq
import os
import random
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time

TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
MTU = 9000
PORT = 22


def die_with_parent():
    """What a new process calls: whoever kills this one kills it."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def run(*words):
    subprocess.run([str(word) for word in words], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def why_not():
    """Why there can be no hosts here; None: there can."""
    if os.geteuid() != 0:
        return "not root"
    if not os.path.exists("/dev/net/tun"):
        return "no /dev/net/tun"
    try:
        with contextlib.closing(Hosts(1)):
            return None
    except (OSError, subprocess.CalledProcessError) as error:
        return f"no network namespaces ({error})"


class Hosts:
    """`count` hosts. Links are those of fresh hosts: nothing is lost or late until somebody says so."""

    def __init__(self, count, prefix="lkm"):
        self.names = [f"{prefix}{os.getpid() % 100000}{chr(ord('a') + host)}" for host in range(count)]
        self.loss, self.delay = 0.0, 0.0  # of every packet; seconds
        self._cut, self._cut_but_ssh = set(), set()
        self._fds, self._servers = [], []
        self._thread = None
        self._wake = os.pipe()
        try:
            for host, name in enumerate(self.names):
                run("ip", "netns", "add", name)
                fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
                self._fds.append(fd)
                fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH22x", name.encode(), IFF_TUN | IFF_NO_PI))
                run("ip", "link", "set", name, "netns", name)
                run("ip", "-n", name, "addr", "add", f"{self.address(host)}/24", "dev", name)
                run("ip", "-n", name, "link", "set", "lo", "up")
                run("ip", "-n", name, "link", "set", name, "mtu", MTU, "txqueuelen", 5000, "up")
            for host in range(count):
                self._servers.append(subprocess.Popen([sys.executable, __file__, "serve"], stdout=subprocess.PIPE,
                                                      stderr=subprocess.DEVNULL, preexec_fn=lambda: self.enter(host)))
            for server in self._servers:
                server.stdout.readline()  # it listens
        except BaseException:
            self.close()
            raise
        self._random = random.Random(1)
        self._thread = threading.Thread(target=self._relay, daemon=True)
        self._thread.start()

    @staticmethod
    def address(host):
        return f"10.214.88.{host + 1}"

    def cut(self, host):
        """Silently: no packet comes from or to it."""
        self._cut.add(host)

    def cut_but_ssh(self, host):
        """The same of all but what goes to and from PORT."""
        self._cut_but_ssh.add(host)

    def mend(self, host):
        self._cut.discard(host)

    def heal(self):
        self.loss, self.delay = 0.0, 0.0
        self._cut.clear()
        self._cut_but_ssh.clear()

    def enter(self, host):
        """What a new process calls to be on that host, and to end with this one."""
        die_with_parent()
        libc = ctypes.CDLL(None, use_errno=True)
        with open(f"/run/netns/{self.names[host]}") as there:
            if libc.setns(there.fileno(), 0) != 0:
                raise OSError(ctypes.get_errno(), "setns")

    def close(self):
        os.write(self._wake[1], b"x")
        if self._thread is not None:
            self._thread.join()
        for server in self._servers:
            server.kill()
            server.wait()
            server.stdout.close()
        for fd in [*self._fds, *self._wake]:
            os.close(fd)
        for name in self.names:
            if os.path.exists(f"/run/netns/{name}"):
                run("ip", "netns", "del", name)

    def _relay(self):
        late, number = [], 0  # (when, number, to, packet)
        poll = select.poll()
        for fd in [*self._fds, self._wake[0]]:
            poll.register(fd, select.POLLIN)
        by_fd = {fd: host for host, fd in enumerate(self._fds)}
        while True:
            wait = None if not late else max(0.0, late[0][0] - time.monotonic()) * 1000
            for fd, _ in poll.poll(wait):
                if fd == self._wake[0]:
                    return
                for _ in range(64):
                    try:
                        packet = os.read(fd, MTU + 64)
                    except BlockingIOError:
                        break
                    to = packet[19] - 1 if len(packet) >= 20 and packet[0] >> 4 == 4 else -1
                    if not 0 <= to < len(self._fds) or self._random.random() < self.loss:
                        continue
                    if self._cut & {by_fd[fd], to} or (self._cut_but_ssh & {by_fd[fd], to} and PORT not in ports_of(packet)):
                        continue
                    if self.delay == 0 and not late:
                        self._send(to, packet)
                    else:
                        number += 1
                        heapq.heappush(late, (time.monotonic() + self.delay, number, to, packet))
            while late and late[0][0] <= time.monotonic():
                _, _, to, packet = heapq.heappop(late)
                if to not in self._cut:
                    self._send(to, packet)

    def _send(self, to, packet):
        with contextlib.suppress(OSError):  # its queue is full, or the host is gone: a lost packet
            os.write(self._fds[to], packet)


def ports_of(packet):
    """Of an IPv4 packet of TCP."""
    return struct.unpack_from("!HH", packet, 4 * (packet[0] & 15))


def serve():
    listener = socket.create_server(("", PORT))
    print("listening", flush=True)
    while True:
        connection, _ = listener.accept()
        if os.fork() == 0:
            os.setsid()
            line = b""
            while not line.endswith(b"\n"):
                line += connection.recv(1)
            for fd in (0, 1):
                os.dup2(connection.fileno(), fd)
            connection.close()
            listener.close()
            os.execl("/bin/sh", "sh", "-c", line.decode())
        connection.close()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def connect(name, command):
    connection = socket.create_connection((Hosts.address(ord(name[-1]) - ord("a")), PORT))
    connection.sendall(command.replace("\n", " ").encode() + b"\n")
    ends = {0: connection.fileno(), connection.fileno(): 1}
    while connection.fileno() in ends:
        for fd in select.select(list(ends), [], [])[0]:
            data = os.read(fd, 65536)
            if data:
                while data:
                    data = data[os.write(ends[fd], data):]
                continue
            if fd == 0:
                connection.shutdown(socket.SHUT_WR)
            del ends[fd]


if __name__ == "__main__":
    serve() if sys.argv[1] == "serve" else connect(*sys.argv[2:4])
