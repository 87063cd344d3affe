"""Starts machines of smolvm, one after the other: smolvm.py PACKAGE IMAGE MIB.

`start` on standard input: a machine is made, and one line of JSON says how many milliseconds it took
from the call to the output of `echo hello`, those of `true` in the warm machine, the process that runs
it, and how many connections its agent served before the first command. `delete`: the machine is deleted, and `{}` says that nothing of it runs any more. In between
this process waits, so that it takes nothing from the machines that are measured in turns with it.
"""

import glob
import json
import os
import sys
import time

package, image, mib = sys.argv[1:]
sys.path.insert(0, package)

from smol import Machine, MachineConfig, ResourceSpec  # noqa: E402


def milliseconds_since(start):
    return (time.perf_counter() - start) * 1000


def monitors():
    """The processes that may have a guest's memory."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.readlink(f"/proc/{pid}/exe").endswith("smol-vmm"):
                found.append(int(pid))
        except OSError:
            pass
    return found


def connections_before_command():
    """By the agent's log: how often it was asked whether it is ready."""
    (log,) = glob.glob(os.path.expanduser("~/.cache/smolvm/vms/*/agent-console.log"))
    with open(log, encoding="utf-8", errors="replace") as text:
        return text.read().partition('"running command"')[0].count('"accepted connection"')


def start():
    begin = time.perf_counter()
    resources = ResourceSpec(cpus=1, memory_mb=int(mib))
    machine = Machine.create(MachineConfig(image=image, resources=resources))
    said = machine.exec(["echo", "hello"]).stdout
    output = milliseconds_since(begin)
    assert said == "hello\n", said
    trips = []
    for _ in range(10):
        begin = time.perf_counter()
        machine.exec(["true"])
        trips.append(milliseconds_since(begin))
    (pid,) = monitors()
    served = connections_before_command()
    return machine, {"output": output, "exec": trips, "pid": pid, "connections": served}


def delete(machine):
    machine.delete()
    while monitors():
        time.sleep(0.01)
    return None, {}


machine = None
for order in sys.stdin:
    machine, answer = delete(machine) if machine else start()
    print(json.dumps(answer), flush=True)
