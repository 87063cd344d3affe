/* PID 1 of the smoke test's guest: exercises each device and does as it is told over vsock. */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

struct address { /* struct sockaddr_vm of linux/vm_sockets.h */
	uint16_t family, reserved;
	uint32_t port, cid;
	uint8_t zero[4];
};

static char buffer[65536];

static void die(const char *what)
{
	printf("init: %s: %s\n", what, strerror(errno));
	fflush(stdout);
	sync();
	reboot(RB_AUTOBOOT);
}

static int write_all(int fd, const char *data, size_t len)
{
	while (len > 0) {
		ssize_t done = write(fd, data, len);
		if (done <= 0)
			return -1;
		data += done;
		len -= done;
	}
	return 0;
}

static void serve(int fd)
{
	char command;
	uint64_t count = 0;
	ssize_t got;

	if (read(fd, &command, 1) != 1)
		return;
	if (command == 'e') { /* echo until the end */
		while ((got = read(fd, buffer, sizeof buffer)) > 0)
			write_all(fd, buffer, got);
	} else if (command == 'r') { /* take until the end, tell how much */
		while ((got = read(fd, buffer, sizeof buffer)) > 0)
			count += got;
		write_all(fd, (char *)&count, sizeof count);
	} else if (command == 's') { /* send 256 MiB */
		for (int i = 0; i < 4096; i++)
			if (write_all(fd, buffer, sizeof buffer))
				break;
	}
	close(fd);
}

int main(void)
{
	unsigned char random[16] = { 0 };
	uint64_t sum = 0;
	ssize_t got;
	struct address host = { AF_VSOCK, 0, 1024, 2 }, any = { AF_VSOCK, 0, 1025, -1U };
	int fd, control, listener;

	signal(SIGCHLD, SIG_IGN);
	signal(SIGPIPE, SIG_IGN);
	mkdir("/dev", 0755);
	mount("dev", "/dev", "devtmpfs", 0, "");
	if ((fd = open("/dev/vda", O_RDONLY)) < 0)
		die("vda");
	while ((got = read(fd, buffer, sizeof buffer)) > 0)
		for (ssize_t i = 0; i < got; i++)
			sum = sum * 31 + (unsigned char)buffer[i];
	close(fd);
	if ((fd = open("/dev/vda", O_WRONLY)) >= 0 && write(fd, buffer, 512) == 512 && fsync(fd) == 0)
		die("vda can be written");
	if ((fd = open("/dev/hwrng", O_RDONLY)) < 0 || read(fd, random, 16) != 16)
		die("hwrng");
	if ((listener = socket(AF_VSOCK, SOCK_STREAM, 0)) < 0 ||
	    bind(listener, (struct sockaddr *)&any, sizeof any) || listen(listener, 64))
		die("listen");
	if ((control = socket(AF_VSOCK, SOCK_STREAM, 0)) < 0 ||
	    connect(control, (struct sockaddr *)&host, sizeof host))
		die("connect");
	dprintf(control, "hello %016llx\n", (unsigned long long)sum);
	if (fork() == 0) {
		while ((fd = accept(listener, 0, 0)) >= 0) {
			if (fork() == 0) {
				serve(fd);
				_exit(0);
			}
			close(fd);
		}
		die("accept");
	}
	while (read(control, buffer, 1) > 0)
		;
	dprintf(control, "bye\n");
	close(control);
	reboot(RB_AUTOBOOT);
}
