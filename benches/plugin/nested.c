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
 *   0   magic
 *   1   symbols H of the host's kernel
 *   2   symbols G of the guest's kernel
 *   3   steps S
 *   4   handlers of exits E
 *   5   boots B that the file has room for; further ones are not counted
 *   6   the host's function that starts a program: counting begins anew
 *   7   the guest's entry point (physical)
 *   8   the guest's function after which low addresses are /init's
 *   9   the guest's function after which the next function of a step begins it
 *   10  out: boots that came to /init
 *   11              H symbol addresses, ascending
 *   11 + H          G symbol addresses, ascending
 *   11 + H + G      S functions of the guest, ascending, each of which begins a step
 *   11 + H + G + S  E functions of the host, ascending, each of which answers an exit
 *   then for each boot
 *     H + 1 counters: low addresses, symbols; G + 1 of the guest's in the same order
 *     for the time before the guest's first instruction, for that before the first step,
 *     and for each step: instructions of the host, of the guest, exits
 *     for exits that no handler was seen to answer, and for each handler: exits,
 *     instructions of the host from the exit until the guest goes on
 *
 * Counters are from the start of the last program before a guest's first instruction
 * to the first instruction of the guest's /init. A translation block counts as a whole
 * when it is entered, under the symbol of its first instruction. Of several handlers
 * that run for one exit the last counts.
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

#define MAGIC 0x32646574736e6c62ULL

EXPORT int qemu_plugin_version = 1;

enum { HOST, GUEST };
enum { MAGIC_WORD, SYMBOLS, STEPS = 3, HANDLERS, ROOM, EXEC, ENTRY, INIT, INITCALL,
       BOOTS, HEADER };
/* Of a step. */
enum { EXITS = 2, PER_STEP };
/* Of a handler. */
enum { ANSWERED, ANSWERING, PER_HANDLER };

static uint64_t *words;
static uint64_t symbols[2], steps, handlers;
static uint64_t *symbol_addr[2], *step_addr, *handler_addr;
/* Of the boot that is counted. */
static uint64_t *counters[2], *step_counters, *handler_counters;
/* Those of the first, and how many a boot has. */
static uint64_t *first_counters, per_boot;

/* Whose instructions run, and where the host goes on after the guest's exit. */
static int who = HOST;
static uint64_t resume;
/* A program was started; its guest was entered; the guest's first instruction ran. */
static bool counting, entered, booting;
static bool init_next, step_next;
static uint64_t *step;
/* Since the guest's last exit: who answers it, from 1; the host's instructions. */
static uint64_t handler, answering;

struct block {
	uint64_t addr;
	uint64_t instructions;
	/* By whose it is: the same addresses are both kernels'. */
	uint64_t counter[2];
	/* The step and the handler that begin here, from 1; 0: none. */
	uint64_t step, handler;
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

/* The one that begins at `addr`, from 1; 0: none. */
static uint64_t beginning(const uint64_t *addrs, uint64_t n, uint64_t addr)
{
	uint64_t i = place(addrs, n, addr);
	return i && addrs[i - 1] == addr ? i : 0;
}

static void program_begins(void)
{
	counting = words[BOOTS] < words[ROOM];
	entered = false;
	if (!counting)
		return;
	counters[HOST] = first_counters + words[BOOTS] * per_boot;
	counters[GUEST] = counters[HOST] + symbols[HOST] + 1;
	step_counters = counters[GUEST] + symbols[GUEST] + 1;
	handler_counters = step_counters + (steps + 2) * PER_STEP;
	memset(counters[HOST], 0, per_boot * sizeof *words);
	step = step_counters;
}

static void host_runs(const struct block *b)
{
	if (!booting && b->addr == words[EXEC])
		program_begins();
	if (b->handler)
		handler = b->handler;
}

static void guest_runs(const struct block *b)
{
	if (counting && !booting && b->addr == words[ENTRY]) {
		booting = true;
		init_next = step_next = false;
		step = step_counters + PER_STEP;
	}
	if (b->addr == words[INIT])
		init_next = true;
	if (booting && init_next && b->addr < KERNEL_START) {
		counting = booting = false;
		words[BOOTS]++;
	}
	if (b->addr == words[INITCALL])
		step_next = true;
	if (booting && b->step && step_next) {
		step = step_counters + (b->step + 1) * PER_STEP;
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
	else
		host_runs(b);
	if (!counting)
		return;
	counters[who][b->counter[who]] += b->instructions;
	step[who] += b->instructions;
	if (who == HOST)
		answering += b->instructions;
}

static void enters(unsigned int vcpu, void *data)
{
	(void)vcpu;
	who = GUEST;
	resume = (uint64_t)(uintptr_t)data;
	/* Each time but the first something was answered. */
	if (counting && entered) {
		uint64_t *answers = handler_counters + handler * PER_HANDLER;
		step[EXITS]++;
		answers[ANSWERED]++;
		answers[ANSWERING] += answering;
	}
	entered = true;
	handler = answering = 0;
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
	b->step = beginning(step_addr, steps, b->addr);
	b->handler = beginning(handler_addr, handlers, b->addr);
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
	if (fd < 0 || fstat(fd, &st) || st.st_size < (off_t)(HEADER * sizeof *words))
		return fail("counts=FILE is missing or cannot be opened");
	words = mmap(NULL, st.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	close(fd);
	if (words == MAP_FAILED || words[MAGIC_WORD] != MAGIC)
		return fail("the file is not one of counters");
	symbols[HOST] = words[SYMBOLS + HOST];
	symbols[GUEST] = words[SYMBOLS + GUEST];
	steps = words[STEPS];
	handlers = words[HANDLERS];
	symbol_addr[HOST] = words + HEADER;
	symbol_addr[GUEST] = symbol_addr[HOST] + symbols[HOST];
	step_addr = symbol_addr[GUEST] + symbols[GUEST];
	handler_addr = step_addr + steps;
	first_counters = handler_addr + handlers;
	per_boot = symbols[HOST] + 1 + symbols[GUEST] + 1 + (steps + 2) * PER_STEP +
		   (handlers + 1) * PER_HANDLER;
	const uint64_t *end = first_counters + words[ROOM] * per_boot;
	if ((const char *)end != (char *)words + st.st_size)
		return fail("the file's size does not fit its header");
	qemu_plugin_register_vcpu_tb_trans_cb(id, translated);
	return 0;
}
