#!/bin/sh
# What `cargo xtask first-functions` runs to see which of the kernel's functions common programs use. It
# sets BANTAM (the program), IMAGE (Debian with Python) and bantam's own variables. What only matters is
# which code of the kernel runs, so one of each is enough, and most output goes nowhere.
set -eu
PORT=18765

run() {
	"$BANTAM" run --engine emulated -I "$IMAGE" "$@"
}

# Files, pipes, processes, signals; Python's threads, sockets and mappings.
commands() {
	cat <<'GUEST'
set -u
ls -laR /etc > /dev/null
find / -xdev -type f | head -2000 | xargs -n 200 sha256sum
mkdir -p /work/a/b
cd /work
for n in 1 2 3 4 5; do
	echo $n > old$n; mv old$n file$n; ln -s file$n link$n; ln file$n hard$n
	chmod 700 file$n; chown 1:1 file$n; touch file$n; cat link$n; cp -a file$n a/b
done
tar cf all.tar file*; tar xf all.tar -C /tmp; rm -r a link*
mkfifo pipe; (echo through > pipe &); cat pipe
dd if=/dev/zero of=big bs=1M count=20; truncate -s 1M big; dd if=/dev/urandom bs=64k count=8 | wc -c; sync
(sleep 0.2 & sleep 0.1; wait)
trap 'echo caught' USR1; kill -USR1 $$; sleep 0.05; timeout 0.1 sleep 5
yes | head -c 3000000 | gzip -c | gunzip | sort | uniq -c
ps aux; cat /proc/meminfo /proc/cpuinfo /proc/stat /proc/self/maps /proc/mounts /proc/self/status
df; uname -a; id; nice -n 5 true; ulimit -a
mount -t tmpfs none /mnt && umount /mnt
perl -e 'print sort map { rand } 1 .. 1000'
su nobody -s /bin/sh -c 'id; ls /root'
python3 - <<'PYTHON'
import fcntl, mmap, multiprocessing, os, pty, select, signal, socket, subprocess, tempfile, threading, time

def answer(server):
    link, _ = server.accept()
    link.sendall(link.recv(100000) * 3)
    link.close()

def ask(family, address):
    server = socket.socket(family)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.bind(address)
    server.listen(5)
    thread = threading.Thread(target=answer, args=(server,))
    thread.start()
    client = socket.socket(family)
    client.connect(server.getsockname())
    client.sendall(b'x' * 50000)
    while client.recv(65536):
        pass
    thread.join()

ask(socket.AF_INET, ('127.0.0.1', 0))
ask(socket.AF_UNIX, '/tmp/socket')
datagrams = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
datagrams.bind(('127.0.0.1', 0))
datagrams.sendto(b'a', datagrams.getsockname())
datagrams.recv(10)
one, other = socket.socketpair()
one.send(b'1')
select.select([other], [], [], 1)
select.poll().poll(1)
polled = select.epoll()
polled.register(other, select.EPOLLIN)
polled.poll(1)

print(subprocess.run(['sh', '-c', 'echo out; exit 3'], capture_output=True))
memory = mmap.mmap(-1, 1 << 22)
memory[:4096] = b'z' * 4096
child = os.fork()
if child == 0:
    memory[0:4] = b'abcd'
    os._exit(0)
os.waitpid(child, 0)
with tempfile.NamedTemporaryFile() as file:
    file.write(os.urandom(300000))
    file.flush()
    os.fsync(file.fileno())
    fcntl.flock(file, fcntl.LOCK_EX)
    with mmap.mmap(file.fileno(), 4096) as mapped:
        mapped[0:4] = b'abcd'
        mapped.flush()
    os.ftruncate(file.fileno(), 10)
with multiprocessing.Pool(2) as pool:
    print(pool.map(len, ['a', 'bc']))
signal.signal(signal.SIGALRM, lambda *_: None)
signal.setitimer(signal.ITIMER_REAL, 0.01)
time.sleep(0.05)
blocks = [bytearray(1 << 20) for _ in range(60)]
del blocks
pty.spawn(['sh', '-c', 'stty -a; tty; sleep 0.1 & jobs; wait'])
PYTHON
exit 0
GUEST
}

echo 'one CPU'
commands | run -i -- bash
echo 'several CPUs, another user, a timeout'
commands | run -i --cpus 2 -- bash
run -u nobody -- python3 -c 'print(2 ** 10)'
run --timeout 1s -- sh -c 'sleep 100 & sleep 100' || test $? = 124

echo 'a terminal'
printf 'stty size\nsleep 9 &\njobs\nkill %%1\nls --color /\nexit\n' |
	script -qec "'$BANTAM' run --engine emulated -it -I '$IMAGE' -- bash" /dev/null

echo 'a named machine, its disk, and its network: it asks itself by way of the host'
machine() {
	verb=$1
	shift
	"$BANTAM" "$verb" -n workload "$@"
}
machine create --engine emulated --cpus 2 --net --allow-host-loopback -p "$PORT:8080" -I "$IMAGE"
machine start
commands | machine exec -i -- bash
machine exec -e PORT="$PORT" -- python3 -c '
import os, socket, threading

def all_of(link, size):
    while size > 0:
        size -= len(link.recv(65536))

def serve():
    link, _ = server.accept()
    all_of(link, 1000000)
    link.sendall(b"y" * 1000000)
    link.close()

server = socket.create_server(("", 8080))
threading.Thread(target=serve).start()
client = socket.create_connection(("host.bantam.internal", int(os.environ["PORT"])))
client.sendall(b"x" * 1000000)
all_of(client, 1000000)
print(socket.getaddrinfo("localhost", 80)[0])
'
machine exec -- cat /proc/net/dev /proc/net/tcp /proc/net/route
machine stop
machine start
machine exec -- ls /work
machine delete --force
