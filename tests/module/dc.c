// SPDX-License-Identifier: GPL-2.0
/*
 * Uses the bridge to mlx5_core as the fabric does: DC and RC queue pairs that the kernel makes by
 * firmware commands, beside those that mlx5_ib has. Near sends to far, which may be the same RNIC.
 *
 *	insmod kite_dc.ko near=mlx5_0 far=mlx5_1
 *
 * Loading does it all and logs a line for each case. It fails with the error of the first case that
 * is not as it should be; av_to_far is nothing to do after that, so unload it at will.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/completion.h>
#include <linux/dma-mapping.h>
#include <linux/ktime.h>
#include <linux/module.h>
#include <linux/slab.h>

#include "mlx5.h"

static char *near_name = "";
module_param_named(near, near_name, charp, 0444);
MODULE_PARM_DESC(near, "name of the RNIC that sends, as in /sys/class/infiniband");
static char *far_name = "";
module_param_named(far, far_name, charp, 0444);
MODULE_PARM_DESC(far, "name of the RNIC that it sends to");

#define PORT 1
#define DC_KEY 0x1122334455667788ull
#define ACCESS (IB_ACCESS_LOCAL_WRITE | IB_ACCESS_REMOTE_READ | IB_ACCESS_REMOTE_WRITE | \
		IB_ACCESS_REMOTE_ATOMIC)
#define MEMORY_BYTES (8 * PAGE_SIZE)
#define NUM_RECVS 15
#define RECV_BYTES 1000
/* More than a page of them. */
#define MAX_WQEBBS 256
#define DC_WRITE_WQEBBS 2
#define RC_WRITE_WQEBBS 1
#define BATCH 8
/* Requests after which a 16-bit WQE counter has wrapped. */
#define WRAP_REQUESTS 70000
#define TIMEOUT_NS (30 * NSEC_PER_SEC)
#define TIMEOUT_JIFFIES (30 * HZ)
#define NUM_DCTS 3

/* One RNIC, with a target, and a queue pair of each kind. */
struct endpoint {
	struct ib_device *ibdev;
	struct ib_pd *pd;
	struct kite_mlx5_dev *dev;
	u32 key;
	/* That all can reach. */
	u8 *memory;
	dma_addr_t addr;
	struct completion interrupt;
	struct kite_mlx5_cq *send_cq;
	struct kite_mlx5_cq *recv_cq;
	struct kite_mlx5_rmp *rmp;
	struct kite_mlx5_dct *dct[NUM_DCTS];
	struct kite_mlx5_qp *dci;
	struct kite_mlx5_qp *rc;
};

static struct endpoint near, far;

/* From near to far, and av_to_near. */
static struct kite_mlx5_av av_to_far, av_to_near;

/* The queue pair that the cases are run with. */
static struct kite_mlx5_qp *qp;

/* Memory. Near's first half is sent from, its other half received into. */

static u8 *source(void)
{
	return near.memory;
}

static u8 *result(void)
{
	return near.memory + MEMORY_BYTES / 2;
}

static struct ib_sge from_source(u32 offset, u32 length)
{
	return (struct ib_sge) { near.addr + offset, length, near.key };
}

static struct ib_sge into_result(u32 length)
{
	return (struct ib_sge) { near.addr + MEMORY_BYTES / 2, length, near.key };
}

static void fill(u8 seed)
{
	size_t i;

	for (i = 0; i < MEMORY_BYTES / 2; i++)
		source()[i] = seed * (i % 251 + 1) + (i >> 8);
	memset(result(), ~seed, MEMORY_BYTES / 2);
	memset(far.memory, ~seed, MEMORY_BYTES);
}

/* Receives are beyond what is written to. */
static u8 *receive_buffer(u64 i)
{
	return far.memory + MEMORY_BYTES / 2 + i * RECV_BYTES;
}

/* In two pieces and an empty one. */
static int post_receive(u64 i)
{
	dma_addr_t addr = far.addr + (receive_buffer(i) - far.memory);
	struct ib_sge sge[] = {
		{ addr, 100, far.key },
		{ addr, 0, far.key },
		{ addr + 100, RECV_BYTES - 100, far.key },
	};

	return kite_mlx5_rmp_post_recv(far.rmp, i, sge, ARRAY_SIZE(sge));
}

static int post_receives(void)
{
	int i, err = 0;

	for (i = 0; i < NUM_RECVS && !err; i++)
		err = post_receive(i);
	return err;
}

/* Requests. */

static struct kite_mlx5_wr request(enum ib_wr_opcode opcode, const struct ib_sge *sge, int count)
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

static int post(const struct kite_mlx5_wr *wr, int count)
{
	int posted;
	int err = kite_mlx5_post_send(qp, wr, count, &posted);

	return err ?: posted == count ? 0 : -EBADMSG;
}

static int wait_wc(struct kite_mlx5_cq *cq, struct kite_mlx5_wc *wc)
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

static int expect_wc(enum ib_wc_status status, u64 wr_id)
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

static int expect_true(bool condition)
{
	return condition ? 0 : -EBADMSG;
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

static int run(const struct kite_mlx5_wr *wr)
{
	struct kite_mlx5_wc wc;
	int err = post(wr, 1) ?: wait_wc(near.send_cq, &wc);

	return err ?: expect_true(wc.status == IB_WC_SUCCESS && wc.wr_id == wr->wr_id &&
			    wc.number == kite_mlx5_qp_number(qp) &&
			    wc.opcode == wc_opcode(wr->opcode));
}

/* The queue pair or target that a request is for. */
static u32 receiver(void)
{
	return qp == near.rc ? kite_mlx5_qp_number(far.rc) : kite_mlx5_dct_number(far.dct[0]);
}

/* Cases that any queue pair can run. */

static int write_and_read(void)
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
	/* RC does not report the source QP. */
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

/*
 * Sends enough messages to use every entry of the pool several times, and to wrap the ring of
 * requests.
 */
static int messages(void)
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

/* Only the last request of a batch with one doorbell is signaled. */
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

/* Receives are posted again in another order than they were taken in. */
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

/* Those that fit are done, and no other. */
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

/* All counters wrap. */
static int many(void)
{
	int i, err = 0;

	for (i = 0; i < WRAP_REQUESTS / BATCH && !err; i++)
		err = batch();
	return err;
}

/* One event, and that only if it was asked for. */
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

/* The post reports the first request that it did not post. */
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

/* Connections. */

static struct kite_mlx5_qp_attr common_attr(void)
{
	return (struct kite_mlx5_qp_attr) {
		.mtu = IB_MTU_4096,
		.port = PORT,
		.timeout = 14,
		.retry_cnt = 7,
		.rnr_retry = 1,
		.max_rd_atomic = 4,
	};
}

static int start_dci(void)
{
	struct kite_mlx5_qp_attr attr = common_attr();

	return kite_mlx5_qp_to_rts(near.dci, &attr);
}

static int start_rc(struct endpoint *end, struct endpoint *peer, const struct kite_mlx5_av *av)
{
	struct kite_mlx5_qp_attr attr = common_attr();

	attr.max_dest_rd_atomic = 4;
	attr.min_rnr_timer = 1;
	attr.access = ACCESS;
	attr.dest_qp_num = kite_mlx5_qp_number(peer->rc);
	attr.sq_psn = end == &near ? 100 : 0xfffff0;
	attr.rq_psn = end == &near ? 0xfffff0 : 100;
	attr.av = av;
	return kite_mlx5_qp_to_rts(end->rc, &attr);
}

/* Also after an error. */
static int restart(void)
{
	int err = kite_mlx5_qp_to_reset(qp);

	if (err)
		return err;
	if (qp == near.dci)
		return start_dci();
	return kite_mlx5_qp_to_reset(far.rc) ?: start_rc(&near, &far, &av_to_far) ?:
	       start_rc(&far, &near, &av_to_near);
}

/* Cases of errors, after each of which the queue pair goes on. */

/* Requests behind the failed one are flushed. The reset drops completions that were not polled. */
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

/* It has no room in what it is received into, which ends av_to_far. */
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

/* Without taking any completion. */
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

/* Completions of this queue pair go with its reset, those of another one between them stay. */
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

/* Cases of DC alone. */

/* Which error it is, is for the hardware to say. */
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

/* The next destination has to wait until the last has answered, and none is left out. */
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

static struct kite_mlx5_dct *create_dct(struct endpoint *end)
{
	struct kite_mlx5_dct_attr attr = {
		.cq = end->recv_cq,
		.rmp = end->rmp,
		.key = DC_KEY,
		.access = ACCESS,
		.mtu = IB_MTU_4096,
		.port = PORT,
		.hop_limit = 64,
		.min_rnr_timer = 1,
	};

	return kite_mlx5_dct_create(end->dev, &attr);
}

/* Destroying a DCT drops its unpolled receives and frees their entries of the pool. */
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

/* A write to a destroyed DCT fails. */
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

struct test {
	const char *name;
	int (*run)(void);
};

static const struct test any_tests[] = {
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
	{ "wrong rkey", wrong_rkey },
	{ "wrong lkey", wrong_lkey },
	{ "receiver not ready", receiver_not_ready },
	{ "too long", too_long },
	{ "reset among others", reset_among_others },
	{ "failed on purpose", failed_on_purpose },
	{}
};

static const struct test dc_tests[] = {
	{ "wrong access key", wrong_access_key },
	{ "many targets", many_dcts },
	{ "target with receives", dct_with_receives },
	{ "target that is gone", destroyed_dct },
	{}
};

static int run_tests(const char *transport, const struct test *test)
{
	int err = 0;

	for (; test->name && !err; test++) {
		err = test->run();
		if (err)
			pr_err("%s, %s: error %d\n", transport, test->name, err);
		else
			pr_info("%s, %s: ok\n", transport, test->name);
	}
	return err;
}

static int run_all(void)
{
	int err = start_dci() ?: start_rc(&near, &far, &av_to_far) ?:
		  start_rc(&far, &near, &av_to_near);

	qp = near.dci;
	err = err ?: run_tests("DC", any_tests) ?: run_tests("DC", dc_tests);
	qp = near.rc;
	return err ?: run_tests("RC", any_tests);
}

/* Set-up. */

static void on_comp_event(void *context)
{
	struct endpoint *end = context;

	complete(&end->interrupt);
}

static int open_device(struct endpoint *end)
{
	struct kite_mlx5_caps caps;

	end->pd = ib_alloc_pd(end->ibdev, 0);
	if (IS_ERR(end->pd))
		return PTR_ERR(end->pd);
	end->dev = kite_mlx5_open(end->pd, NULL, NULL);
	if (IS_ERR(end->dev))
		return PTR_ERR(end->dev);
	kite_mlx5_query(end->dev, &caps);
	if (!caps.dc || !caps.atomics)
		return -EOPNOTSUPP;
	return kite_mlx5_global_mkey_create(end->dev, ACCESS, &end->key);
}

static int create_queues(struct endpoint *end)
{
	init_completion(&end->interrupt);
	end->send_cq = kite_mlx5_cq_create(end->dev, 4 * MAX_WQEBBS, 0, on_comp_event, end);
	if (IS_ERR(end->send_cq))
		return PTR_ERR(end->send_cq);
	end->recv_cq = kite_mlx5_cq_create(end->dev, 2 * NUM_RECVS, 0, NULL, NULL);
	if (IS_ERR(end->recv_cq))
		return PTR_ERR(end->recv_cq);
	end->rmp = kite_mlx5_rmp_create(end->dev, NUM_RECVS, 3);
	return PTR_ERR_OR_ZERO(end->rmp);
}

static int create_qps(struct endpoint *end)
{
	struct kite_mlx5_qp_init init = {
		.type = KITE_MLX5_DCI,
		.wqebbs = MAX_WQEBBS,
		.send_cq = end->send_cq,
	};
	int i;

	for (i = 0; i < NUM_DCTS; i++) {
		end->dct[i] = create_dct(end);
		if (IS_ERR(end->dct[i]))
			return PTR_ERR(end->dct[i]);
	}
	end->dci = kite_mlx5_qp_create(end->dev, &init);
	if (IS_ERR(end->dci))
		return PTR_ERR(end->dci);
	init.type = KITE_MLX5_RC;
	init.recv_cq = end->recv_cq;
	init.rmp = end->rmp;
	end->rc = kite_mlx5_qp_create(end->dev, &init);
	return PTR_ERR_OR_ZERO(end->rc);
}

static int resolve(struct endpoint *end, struct endpoint *peer, struct kite_mlx5_av *av)
{
	struct ib_port_attr port = {};
	struct rdma_ah_attr attr = { .type = rdma_ah_find_type(end->ibdev, PORT) };
	int err = ib_query_port(peer->ibdev, PORT, &port);

	rdma_ah_set_port_num(&attr, PORT);
	rdma_ah_set_dlid(&attr, port.lid);
	return err ?: kite_mlx5_av_resolve(end->dev, &attr, av);
}

static int create_objects(struct endpoint *end)
{
	end->memory = dma_alloc_coherent(end->ibdev->dma_device, MEMORY_BYTES, &end->addr,
					 GFP_KERNEL);
	if (!end->memory)
		return -ENOMEM;
	return open_device(end) ?: create_queues(end) ?: create_qps(end);
}

/* What cannot be destroyed is a finding. */
static void report_destroy(const char *what, int err)
{
	if (err)
		pr_err("the %s cannot be destroyed: error %d\n", what, err);
}

static void destroy_qps(struct endpoint *end)
{
	int i;

	if (!IS_ERR_OR_NULL(end->rc))
		report_destroy("RC queue pair", kite_mlx5_qp_destroy(end->rc));
	if (!IS_ERR_OR_NULL(end->dci))
		report_destroy("DCI", kite_mlx5_qp_destroy(end->dci));
	for (i = 0; i < NUM_DCTS; i++)
		if (!IS_ERR_OR_NULL(end->dct[i]))
			report_destroy("DCT", kite_mlx5_dct_destroy(end->dct[i], TIMEOUT_JIFFIES));
}

static void destroy_queues(struct endpoint *end)
{
	if (!IS_ERR_OR_NULL(end->rmp))
		report_destroy("pool", kite_mlx5_rmp_destroy(end->rmp));
	if (!IS_ERR_OR_NULL(end->recv_cq))
		report_destroy("completion queue", kite_mlx5_cq_destroy(end->recv_cq));
	if (!IS_ERR_OR_NULL(end->send_cq))
		report_destroy("completion queue", kite_mlx5_cq_destroy(end->send_cq));
}

static void destroy_objects(struct endpoint *end)
{
	destroy_qps(end);
	destroy_queues(end);
	if (end->key)
		report_destroy("key", kite_mlx5_mkey_destroy(end->dev, end->key));
	if (!IS_ERR_OR_NULL(end->dev))
		kite_mlx5_close(end->dev);
	if (!IS_ERR_OR_NULL(end->pd))
		ib_dealloc_pd(end->pd);
	if (end->memory)
		dma_free_coherent(end->ibdev->dma_device, MEMORY_BYTES, end->memory, end->addr);
}

/* One that is near and far is two users of the same RNIC. */
static int run_on_devices(void)
{
	int err = create_objects(&near) ?: create_objects(&far);

	err = err ?: resolve(&near, &far, &av_to_far) ?: resolve(&far, &near, &av_to_near);
	err = err ?: post_receives() ?: run_all();
	destroy_objects(&near);
	destroy_objects(&far);
	return err;
}

/* Devices are found as any client of ib_core finds them. */
static void match_device(struct ib_device *candidate, const char *name, struct endpoint *end)
{
	if (!end->ibdev && !strcmp(dev_name(&candidate->dev), name) && ib_device_try_get(candidate))
		end->ibdev = candidate;
}

static int add_device(struct ib_device *candidate)
{
	match_device(candidate, near_name, &near);
	match_device(candidate, far_name, &far);
	return -EOPNOTSUPP;
}

static struct ib_client client = {
	.name = KBUILD_MODNAME,
	.add = add_device,
};

static int __init kite_dc_init(void)
{
	int err = ib_register_client(&client);

	if (err)
		return err;
	ib_unregister_client(&client);
	err = near.ibdev && far.ibdev ? run_on_devices() : -ENODEV;
	if (near.ibdev)
		ib_device_put(near.ibdev);
	if (far.ibdev)
		ib_device_put(far.ibdev);
	return err;
}
module_init(kite_dc_init);

static void __exit kite_dc_exit(void)
{
}
module_exit(kite_dc_exit);

MODULE_DESCRIPTION("Sends by DC and RC queue pairs that the kernel made by firmware commands");
MODULE_AUTHOR("The kite developers");
MODULE_LICENSE("GPL");
