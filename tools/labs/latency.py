"""Add latency to links if the kernel has no netem; tools/labs/net.sh starts this program.

    latency.py SECONDS HOST_END:LAB_END …       prints "ready", and runs until it is killed

The program creates a pair of TAP devices per link and forwards frames between them: from the host's
end after SECONDS, in the other direction at once, so that each direction between two hosts takes
SECONDS longer. Whole TCP segments (up to 64 KiB, with the kernel's offload header) pass in one
piece, which makes Python fast enough: 2,000 segments per second are 1 Gbit/s.
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
    """Create a TAP device that forwards large segments."""
    made = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    asked = struct.pack("16sH22x", name.encode(), TAP | NO_INFORMATION | OFFLOAD_HEADER)
    fcntl.ioctl(made, TUNSETIFF, asked)
    fcntl.ioctl(made, TUNSETOFFLOAD, CHECKSUM_AND_TCP4)
    return made


def write(device: int, frame: bytes) -> None:
    """Write a frame to a device; if its link is down, the frame is lost."""
    with contextlib.suppress(OSError):
        os.write(device, frame)


def carry(links: Sequence[tuple[int, int]], seconds: float) -> None:
    """Forward frames until the program is killed.

    :param links: file descriptors of the host's end and the lab's end of each link
    :param seconds: delay of the frames from the host's end
    """
    out = dict(links) | {lab: host for host, lab in links}
    hosts = {host for host, _ in links}
    late = deque[tuple[float, int, bytes]]()  # Frames to send, in the order of their times.
    while True:
        wait = max(0.0, late[0][0] - time.monotonic()) if late else None
        for device in select.select(list(out), [], [], wait)[0]:
            try:
                frame = os.read(device, LARGEST)
            except OSError:
                continue  # There is no frame, or the device is down.
            if device in hosts:
                late.append((time.monotonic() + seconds, out[device], frame))
            else:
                write(out[device], frame)
        while late and late[0][0] <= time.monotonic():
            _, device, frame = late.popleft()
            write(device, frame)


def main() -> None:
    """Create the devices and forward frames."""
    pairs = [word.split(":") for word in sys.argv[2:]]
    links = [(tap(host), tap(lab)) for host, lab in pairs]
    print("ready", flush=True)
    carry(links, float(sys.argv[1]))


if __name__ == "__main__":
    main()
