/*
 * Marks the kernel code that runs while a machine boots and works: a plugin for
 * QEMU's TCG (plugin API version 1, QEMU 4.2 and later).
 *
 *   cc -O2 -shared -fPIC -o touched.so touched.c
 *   qemu-system-x86_64 ... -plugin ./touched.so,marks=FILE,start=ADDRESS
 *
 * FILE is made by the caller (xtask/src/first_functions), which knows the kernel's
 * symbols: a zero for each byte of code from ADDRESS (hexadecimal) on. It becomes 1
 * where an instruction begins that was translated, which QEMU does right before it
 * runs it for the first time. FILE is what counts even if QEMU is killed, and several
 * may share it.
 *
 * With `nested=on` the machine hosts another one, and only the inner one's code is
 * marked: what comes after VMRUN and before the instruction that follows it. For
 * machines with one CPU. The two kernels have the same addresses, but not the same
 * memory, so each block of both is translated.
 */
#include <fcntl.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "qemu.h"

EXPORT int qemu_plugin_version = 1;

static uint8_t *marks;
static uint64_t start, size;
static bool nested, inside;
/* Where the outer machine goes on after the inner one's exit. */
static uint64_t resume;

static void enters(unsigned int vcpu, void *data)
{
	(void)vcpu;
	inside = true;
	resume = (uint64_t)(uintptr_t)data;
}

static void leaves(unsigned int vcpu, void *data)
{
	(void)vcpu;
	(void)data;
	inside = false;
}

/* Keeps `inside` true to what runs. */
static void follow(struct qemu_plugin_insn *insn, uint64_t addr)
{
	if (is_vmrun(insn)) {
		uint64_t next = addr + qemu_plugin_insn_size(insn);
		qemu_plugin_register_vcpu_insn_exec_cb(
			insn, enters, QEMU_PLUGIN_CB_NO_REGS,
			(void *)(uintptr_t)next);
	} else if (addr == resume) {
		inside = false;
		qemu_plugin_register_vcpu_insn_exec_cb(
			insn, leaves, QEMU_PLUGIN_CB_NO_REGS, NULL);
	}
}

static void translated(qemu_plugin_id_t id, struct qemu_plugin_tb *tb)
{
	size_t n = qemu_plugin_tb_n_insns(tb);
	(void)id;
	for (size_t i = 0; i < n; i++) {
		struct qemu_plugin_insn *insn = qemu_plugin_tb_get_insn(tb, i);
		uint64_t addr = qemu_plugin_insn_vaddr(insn);
		if (nested)
			follow(insn, addr);
		if (inside == nested && addr - start < size)
			marks[addr - start] = 1;
	}
}

static int fail(const char *what)
{
	fprintf(stderr, "touched: %s\n", what);
	return -1;
}

EXPORT int qemu_plugin_install(qemu_plugin_id_t id, const void *info, int argc,
			       char **argv)
{
	const char *path = NULL;
	struct stat st;
	(void)info;
	for (int i = 0; i < argc; i++) {
		if (!strncmp(argv[i], "marks=", 6))
			path = argv[i] + 6;
		else if (!strncmp(argv[i], "start=", 6))
			start = strtoull(argv[i] + 6, NULL, 16);
		else if (!strcmp(argv[i], "nested=on"))
			nested = true;
		else
			return fail("words are marks=FILE, start=ADDRESS and nested=on");
	}
	int fd = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
	if (fd < 0 || fstat(fd, &st) || !st.st_size || !start)
		return fail("marks=FILE or start=ADDRESS is missing, or no such file");
	size = st.st_size;
	marks = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	close(fd);
	if (marks == MAP_FAILED)
		return fail("the file cannot be mapped");
	qemu_plugin_register_vcpu_tb_trans_cb(id, translated);
	return 0;
}
