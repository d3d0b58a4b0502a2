/* SPDX-License-Identifier: GPL-2.0 */
/*
 * What mlx5 hardware offers and the kernel's verbs do not: the DC transport, atomic operations for
 * the kernel, and a key to all memory that allows them. The objects are made by firmware commands,
 * through what mlx5_core exports, in the protection domain of a verbs consumer and beside the
 * objects that mlx5_ib makes there.
 *
 * No policy is here, and nothing is counted: that a completion queue does not overflow, that
 * objects are destroyed before those that they name, and that none outlives the removal of the
 * RNIC, is for the caller. What posts, polls and arms is for any context; all else may sleep.
 *
 * What cannot be destroyed is still the hardware's: its memory is kept, it reports nothing more,
 * and the caller may try again. Events of a queue pair that fails as a responder are not passed on.
 */
#ifndef _KITE_MLX5_H
#define _KITE_MLX5_H

#include <rdma/ib_verbs.h>

struct kite_mlx5_dev;
struct kite_mlx5_cq;
struct kite_mlx5_rmp;
struct kite_mlx5_dct;
struct kite_mlx5_qp;

/* What an RNIC can do. */
struct kite_mlx5_caps {
	bool dc;
	/* Compare and swap, fetch and add, of 8 bytes in the order of this processor. */
	bool atomics;
	/* READs and atomics under way: of a DCI, and that a DCT can serve a peer. */
	u32 max_rd_atomic;
	u32 max_dest_rd_atomic;
	u32 max_qp_wqebbs;
	u32 max_cqe;
};

/*
 * kite_mlx5_open - begin to use the RNIC of a protection domain
 * @on_fatal: called in any context, once or more, when the RNIC has failed: nothing is done any
 *	more. That may be before this returns. NULL for never
 *
 * -EOPNOTSUPP if no mlx5 driver drives it, or it cannot do DC in its present bond.
 */
struct kite_mlx5_dev *kite_mlx5_open(struct ib_pd *pd, void (*on_fatal)(void *context), void *context);
void kite_mlx5_close(struct kite_mlx5_dev *dev);
void kite_mlx5_query(struct kite_mlx5_dev *dev, struct kite_mlx5_caps *caps);

/* A key to all memory that the RNIC can reach, by DMA addresses, with the rights IB_ACCESS_*. */
int kite_mlx5_global_mkey_create(struct kite_mlx5_dev *dev, int access, u32 *key);
/*
 * A key to these pages, the first of which has the byte of address @addr, and to @len bytes there.
 */
int kite_mlx5_mtt_mkey_create(struct kite_mlx5_dev *dev, u64 addr, u64 len, int access,
			    const dma_addr_t *pages, u32 count, u32 *key);
int kite_mlx5_mkey_destroy(struct kite_mlx5_dev *dev, u32 key);

/* The way to a port, as work requests want it: the hardware's address vector. */
struct kite_mlx5_av {
	u8 bytes[48];
} __aligned(8);

/* Resolves what the attributes leave open; asks the network if need be. */
int kite_mlx5_av_resolve(struct kite_mlx5_dev *dev, struct rdma_ah_attr *attr, struct kite_mlx5_av *av);

/* Completion queues. */

struct kite_mlx5_wc {
	u64 wr_id;
	enum ib_wc_status status;
	enum ib_wc_opcode opcode;
	/* The hardware's own words for an error. */
	u8 syndrome;
	u8 vendor_syndrome;
	/* With immediate data, or of a peer: these are for completions of receives alone. */
	bool with_imm;
	__be32 imm;
	u32 src_qp;
	u32 byte_len;
	/* The queue pair or DCT. */
	u32 number;
};

/*
 * Room is needed for requests that are not signalled too, since they complete if they fail.
 * @comp_handler: called in softirq when something has completed since kite_mlx5_cq_arm(); NULL
 *	for never
 */
struct kite_mlx5_cq *kite_mlx5_cq_create(struct kite_mlx5_dev *dev, u32 entries, u32 vector,
					 void (*comp_handler)(void *context), void *context);
int kite_mlx5_cq_destroy(struct kite_mlx5_cq *cq);
/*
 * The number of completions taken, -EIO if the queue has overflowed, -ENODEV if the RNIC has
 * failed. What a failed RNIC does not complete any more is flushed first.
 */
int kite_mlx5_poll_cq(struct kite_mlx5_cq *cq, struct kite_mlx5_wc *wc, int count);
/* After this whoever polls once more and finds nothing may rely on the comp_handler. */
void kite_mlx5_cq_arm(struct kite_mlx5_cq *cq);

/*
 * Receive memory pools: what many queue pairs and DCTs receive into, of one completion queue each.
 */

struct kite_mlx5_rmp *kite_mlx5_rmp_create(struct kite_mlx5_dev *dev, u32 max_wr, u32 max_sge);
int kite_mlx5_rmp_destroy(struct kite_mlx5_rmp *rmp);
/*
 * -ENOBUFS if it is full, -EINVAL for too many pieces or too long ones, -ENODEV if the RNIC has
 * failed.
 */
int kite_mlx5_rmp_post_recv(struct kite_mlx5_rmp *rmp, u64 wr_id, const struct ib_sge *sge, int count);

/* DC targets. */

struct kite_mlx5_dct_attr {
	struct kite_mlx5_cq *cq;
	struct kite_mlx5_rmp *rmp;
	u64 key;
	int access;
	enum ib_mtu mtu;
	u32 flow_label;
	u16 pkey_index;
	u8 port;
	u8 sgid_index;
	u8 hop_limit;
	u8 traffic_class;
	u8 sl;
	u8 min_rnr_timer;
};

struct kite_mlx5_dct *kite_mlx5_dct_create(struct kite_mlx5_dev *dev,
					   const struct kite_mlx5_dct_attr *attr);
u32 kite_mlx5_dct_number(const struct kite_mlx5_dct *dct);
/* How many requests came with another key. */
int kite_mlx5_dct_key_violations(struct kite_mlx5_dct *dct, u32 *count);
/*
 * Lets what is under way end, for so many jiffies, and nothing new begin. -ETIMEDOUT if it did not
 * end: try again.
 */
int kite_mlx5_dct_drain(struct kite_mlx5_dct *dct, unsigned long timeout_jiffies);

/*
 * As kite_mlx5_dct_drain(), and then it is gone. Receives that completed and were not polled are
 * dropped, and their entries of the pool free.
 */
int kite_mlx5_dct_destroy(struct kite_mlx5_dct *dct, unsigned long timeout_jiffies);

/* Queue pairs: initiators of DC, and RC. */

enum kite_mlx5_qp_type { KITE_MLX5_DCI, KITE_MLX5_RC };

/* A work request takes at most so many wqebbs. */
#define KITE_MLX5_MAX_WR_WQEBBS 4

/*
 * @wqebbs: room for work requests that are under way. It comes back when the completion of
 *	a later one, or of these, is polled: so some of them have to be signalled
 */
struct kite_mlx5_qp_init {
	enum kite_mlx5_qp_type type;
	u32 wqebbs;
	struct kite_mlx5_cq *send_cq;
	/* Of RC that receives, else NULL. */
	struct kite_mlx5_cq *recv_cq;
	struct kite_mlx5_rmp *rmp;
};

struct kite_mlx5_qp_attr {
	enum ib_mtu mtu;
	u16 pkey_index;
	u8 port;
	u8 timeout;
	u8 retry_cnt;
	u8 rnr_retry;
	u8 max_rd_atomic;
	/* Of DC; for RC they are in the address vector. */
	u8 sgid_index;
	u8 sl;
	/* Of RC. */
	u8 max_dest_rd_atomic;
	u8 min_rnr_timer;
	int access;
	u32 dest_qp_num;
	u32 sq_psn;
	u32 rq_psn;
	const struct kite_mlx5_av *av;
};

struct kite_mlx5_qp *kite_mlx5_qp_create(struct kite_mlx5_dev *dev,
					 const struct kite_mlx5_qp_init *init);
u32 kite_mlx5_qp_number(const struct kite_mlx5_qp *qp);
/* From reset to ready to send. If it fails the queue pair has to be reset before the next try. */
int kite_mlx5_qp_to_rts(struct kite_mlx5_qp *qp, const struct kite_mlx5_qp_attr *attr);
/* To error: what is under way is flushed. */
int kite_mlx5_qp_to_err(struct kite_mlx5_qp *qp);
/*
 * To reset: what is under way, and completions not polled, are dropped, and entries of the pool
 * free. Nobody may post meanwhile.
 */
int kite_mlx5_qp_to_reset(struct kite_mlx5_qp *qp);
int kite_mlx5_qp_destroy(struct kite_mlx5_qp *qp);

/* The verbs' words: IB_WR_RDMA_WRITE, IB_SEND_SIGNALED and so on. */
struct kite_mlx5_wr {
	u64 wr_id;
	enum ib_wr_opcode opcode;
	int send_flags;
	const struct ib_sge *sg_list;
	int num_sge;
	__be32 imm;
	u32 rkey;
	u64 remote_addr;
	/* What to add or to swap in, and what to compare with. */
	u64 swap_add;
	u64 compare;
	/* Of DC. */
	const struct kite_mlx5_av *av;
	u64 dc_key;
	u32 dctn;
};

/*
 * kite_mlx5_post_send - post work requests, with one doorbell for all of them
 * @posted: how many were, also when it fails
 *
 * -ENOBUFS if the queue is full, -EINVAL for a request that is not of this transport, malformed or
 * too long, -ENODEV if the RNIC has failed.
 */
int kite_mlx5_post_send(struct kite_mlx5_qp *qp, const struct kite_mlx5_wr *wr, int count, int *posted);

#endif /* _KITE_MLX5_H */
