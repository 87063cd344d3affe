# Tries all its arguments at the same time: `tcp ADDRESS PORT`, `udp ADDRESS PORT`, `ping ADDRESS`.
# One line of JSON for each, in order.
import errno, json, socket, subprocess, sys, threading, time

LIMIT = 60


def family(address):
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def tcp(address, port):
    with socket.socket(family(address), socket.SOCK_STREAM) as s:
        s.settimeout(LIMIT)
        s.connect((address, int(port)))
        s.recv(4096)


def udp(address, port):
    with socket.socket(family(address), socket.SOCK_DGRAM) as s:
        s.settimeout(LIMIT)
        s.connect((address, int(port)))
        s.send(b"hello")
        s.recv(4096)


def ping(address):
    args = ["ping", "-n", "-c", "1", "-W", str(LIMIT), address]
    done = subprocess.run(args, capture_output=True, text=True)
    if done.returncode:
        prohibited = "filtered" in done.stdout or "prohibited" in done.stdout
        raise OSError("prohibited" if prohibited else done.stdout + done.stderr)


def attempt(index, what):
    begun = time.monotonic()
    result = "ok"
    try:
        kind, *rest = what.split()
        {"tcp": tcp, "udp": udp, "ping": ping}[kind](*rest)
    except TimeoutError:
        result = "timeout"
    except OSError as error:
        result = errno.errorcode.get(error.errno, str(error))
    seconds = time.monotonic() - begun
    results[index] = {"what": what, "result": result, "seconds": seconds}


results = {}
threads = [threading.Thread(target=attempt, args=one) for one in enumerate(sys.argv[1:])]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
for index in range(len(threads)):
    print(json.dumps(results[index]))
