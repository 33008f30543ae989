"""Whoever connects to a job's ports without being of it."""
import contextlib
import os
import socket
import time

from faulty_job import wait_until

HELD = []  # connections that stay open until the job has ended


OPEN_MPI = ("mpirun", "orted")


def connect(job, count, data, open_mpi=False):
    def theirs():
        return [entry for entry in job.ports() if (entry[0].role in OPEN_MPI) == open_mpi]
    ports = wait_until(theirs, 10)
    if not ports:
        raise AssertionError("the job does not listen anywhere")
    made = 0
    for process, address, port in ports:
        for _ in range(count):
            with contextlib.suppress(OSError):
                made += reach(process, address if address != "0.0.0.0" else "127.0.0.1", port, data)
    if made == 0:
        raise AssertionError(f"none of the job's ports takes connections: {[port[1:] for port in ports]}")


def reach(process, address, port, data):
    """From the process's own network."""
    here = os.open("/proc/self/ns/net", os.O_RDONLY)
    there = os.open(f"/proc/{process.pid}/ns/net", os.O_RDONLY)
    try:
        elsewhere = os.stat(here).st_ino != os.stat(there).st_ino
        if elsewhere:
            set_network(there)
        try:
            stranger = socket.create_connection((address, port), timeout=1)
        finally:
            if elsewhere:
                set_network(here)
        with contextlib.suppress(OSError):
            if data:
                stranger.sendall(data)
        HELD.append(stranger)
        return 1
    finally:
        os.close(here)
        os.close(there)


def set_network(fd):
    import ctypes
    if ctypes.CDLL(None, use_errno=True).setns(fd, 0) != 0:
        raise OSError(ctypes.get_errno(), "setns")


def garbage(job, open_mpi=False):
    for data in (os.urandom(4096), b"GET / HTTP/1.1\r\n\r\n", b"\0" * 65536):
        connect(job, 1, data, open_mpi)
    time.sleep(0.2)


def garbage_to_open_mpi(job):
    """Whose daemons read from each connection until they have waited for 10 s."""
    garbage(job, True)


def silence(job):
    connect(job, 3, b"")


def flood(job):
    connect(job, 200, b"")


def leave():
    while HELD:
        HELD.pop().close()
