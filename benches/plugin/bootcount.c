/*
 * Counts guest instructions per kernel function while a machine boots: a plugin
 * for QEMU's TCG (plugin API version 1, QEMU 4.2 and later).
 *
 *   cc -O2 -shared -fPIC -o bootcount.so bootcount.c
 *   qemu-system-x86_64 ... -plugin ./bootcount.so,counts=FILE
 *
 * FILE is made by the caller (benches/src/counts.rs), which knows the kernel's
 * symbols; this program only compares addresses. It is an array of 64-bit words:
 *
 *   0  magic         3  vCPUs
 *   1  symbols S     4  copies C
 *   2  marks M       5  the mark after which low addresses are user space
 *   6  out: total at the first instruction in user space    7  unused
 *   8              S symbol addresses, ascending
 *   8 + S          M mark addresses
 *   8 + S + M      M numbers of marks, from 1: each must be reached before; 0: none
 *   8 + S + 2 * M  M numbers of copies, from 1: which is made at this mark; 0: none
 *   8 + S + 3 * M  M out: total when the mark was first reached, 0 if never
 *   then, for each vCPU, S + 3 counters: all, low addresses, user space, symbols
 *   then C copies of the counters
 *
 * A translation block counts as a whole when it is entered, under the symbol of
 * its first instruction. A string instruction counts once per repetition.
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

#define MAGIC 0x32746e756f63626cULL

EXPORT int qemu_plugin_version = 1;

enum { ALL, LOW, USER, FIRST_SYMBOL };

static uint64_t *words;
static uint64_t symbols, marks, vcpus, copies, user_mark;
static uint64_t *symbol_addr, *mark_addr, *mark_after, *mark_copy, *mark_at;
static uint64_t *counters;
static size_t per_vcpu;

/* What a translation block adds to, and how much. */
struct block {
	uint64_t counter;
	uint64_t instructions;
};

static uint64_t total(void)
{
	uint64_t sum = 0;
	for (uint64_t v = 0; v < vcpus; v++)
		sum += counters[v * per_vcpu + ALL];
	return sum;
}

/* Only its own vCPU's thread writes a counter. */
static void block_runs(unsigned int vcpu, void *data)
{
	const struct block *b = data;
	if (vcpu >= vcpus)
		return;
	uint64_t *mine = counters + vcpu * per_vcpu;
	mine[ALL] += b->instructions;
	mine[b->counter] += b->instructions;
	if (b->counter == USER && !words[6])
		words[6] = total();
}

static void mark_reached(unsigned int vcpu, void *data)
{
	uint64_t mark = (uint64_t)(uintptr_t)data, never = 0;
	uint64_t after = mark_after[mark], copy = mark_copy[mark];
	(void)vcpu;
	if (mark_at[mark] || (after && !mark_at[after - 1]))
		return;
	if (!__atomic_compare_exchange_n(&mark_at[mark], &never, total(), false,
					 __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
		return;
	if (copy)
		memcpy(counters + copy * vcpus * per_vcpu, counters,
		       vcpus * per_vcpu * sizeof *counters);
}

static uint64_t counter_of(uint64_t addr)
{
	if (addr < KERNEL_START || !symbols || addr < symbol_addr[0])
		return mark_at[user_mark] ? USER : LOW;
	size_t low = 0, high = symbols;
	while (high - low > 1) {
		size_t middle = low + (high - low) / 2;
		if (symbol_addr[middle] <= addr)
			low = middle;
		else
			high = middle;
	}
	return FIRST_SYMBOL + low;
}

static void translated(qemu_plugin_id_t id, struct qemu_plugin_tb *tb)
{
	size_t n = qemu_plugin_tb_n_insns(tb);
	struct block *b = malloc(sizeof *b);
	(void)id;
	if (!b)
		abort();
	b->counter = counter_of(qemu_plugin_tb_vaddr(tb));
	b->instructions = n;
	qemu_plugin_register_vcpu_tb_exec_cb(tb, block_runs,
					     QEMU_PLUGIN_CB_NO_REGS, b);
	for (size_t i = 0; i < n; i++) {
		struct qemu_plugin_insn *insn = qemu_plugin_tb_get_insn(tb, i);
		uint64_t addr = qemu_plugin_insn_vaddr(insn);
		for (uint64_t m = 0; m < marks; m++)
			if (mark_addr[m] == addr)
				qemu_plugin_register_vcpu_insn_exec_cb(
					insn, mark_reached,
					QEMU_PLUGIN_CB_NO_REGS,
					(void *)(uintptr_t)m);
	}
}

static int fail(const char *what)
{
	fprintf(stderr, "bootcount: %s\n", what);
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
	symbols = words[1];
	marks = words[2];
	vcpus = words[3];
	copies = words[4];
	user_mark = words[5];
	per_vcpu = symbols + FIRST_SYMBOL;
	symbol_addr = words + 8;
	mark_addr = symbol_addr + symbols;
	mark_after = mark_addr + marks;
	mark_copy = mark_after + marks;
	mark_at = mark_copy + marks;
	counters = mark_at + marks;
	uint64_t *end = counters + (1 + copies) * vcpus * per_vcpu;
	if ((char *)end != (char *)words + st.st_size || user_mark >= marks)
		return fail("the file's size does not fit its header");
	for (uint64_t m = 0; m < marks; m++)
		if (mark_after[m] > marks || mark_copy[m] > copies)
			return fail("a mark names what is not there");
	qemu_plugin_register_vcpu_tb_trans_cb(id, translated);
	return 0;
}
