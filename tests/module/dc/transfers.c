// SPDX-License-Identifier: GPL-2.0
/* Cases of kite_dc.ko that any queue pair runs: data, messages, batches, malformed requests. */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/slab.h>

#include "dc.h"

#define DC_WRITE_WQEBBS 2
#define RC_WRITE_WQEBBS 1
/* Requests after which the 16-bit counter of WQEBBs has wrapped. */
#define WRAP_REQUESTS 70000

/* Returns the number of the queue pair or target that requests are sent to. */
static u32 receiver(void)
{
	return qp == near.rc ? kite_mlx5_qp_number(far.rc) : kite_mlx5_dct_number(far.dct[0]);
}

int write_and_read(void)
{
	struct ib_sge out = from_source(0, MEMORY_BYTES / 2);
	struct ib_sge in = into_result(MEMORY_BYTES / 2);
	struct kite_mlx5_wr wr = request(IB_WR_RDMA_WRITE, &out, 1);
	int err;

	fill(1);
	err = run(&wr) ?: expect_true(!memcmp(far.memory, source(), MEMORY_BYTES / 2));
	if (err)
		return err;
	wr = request(IB_WR_RDMA_READ, &in, 1);
	return run(&wr) ?: expect_true(!memcmp(result(), source(), MEMORY_BYTES / 2));
}

static int gather(void)
{
	struct ib_sge sge[] = {
		from_source(100, 7),
		from_source(2000, 5000),
		from_source(9000, 33),
	};
	struct kite_mlx5_wr wr = request(IB_WR_RDMA_WRITE, sge, ARRAY_SIZE(sge));

	fill(2);
	return run(&wr) ?: expect_true(!memcmp(far.memory, source() + 100, 7) &&
				 !memcmp(far.memory + 7, source() + 2000, 5000) &&
				 !memcmp(far.memory + 5007, source() + 9000, 33) &&
				 far.memory[5040] == (u8)~2);
}

static int inline_data(void)
{
	struct ib_sge sge[] = {
		{ .addr = (uintptr_t)source(), .length = 21 },
		{ .addr = (uintptr_t)source() + 300, .length = 50 },
	};
	struct kite_mlx5_wr wr = request(IB_WR_RDMA_WRITE, sge, ARRAY_SIZE(sge));

	fill(3);
	wr.send_flags |= IB_SEND_INLINE;
	return run(&wr) ?: expect_true(!memcmp(far.memory, source(), 21) &&
				 !memcmp(far.memory + 21, source() + 300, 50) &&
				 far.memory[71] == (u8)~3);
}

static int fetch_and_add(u64 *cell, u64 before, u64 value)
{
	struct ib_sge sge = into_result(sizeof(u64));
	struct kite_mlx5_wr wr = request(IB_WR_ATOMIC_FETCH_AND_ADD, &sge, 1);

	wr.swap_add = value;
	return run(&wr) ?: expect_true(*(u64 *)result() == before && *cell == before + value);
}

static int compare_and_swap(u64 *cell, u64 before, u64 compare, u64 value)
{
	struct ib_sge sge = into_result(sizeof(u64));
	struct kite_mlx5_wr wr = request(IB_WR_ATOMIC_CMP_AND_SWP, &sge, 1);
	u64 after = before == compare ? value : before;

	wr.compare = compare;
	wr.swap_add = value;
	return run(&wr) ?: expect_true(*(u64 *)result() == before && *cell == after);
}

static int atomics(void)
{
	u64 *cell = (u64 *)far.memory;

	*cell = 1000;
	return fetch_and_add(cell, 1000, 0x100000005) ?:
	       compare_and_swap(cell, 0x1000003ed, 0x1000003ed, 77) ?:
	       compare_and_swap(cell, 77, 5, 88);
}

static bool matches_request(const struct kite_mlx5_wc *wc, const struct kite_mlx5_wr *wr, u32 len)
{
	bool write = wr->opcode == IB_WR_RDMA_WRITE_WITH_IMM;
	bool with_imm = wr->opcode != IB_WR_SEND;
	/* Completions of RC do not name the source: the connection does. */
	bool src_matches = qp == near.rc || wc->src_qp == kite_mlx5_qp_number(qp);

	return wc->status == IB_WC_SUCCESS && wc->number == receiver() && src_matches &&
	       wc->opcode == (write ? IB_WC_RECV_RDMA_WITH_IMM : IB_WC_RECV) &&
	       wc->with_imm == with_imm && (!with_imm || wc->imm == wr->imm) &&
	       wc->wr_id < NUM_RECVS && wc->byte_len == len &&
	       !memcmp(write ? far.memory : receive_buffer(wc->wr_id), source(), len);
}

static int check_receive(const struct kite_mlx5_wr *wr, u32 len)
{
	struct kite_mlx5_wc wc;
	int err = wait_wc(far.recv_cq, &wc) ?: expect_true(matches_request(&wc, wr, len));

	return err ?: post_receive(wc.wr_id);
}

/* Sends enough messages to use each entry of the pool several times, and to wrap the send queue. */
int messages(void)
{
	static const enum ib_wr_opcode opcodes[] = {
		IB_WR_SEND, IB_WR_SEND_WITH_IMM, IB_WR_RDMA_WRITE_WITH_IMM,
	};
	int i, err = 0;

	for (i = 0; i < 10 * NUM_RECVS && !err; i++) {
		u32 len = i % 4 ? i * 37 % RECV_BYTES : 0;
		struct ib_sge sge = from_source(0, len);
		struct kite_mlx5_wr wr = request(opcodes[i % 3], &sge, 1);

		fill(i);
		err = run(&wr) ?: check_receive(&wr, len);
	}
	return err;
}

/* Of the requests behind one doorbell, the last alone has a completion. */
static int batch(void)
{
	struct kite_mlx5_wr wr[BATCH];
	struct ib_sge sge[BATCH];
	int i;

	fill(5);
	for (i = 0; i < BATCH; i++) {
		sge[i] = from_source(i * 100, 100);
		wr[i] = request(IB_WR_RDMA_WRITE, &sge[i], 1);
		wr[i].wr_id = i;
		wr[i].remote_addr += i * 100;
		wr[i].send_flags = i < BATCH - 1 ? 0 : IB_SEND_SIGNALED;
	}
	return post(wr, BATCH) ?: expect_wc(IB_WC_SUCCESS, BATCH - 1) ?:
	       expect_true(!memcmp(far.memory, source(), BATCH * 100));
}

/* Receives are posted again in another order than that of their completions. */
static int messages_out_of_order(void)
{
	struct ib_sge sge = from_source(0, 200);
	struct kite_mlx5_wr wr = request(IB_WR_SEND, &sge, 1);
	struct kite_mlx5_wc wc[NUM_RECVS];
	int round, i, err = 0;

	fill(4);
	for (round = 0; round < 3 && !err; round++) {
		for (i = 0; i < NUM_RECVS && !err; i++)
			err = run(&wr) ?: wait_wc(far.recv_cq, &wc[i]) ?:
			      expect_true(matches_request(&wc[i], &wr, 200));
		for (i = 0; i < NUM_RECVS && !err; i++)
			err = post_receive(wc[(i * 4 + round) % NUM_RECVS].wr_id);
	}
	return err ?: messages();
}

/* Posts more requests than fit: those that fit are executed, the next one fails with ENOBUFS. */
static int full_queue(void)
{
	int fit = MAX_WQEBBS / (qp == near.rc ? RC_WRITE_WQEBBS : DC_WRITE_WQEBBS);
	struct ib_sge sge = from_source(0, 8);
	struct kite_mlx5_wr *wr = kcalloc(MAX_WQEBBS + 1, sizeof(*wr), GFP_KERNEL);
	int i, posted, err;

	if (!wr)
		return -ENOMEM;
	for (i = 0; i <= MAX_WQEBBS; i++) {
		wr[i] = request(IB_WR_RDMA_WRITE, &sge, 1);
		wr[i].wr_id = i;
	}
	err = kite_mlx5_post_send(qp, wr, MAX_WQEBBS + 1, &posted);
	err = expect_true(err == -ENOBUFS && posted == fit);
	for (i = 0; i < fit && !err; i++)
		err = expect_wc(IB_WC_SUCCESS, i);
	kfree(wr);
	return err ?: write_and_read();
}

/* Posts enough requests to wrap all counters. */
static int many(void)
{
	int i, err = 0;

	for (i = 0; i < WRAP_REQUESTS / BATCH && !err; i++)
		err = batch();
	return err;
}

/* An armed CQ raises one event, and none before it is armed again. */
static int interrupt(void)
{
	struct ib_sge sge = from_source(0, 64);
	struct kite_mlx5_wr wr = request(IB_WR_RDMA_WRITE, &sge, 1);
	int err;

	reinit_completion(&near.interrupt);
	kite_mlx5_cq_arm(near.send_cq);
	err = post(&wr, 1);
	if (err)
		return err;
	if (!wait_for_completion_timeout(&near.interrupt, TIMEOUT_JIFFIES))
		return -ETIMEDOUT;
	err = expect_wc(IB_WC_SUCCESS, wr.wr_id) ?: run(&wr) ?: run(&wr);
	return err ?: expect_true(!completion_done(&near.interrupt));
}

/* A malformed request fails alone: the one before it is posted, and counted as posted. */
static int expect_second_refused(const struct kite_mlx5_wr *bad)
{
	struct ib_sge sge = from_source(0, 8);
	struct kite_mlx5_wr wr[] = { request(IB_WR_RDMA_WRITE, &sge, 1), *bad };
	int posted;
	int err = kite_mlx5_post_send(qp, wr, ARRAY_SIZE(wr), &posted);

	return expect_true(err == -EINVAL && posted == 1) ?: expect_wc(IB_WC_SUCCESS, wr[0].wr_id);
}

static int malformed(void)
{
	struct ib_sge sge[16];
	struct kite_mlx5_wr bad[6];
	int i, err = 0;

	for (i = 0; i < ARRAY_SIZE(sge); i++)
		sge[i] = from_source(i, 1);
	bad[0] = request(IB_WR_RDMA_WRITE, sge, ARRAY_SIZE(sge));
	bad[1] = request(IB_WR_LOCAL_INV, sge, 0);
	bad[2] = request(IB_WR_RDMA_WRITE, sge, 1);
	bad[2].av = bad[2].av ? NULL : &av_to_far;
	bad[3] = request(IB_WR_ATOMIC_FETCH_AND_ADD, sge, 1);
	bad[4] = request(IB_WR_RDMA_READ, sge, 1);
	bad[4].send_flags |= IB_SEND_INLINE;
	bad[5] = request(IB_WR_RDMA_WRITE, &sge[1], 1);
	sge[1].length = 1u << 31;
	for (i = 0; i < ARRAY_SIZE(bad) && !err; i++)
		err = expect_second_refused(&bad[i]);
	return err ?: expect_true(kite_mlx5_rmp_post_recv(far.rmp, 0, &sge[1], 1) == -EINVAL &&
			    kite_mlx5_rmp_post_recv(far.rmp, 0, sge, 16) == -EINVAL);
}

const struct test transfer_tests[] = {
	{ "write and read", write_and_read },
	{ "gather", gather },
	{ "inline data", inline_data },
	{ "atomics", atomics },
	{ "messages", messages },
	{ "messages out of order", messages_out_of_order },
	{ "batch", batch },
	{ "full queue", full_queue },
	{ "many", many },
	{ "interrupt", interrupt },
	{ "malformed", malformed },
	{}
};
