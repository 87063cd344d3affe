"""Starts machines of smolvm, one after the other: smolvm.py PACKAGE IMAGE MIB.

For each machine one line of JSON: milliseconds from the call to the output of `echo hello`, those
of `true` in the warm machine, and the process that runs it. The machine lives until a line comes.
"""

import json
import os
import sys
import time

package, image, mib = sys.argv[1:]
sys.path.insert(0, package)

from smol import Machine, MachineConfig, ResourceSpec  # noqa: E402


def milliseconds_since(start):
    return (time.perf_counter() - start) * 1000


def monitor():
    """The one process with the guest's memory."""
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.readlink(f"/proc/{pid}/exe").endswith("smol-vmm"):
                return int(pid)
        except OSError:
            pass
    return 0


while True:
    start = time.perf_counter()
    resources = ResourceSpec(cpus=1, memory_mb=int(mib))
    machine = Machine.create(MachineConfig(image=image, resources=resources))
    said = machine.exec(["echo", "hello"]).stdout
    output = milliseconds_since(start)
    assert said == "hello\n", said
    trips = []
    for _ in range(10):
        start = time.perf_counter()
        machine.exec(["true"])
        trips.append(milliseconds_since(start))
    print(json.dumps({"output": output, "exec": trips, "pid": monitor()}), flush=True)
    go_on = sys.stdin.readline()
    machine.delete()
    if not go_on:
        break
