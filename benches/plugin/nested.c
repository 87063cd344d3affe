/*
 * Counts where a nested boot spends its instructions, in the host's kernel and in
 * the guest's: a plugin for QEMU's TCG (plugin API version 1, QEMU 4.2 and later).
 *
 *   cc -O2 -shared -fPIC -o nested.so nested.c
 *   qemu-system-x86_64 ... -plugin ./nested.so,counts=FILE
 *
 * The machine has one CPU and hosts others by AMD's VMRUN. What comes after VMRUN
 * and before the instruction that follows it is the guest's.
 *
 * FILE is made by the caller (xtask/src/profile.rs), which knows the symbols of both
 * kernels. It is an array of 64-bit words:
 *
 *   0  magic                            3  steps S
 *   1  symbols H of the host's kernel   4  the guest's entry point (physical)
 *   2  symbols G of the guest's kernel
 *   5  the guest's function after which low addresses are /init's
 *   6  the guest's function after which the next function of a step begins it
 *   7  out: boots that came to /init
 *   8              H symbol addresses, ascending
 *   8 + H          G symbol addresses, ascending
 *   8 + H + G      S functions of the guest, ascending, each of which begins a step
 *   then H + 1 counters: low addresses, symbols; G + 1 of the guest's in the same order
 *   then for the time before the first step and each step: instructions of the host,
 *   of the guest, exits
 *
 * Counters are of the last boot, from the guest's first instruction to /init's. A
 * translation block counts as a whole when it is entered, under the symbol of its
 * first instruction.
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

#define MAGIC 0x31646574736e6c62ULL

EXPORT int qemu_plugin_version = 1;

enum { HOST, GUEST };
/* Of a step. */
enum { EXITS = 2, PER_STEP };

static uint64_t *words;
static uint64_t symbols[2], steps;
static uint64_t *symbol_addr[2], *step_addr, *counters[2], *step_counters;
static uint64_t *end;

/* Whose instructions run, and where the host goes on after the guest's exit. */
static int who = HOST;
static uint64_t resume;
static bool booting, init_next, step_next;
static uint64_t *step;

struct block {
	uint64_t addr;
	uint64_t instructions;
	/* By whose it is: the same addresses are both kernels'. */
	uint64_t counter[2];
	/* The step that begins here, from 1; 0: none. */
	uint64_t step;
};

/* The last of `n` ascending addresses that is not above `addr`, from 1. */
static uint64_t place(const uint64_t *addrs, uint64_t n, uint64_t addr)
{
	uint64_t low = 0, high = n;
	while (low < high) {
		uint64_t middle = low + (high - low) / 2;
		if (addrs[middle] <= addr)
			low = middle + 1;
		else
			high = middle;
	}
	return low;
}

static void boot_begins(void)
{
	memset(counters[HOST], 0, (char *)end - (char *)counters[HOST]);
	step = step_counters;
	booting = true;
	init_next = step_next = false;
}

static void guest_runs(const struct block *b)
{
	if (!booting && b->addr == words[4])
		boot_begins();
	if (b->addr == words[5])
		init_next = true;
	if (booting && init_next && b->addr < KERNEL_START) {
		booting = false;
		words[7]++;
	}
	if (b->addr == words[6])
		step_next = true;
	if (b->step && step_next) {
		step = step_counters + b->step * PER_STEP;
		step_next = false;
	}
}

static void block_runs(unsigned int vcpu, void *data)
{
	const struct block *b = data;
	(void)vcpu;
	if (who == GUEST && b->addr == resume)
		who = HOST;
	if (who == GUEST)
		guest_runs(b);
	if (!booting)
		return;
	counters[who][b->counter[who]] += b->instructions;
	step[who] += b->instructions;
}

static void enters(unsigned int vcpu, void *data)
{
	(void)vcpu;
	who = GUEST;
	resume = (uint64_t)(uintptr_t)data;
	if (booting)
		step[EXITS]++;
}

static void translated(qemu_plugin_id_t id, struct qemu_plugin_tb *tb)
{
	size_t n = qemu_plugin_tb_n_insns(tb);
	struct block *b = malloc(sizeof *b);
	(void)id;
	if (!b)
		abort();
	b->addr = qemu_plugin_tb_vaddr(tb);
	b->instructions = n;
	for (int w = HOST; w <= GUEST; w++)
		b->counter[w] = b->addr < KERNEL_START ?
					0 :
					place(symbol_addr[w], symbols[w], b->addr);
	b->step = place(step_addr, steps, b->addr);
	if (b->step && step_addr[b->step - 1] != b->addr)
		b->step = 0;
	qemu_plugin_register_vcpu_tb_exec_cb(tb, block_runs,
					     QEMU_PLUGIN_CB_NO_REGS, b);
	for (size_t i = 0; i < n; i++) {
		struct qemu_plugin_insn *insn = qemu_plugin_tb_get_insn(tb, i);
		uint64_t next = qemu_plugin_insn_vaddr(insn) +
				qemu_plugin_insn_size(insn);
		if (is_vmrun(insn))
			qemu_plugin_register_vcpu_insn_exec_cb(
				insn, enters, QEMU_PLUGIN_CB_NO_REGS,
				(void *)(uintptr_t)next);
	}
}

static int fail(const char *what)
{
	fprintf(stderr, "nested: %s\n", what);
	return -1;
}

EXPORT int qemu_plugin_install(qemu_plugin_id_t id, const void *info, int argc,
			       char **argv)
{
	const char *path = NULL;
	struct stat st;
	(void)info;
	for (int i = 0; i < argc; i++)
		if (!strncmp(argv[i], "counts=", 7))
			path = argv[i] + 7;
	int fd = path ? open(path, O_RDWR | O_CLOEXEC) : -1;
	if (fd < 0 || fstat(fd, &st) || st.st_size < 64)
		return fail("counts=FILE is missing or cannot be opened");
	words = mmap(NULL, st.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	close(fd);
	if (words == MAP_FAILED || words[0] != MAGIC)
		return fail("the file is not one of counters");
	symbols[HOST] = words[1];
	symbols[GUEST] = words[2];
	steps = words[3];
	symbol_addr[HOST] = words + 8;
	symbol_addr[GUEST] = symbol_addr[HOST] + symbols[HOST];
	step_addr = symbol_addr[GUEST] + symbols[GUEST];
	counters[HOST] = step_addr + steps;
	counters[GUEST] = counters[HOST] + symbols[HOST] + 1;
	step_counters = counters[GUEST] + symbols[GUEST] + 1;
	end = step_counters + (steps + 1) * PER_STEP;
	if ((char *)end != (char *)words + st.st_size)
		return fail("the file's size does not fit its header");
	qemu_plugin_register_vcpu_tb_trans_cb(id, translated);
	return 0;
}
