// SPDX-License-Identifier: GPL-2.0
/* Memory, receives, work requests and completions of the cases of kite_dc.ko. */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/ktime.h>
#include <linux/sched.h>

#include "dc.h"

u8 *source(void)
{
	return near.memory;
}

u8 *result(void)
{
	return near.memory + MEMORY_BYTES / 2;
}

struct ib_sge from_source(u32 offset, u32 length)
{
	return (struct ib_sge) { near.addr + offset, length, near.key };
}

struct ib_sge into_result(u32 length)
{
	return (struct ib_sge) { near.addr + MEMORY_BYTES / 2, length, near.key };
}

void fill(u8 seed)
{
	size_t i;

	for (i = 0; i < MEMORY_BYTES / 2; i++)
		source()[i] = seed * (i % 251 + 1) + (i >> 8);
	memset(result(), ~seed, MEMORY_BYTES / 2);
	memset(far.memory, ~seed, MEMORY_BYTES);
}

/* Receive buffers are in the half of far's memory that no WRITE reaches. */
u8 *receive_buffer(u64 i)
{
	return far.memory + MEMORY_BYTES / 2 + i * RECV_BYTES;
}

/* Posts a receive of three SGEs, one of them empty. */
int post_receive(u64 i)
{
	dma_addr_t addr = far.addr + (receive_buffer(i) - far.memory);
	struct ib_sge sge[] = {
		{ addr, 100, far.key },
		{ addr, 0, far.key },
		{ addr + 100, RECV_BYTES - 100, far.key },
	};

	return kite_mlx5_rmp_post_recv(far.rmp, i, sge, ARRAY_SIZE(sge));
}

int post_receives(void)
{
	int i, err = 0;

	for (i = 0; i < NUM_RECVS && !err; i++)
		err = post_receive(i);
	return err;
}

struct kite_mlx5_wr request(enum ib_wr_opcode opcode, const struct ib_sge *sge, int count)
{
	return (struct kite_mlx5_wr) {
		.wr_id = opcode,
		.opcode = opcode,
		.send_flags = IB_SEND_SIGNALED,
		.sg_list = sge,
		.num_sge = count,
		.imm = cpu_to_be32(0xabc0000 + opcode),
		.rkey = far.key,
		.remote_addr = far.addr,
		.av = qp == near.rc ? NULL : &av_to_far,
		.dc_key = DC_KEY,
		.dctn = kite_mlx5_dct_number(far.dct[0]),
	};
}

int post(const struct kite_mlx5_wr *wr, int count)
{
	int posted;
	int err = kite_mlx5_post_send(qp, wr, count, &posted);

	return err ?: posted == count ? 0 : -EBADMSG;
}

int wait_wc(struct kite_mlx5_cq *cq, struct kite_mlx5_wc *wc)
{
	ktime_t end = ktime_add_ns(ktime_get(), TIMEOUT_NS);
	int found;

	do {
		found = kite_mlx5_poll_cq(cq, wc, 1);
		cond_resched();
	} while (!found && ktime_before(ktime_get(), end));
	if (found < 0)
		return found;
	return found ? 0 : -ETIMEDOUT;
}

int expect_wc(enum ib_wc_status status, u64 wr_id)
{
	struct kite_mlx5_wc wc = {};
	int err = wait_wc(near.send_cq, &wc);

	if (err)
		return err;
	if (wc.status == status && wc.wr_id == wr_id && wc.number == kite_mlx5_qp_number(qp))
		return 0;
	pr_err("request %llu ended with \"%s\" (%#x), instead of %llu with \"%s\"\n", wc.wr_id,
	       ib_wc_status_msg(wc.status), wc.syndrome, wr_id, ib_wc_status_msg(status));
	return -EIO;
}

static enum ib_wc_opcode wc_opcode(enum ib_wr_opcode opcode)
{
	switch (opcode) {
	case IB_WR_RDMA_READ:
		return IB_WC_RDMA_READ;
	case IB_WR_RDMA_WRITE:
	case IB_WR_RDMA_WRITE_WITH_IMM:
		return IB_WC_RDMA_WRITE;
	case IB_WR_ATOMIC_CMP_AND_SWP:
		return IB_WC_COMP_SWAP;
	case IB_WR_ATOMIC_FETCH_AND_ADD:
		return IB_WC_FETCH_ADD;
	default:
		return IB_WC_SEND;
	}
}

int run(const struct kite_mlx5_wr *wr)
{
	struct kite_mlx5_wc wc;
	int err = post(wr, 1) ?: wait_wc(near.send_cq, &wc);

	return err ?: expect_true(wc.status == IB_WC_SUCCESS && wc.wr_id == wr->wr_id &&
			    wc.number == kite_mlx5_qp_number(qp) &&
			    wc.opcode == wc_opcode(wr->opcode));
}
