/*
 * What the plugins of QEMU's TCG here have in common: the part of qemu-plugin.h
 * (API version 1, QEMU 4.2 and later) that they use, because Debian's QEMU brings
 * no header, and how a nested guest is told from its host.
 */
#ifndef BANTAM_PLUGIN_QEMU_H
#define BANTAM_PLUGIN_QEMU_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
/* Of guest kernels: their code is above. */
#define KERNEL_START 0xffffffff80000000ULL

typedef uint64_t qemu_plugin_id_t;
struct qemu_plugin_tb;
struct qemu_plugin_insn;
enum qemu_plugin_cb_flags { QEMU_PLUGIN_CB_NO_REGS };
typedef void (*exec_cb)(unsigned int vcpu, void *data);
typedef void (*trans_cb)(qemu_plugin_id_t id, struct qemu_plugin_tb *tb);
void qemu_plugin_register_vcpu_tb_trans_cb(qemu_plugin_id_t, trans_cb);
void qemu_plugin_register_vcpu_tb_exec_cb(struct qemu_plugin_tb *, exec_cb,
					  enum qemu_plugin_cb_flags, void *);
void qemu_plugin_register_vcpu_insn_exec_cb(struct qemu_plugin_insn *, exec_cb,
					    enum qemu_plugin_cb_flags, void *);
size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb *);
uint64_t qemu_plugin_tb_vaddr(const struct qemu_plugin_tb *);
struct qemu_plugin_insn *qemu_plugin_tb_get_insn(const struct qemu_plugin_tb *,
						 size_t);
uint64_t qemu_plugin_insn_vaddr(const struct qemu_plugin_insn *);
size_t qemu_plugin_insn_size(const struct qemu_plugin_insn *);
const void *qemu_plugin_insn_data(const struct qemu_plugin_insn *);

/* AMD's VMRUN: the guest goes on. Its exit goes on at the next instruction. */
static inline bool is_vmrun(const struct qemu_plugin_insn *insn)
{
	static const uint8_t vmrun[] = { 0x0f, 0x01, 0xd8 };
	return qemu_plugin_insn_size(insn) == sizeof vmrun &&
	       !memcmp(qemu_plugin_insn_data(insn), vmrun, sizeof vmrun);
}

#endif
