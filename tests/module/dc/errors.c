// SPDX-License-Identifier: GPL-2.0
/*
 * Cases of kite_dc.ko in which requests fail. Each restarts the queue pair and checks that it
 * transfers data again.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/ktime.h>
#include <linux/sched.h>

#include "dc.h"

/*
 * Requests behind the one that fails are flushed. The reset drops completions that were not polled.
 */
static int wrong_rkey(void)
{
	struct ib_sge sge = from_source(0, 8);
	struct kite_mlx5_wr wr[4];
	int i;

	for (i = 0; i < ARRAY_SIZE(wr); i++) {
		wr[i] = request(IB_WR_RDMA_WRITE, &sge, 1);
		wr[i].wr_id = i;
	}
	wr[0].rkey ^= 0x4200;
	return post(wr, ARRAY_SIZE(wr)) ?: expect_wc(IB_WC_REM_ACCESS_ERR, 0) ?:
	       expect_wc(IB_WC_WR_FLUSH_ERR, 1) ?: restart() ?: write_and_read();
}

static int wrong_lkey(void)
{
	struct ib_sge sge = from_source(0, 8);
	struct kite_mlx5_wr wr = request(IB_WR_RDMA_WRITE, &sge, 1);

	sge.lkey ^= 0x4200;
	return post(&wr, 1) ?: expect_wc(IB_WC_LOC_PROT_ERR, wr.wr_id) ?: restart() ?:
	       write_and_read();
}

static int receiver_not_ready(void)
{
	struct ib_sge sge = from_source(0, 8);
	struct kite_mlx5_wr wr = request(IB_WR_SEND, &sge, 1);
	struct kite_mlx5_wc wc;
	int i, err = 0;

	for (i = 0; i < NUM_RECVS && !err; i++)
		err = run(&wr) ?: wait_wc(far.recv_cq, &wc);
	err = err ?: post(&wr, 1) ?: expect_wc(IB_WC_RNR_RETRY_EXC_ERR, wr.wr_id) ?: restart();
	return err ?: post_receives() ?: expect_true(post_receive(0) == -ENOBUFS) ?: messages();
}

/* A message longer than its receive buffer fails at both ends. */
static int too_long(void)
{
	struct ib_sge sge = from_source(0, RECV_BYTES + 1);
	struct kite_mlx5_wr wr = request(IB_WR_SEND, &sge, 1);
	struct kite_mlx5_wc wc;
	int err;

	fill(8);
	err = post(&wr, 1) ?: expect_wc(IB_WC_REM_INV_REQ_ERR, wr.wr_id) ?:
	      wait_wc(far.recv_cq, &wc);
	err = err ?: expect_true(wc.status == IB_WC_LOC_LEN_ERR && wc.wr_id < NUM_RECVS);
	return err ?: post_receive(wc.wr_id) ?: restart() ?: messages();
}

/* Waits until a byte has a value, without polling for completions. */
static int wait_byte(const u8 *at, u8 expected)
{
	ktime_t end = ktime_add_ns(ktime_get(), TIMEOUT_NS);

	while (READ_ONCE(*at) != expected) {
		if (ktime_after(ktime_get(), end))
			return -ETIMEDOUT;
		cond_resched();
	}
	return 0;
}

/* A reset drops the completions of its queue pair, and none of another on the same CQ. */
static int reset_among_others(void)
{
	struct kite_mlx5_qp *pair[] = { qp == near.rc ? near.dci : near.rc, qp };
	struct kite_mlx5_wr wr;
	struct ib_sge sge;
	int i, err = 0;

	fill(9);
	for (i = 0; i < 2 * BATCH && !err; i++) {
		qp = pair[i % 2];
		sge = (struct ib_sge) { near.addr + MEMORY_BYTES / 2 + i, 1, near.key };
		wr = request(IB_WR_RDMA_READ, &sge, 1);
		wr.remote_addr += i;
		wr.wr_id = i;
		far.memory[i] = 1;
		err = post(&wr, 1) ?: wait_byte(result() + i, 1);
	}
	err = err ?: restart();
	qp = pair[0];
	for (i = 0; i < 2 * BATCH && !err; i += 2)
		err = expect_wc(IB_WC_SUCCESS, i);
	qp = pair[1];
	return err ?: write_and_read();
}

static int failed_on_purpose(void)
{
	struct ib_sge sge = from_source(0, 8);
	struct kite_mlx5_wr wr = request(IB_WR_RDMA_WRITE, &sge, 1);

	return kite_mlx5_qp_to_err(qp) ?: post(&wr, 1) ?: expect_wc(IB_WC_WR_FLUSH_ERR, wr.wr_id) ?:
	       restart() ?: write_and_read();
}

/* The status of the completion depends on the hardware, so any error passes. */
static int wrong_access_key(void)
{
	struct ib_sge sge = from_source(0, 8);
	struct kite_mlx5_wr wr = request(IB_WR_RDMA_WRITE, &sge, 1);
	struct kite_mlx5_wc wc;
	u32 before, after;
	int err;

	wr.dc_key++;
	fill(6);
	err = kite_mlx5_dct_key_violations(far.dct[0], &before) ?: post(&wr, 1);
	err = err ?: wait_wc(near.send_cq, &wc) ?: expect_true(wc.status != IB_WC_SUCCESS);
	err = err ?: kite_mlx5_dct_key_violations(far.dct[0], &after) ?:
	      expect_true(after > before);
	return err ?: expect_true(far.memory[0] == (u8)~6) ?: restart() ?: write_and_read();
}

/* A DCI that alternates between targets waits for each to acknowledge; no request is lost. */
static int many_dcts(void)
{
	struct kite_mlx5_wr wr[BATCH];
	struct ib_sge sge[BATCH];
	int i, err;

	fill(7);
	for (i = 0; i < BATCH; i++) {
		sge[i] = from_source(i * 5000 % 9000, 1000);
		wr[i] = request(IB_WR_RDMA_WRITE, &sge[i], 1);
		wr[i].wr_id = i;
		wr[i].remote_addr += i * 1000;
		wr[i].dctn = kite_mlx5_dct_number(far.dct[i % NUM_DCTS]);
	}
	err = post(wr, BATCH);
	for (i = 0; i < BATCH && !err; i++)
		err = expect_wc(IB_WC_SUCCESS, i) ?:
		      expect_true(!memcmp(far.memory + i * 1000, source() + i * 5000 % 9000, 1000));
	return err;
}

/* Destroying a target drops its unpolled completions, and frees their entries of the pool. */
static int dct_with_receives(void)
{
	struct ib_sge sge = from_source(0, 8);
	struct kite_mlx5_wr wr = request(IB_WR_SEND, &sge, 1);
	struct kite_mlx5_dct *dct = create_dct(&far);
	int i, err = 0;

	if (IS_ERR(dct))
		return PTR_ERR(dct);
	wr.dctn = kite_mlx5_dct_number(dct);
	for (i = 0; i < NUM_RECVS && !err; i++)
		err = run(&wr);
	err = kite_mlx5_dct_destroy(dct, TIMEOUT_JIFFIES) ?: err;
	return err ?: post_receives() ?: expect_true(post_receive(0) == -ENOBUFS) ?: messages();
}

/* A write to a destroyed target fails. */
static int destroyed_dct(void)
{
	struct ib_sge sge = from_source(0, 8);
	struct kite_mlx5_wr wr = request(IB_WR_RDMA_WRITE, &sge, 1);
	struct kite_mlx5_dct *dct = create_dct(&far);
	struct kite_mlx5_wc wc;
	int err;

	if (IS_ERR(dct))
		return PTR_ERR(dct);
	wr.dctn = kite_mlx5_dct_number(dct);
	err = run(&wr);
	err = kite_mlx5_dct_destroy(dct, TIMEOUT_JIFFIES) ?: err;
	err = err ?: post(&wr, 1) ?: wait_wc(near.send_cq, &wc) ?:
	      expect_true(wc.status != IB_WC_SUCCESS);
	return err ?: restart() ?: write_and_read();
}

const struct test error_tests[] = {
	{ "wrong rkey", wrong_rkey },
	{ "wrong lkey", wrong_lkey },
	{ "receiver not ready", receiver_not_ready },
	{ "too long", too_long },
	{ "reset among others", reset_among_others },
	{ "failed on purpose", failed_on_purpose },
	{}
};

const struct test dc_tests[] = {
	{ "wrong access key", wrong_access_key },
	{ "many targets", many_dcts },
	{ "target with receives", dct_with_receives },
	{ "target that is gone", destroyed_dct },
	{}
};
