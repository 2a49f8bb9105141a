"""Add latency to the links of a lab of network namespaces whose kernel has no netem.

    latency.py SECONDS HOST_END:LAB_END …       # prints "ready", and runs until it is killed

tools/labs/net.sh starts this program. For each link, it creates two TAP devices, the host's end and
the lab's end, and forwards frames between them. It delays frames from the host's end by SECONDS,
and forwards frames from the lab's end at once. Each frame between two hosts is therefore delayed
once, at the sender's link. A frame may be a TCP segment of up to 64 KiB, with the kernel's offload
header. Python is fast enough for such large frames: 2,000 of them per second are 1 Gbit/s.
"""

import contextlib
import fcntl
import os
import select
import struct
import sys
import time
from collections import deque
from collections.abc import Sequence

TUNSETIFF = 0x400454CA
TUNSETOFFLOAD = 0x400454D0
TAP = 0x0002
NO_INFORMATION = 0x1000
OFFLOAD_HEADER = 0x4000
CHECKSUM_AND_TCP4 = 0x01 | 0x02
LARGEST = 1 << 17


def tap(name: str) -> int:
    """Create a TAP device for TCP segments of up to 64 KiB; return its file descriptor."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    request = struct.pack("16sH22x", name.encode(), TAP | NO_INFORMATION | OFFLOAD_HEADER)
    fcntl.ioctl(descriptor, TUNSETIFF, request)
    fcntl.ioctl(descriptor, TUNSETOFFLOAD, CHECKSUM_AND_TCP4)
    return descriptor


def write(device: int, frame: bytes) -> None:
    """Write a frame to a device; if its link is down, the frame is lost."""
    with contextlib.suppress(OSError):
        os.write(device, frame)


def forward(links: Sequence[tuple[int, int]], seconds: float) -> None:
    """Forward frames between both ends of each link until the program is killed.

    :param links: file descriptors of the host's end and the lab's end of each link
    :param seconds: delay of the frames from the host's end
    """
    out = dict(links) | {lab: host for host, lab in links}
    hosts = {host for host, _ in links}
    delayed = deque[tuple[float, int, bytes]]()  # Frames to write, with the time and the device.
    while True:
        wait = max(0.0, delayed[0][0] - time.monotonic()) if delayed else None
        for device in select.select(list(out), [], [], wait)[0]:
            try:
                frame = os.read(device, LARGEST)
            except OSError:
                continue  # There is no frame, or the device is down.
            if device in hosts:
                delayed.append((time.monotonic() + seconds, out[device], frame))
            else:
                write(out[device], frame)
        while delayed and delayed[0][0] <= time.monotonic():
            _, device, frame = delayed.popleft()
            write(device, frame)


def main() -> None:
    """Create the devices, print "ready", and forward frames."""
    pairs = [word.split(":") for word in sys.argv[2:]]
    links = [(tap(host), tap(lab)) for host, lab in pairs]
    print("ready", flush=True)
    forward(links, float(sys.argv[1]))


if __name__ == "__main__":
    main()
