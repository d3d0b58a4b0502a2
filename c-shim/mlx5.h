/* SPDX-License-Identifier: GPL-2.0 */
/*
 * mlx5 features that kernel verbs lack: the DC transport, atomics in kernel QPs, and a memory key
 * with atomic rights to all memory.
 *
 * The objects are created by firmware commands, through symbols that mlx5_core exports. They are in
 * the protection domain of a verbs consumer, beside the objects of mlx5_ib.
 *
 * The shim has no policy and counts nothing. The caller keeps CQs from overflowing, destroys
 * objects before those that they refer to, and destroys all of them before the IB device is
 * removed. Functions that post, poll and arm may be called in any context. All others may sleep.
 *
 * If an object cannot be destroyed, the hardware still owns it: its memory is kept, it reports
 * nothing, and the caller may try again. Responder errors of a QP raise no event here.
 */
#ifndef _KITE_MLX5_H
#define _KITE_MLX5_H

#include <rdma/ib_verbs.h>

struct kite_mlx5_dev;
struct kite_mlx5_cq;
struct kite_mlx5_rmp;
struct kite_mlx5_dct;
struct kite_mlx5_qp;

/* Capabilities of a device. */
struct kite_mlx5_caps {
	bool dc;
	/* 8-byte compare-and-swap and fetch-and-add in host byte order. */
	bool atomics;
	/*
	 * READs and atomics in flight: as initiator of a DCI, as responder of a DCT for one peer.
	 */
	u32 max_rd_atomic;
	u32 max_dest_rd_atomic;
	u32 max_qp_wqebbs;
	u32 max_cqe;
};

/*
 * kite_mlx5_open - open the mlx5 device of a protection domain
 * @on_fatal: called in any context, once or more, after a device failure, possibly before the
 *	function returns; or NULL
 *
 * -EOPNOTSUPP: the device is not mlx5, or its LAG mode does not support DC.
 */
struct kite_mlx5_dev *kite_mlx5_open(struct ib_pd *pd, void (*on_fatal)(void *context),
				     void *context);
void kite_mlx5_close(struct kite_mlx5_dev *dev);
void kite_mlx5_query(struct kite_mlx5_dev *dev, struct kite_mlx5_caps *caps);

/* Creates a memory key for all DMA addresses, with rights IB_ACCESS_*. */
int kite_mlx5_global_mkey_create(struct kite_mlx5_dev *dev, int access, u32 *key);
/* Creates a memory key for @len bytes from the address @addr, which is in the first of @pages. */
int kite_mlx5_mtt_mkey_create(struct kite_mlx5_dev *dev, u64 addr, u64 len, int access,
			      const dma_addr_t *pages, u32 count, u32 *key);
int kite_mlx5_mkey_destroy(struct kite_mlx5_dev *dev, u32 key);

/* Address vector of a work request, in the format of the hardware. */
struct kite_mlx5_av {
	u8 bytes[48];
} __aligned(8);

/* Resolves the attributes to an address vector. May wait for neighbor discovery. */
int kite_mlx5_av_resolve(struct kite_mlx5_dev *dev, struct rdma_ah_attr *attr,
			 struct kite_mlx5_av *av);

/* Completion queues. */

struct kite_mlx5_wc {
	u64 wr_id;
	enum ib_wc_status status;
	enum ib_wc_opcode opcode;
	/* Error codes of the hardware. */
	u8 syndrome;
	u8 vendor_syndrome;
	/* Receive completions only. */
	bool with_imm;
	__be32 imm;
	u32 src_qp;
	u32 byte_len;
	/* Number of the QP or DCT. */
	u32 number;
};

/*
 * kite_mlx5_cq_create - create a CQ
 * @entries: also for unsignaled work requests, which complete if they fail
 * @comp_handler: called in softirq for the first completion after kite_mlx5_cq_arm(); or NULL
 */
struct kite_mlx5_cq *kite_mlx5_cq_create(struct kite_mlx5_dev *dev, u32 entries, u32 vector,
					 void (*comp_handler)(void *context), void *context);
int kite_mlx5_cq_destroy(struct kite_mlx5_cq *cq);
/*
 * Returns the number of completions in @wc. -EIO: the CQ has overflowed. -ENODEV: the device has
 * failed, and all work requests in flight were flushed by earlier calls.
 */
int kite_mlx5_poll_cq(struct kite_mlx5_cq *cq, struct kite_mlx5_wc *wc, int count);
/* Arms the CQ. If one more poll finds no completion, comp_handler is called for the next one. */
void kite_mlx5_cq_arm(struct kite_mlx5_cq *cq);

/* Receive memory pools (RMP), shared by QPs and DCTs. */

struct kite_mlx5_rmp *kite_mlx5_rmp_create(struct kite_mlx5_dev *dev, u32 max_wr, u32 max_sge);
int kite_mlx5_rmp_destroy(struct kite_mlx5_rmp *rmp);
/*
 * -ENOBUFS: the pool is full. -EINVAL: too many or too long SGEs. -ENODEV: the device has failed.
 */
int kite_mlx5_rmp_post_recv(struct kite_mlx5_rmp *rmp, u64 wr_id, const struct ib_sge *sge,
			    int count);

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
/* Reads the number of requests with a wrong DC access key. */
int kite_mlx5_dct_key_violations(struct kite_mlx5_dct *dct, u32 *count);
/*
 * Rejects new requests, and waits at most @timeout_jiffies for requests in progress. -ETIMEDOUT:
 * the caller may try again.
 */
int kite_mlx5_dct_drain(struct kite_mlx5_dct *dct, unsigned long timeout_jiffies);

/*
 * Drains and destroys the DCT. Receive completions that were not polled are dropped, and their WQEs
 * return to the pool.
 */
int kite_mlx5_dct_destroy(struct kite_mlx5_dct *dct, unsigned long timeout_jiffies);

/* QPs: DCI and RC. */

enum kite_mlx5_qp_type { KITE_MLX5_DCI, KITE_MLX5_RC };

/* Maximum WQEBBs of a work request. */
#define KITE_MLX5_MAX_WR_WQEBBS 4

/*
 * @wqebbs: size of the send queue. Blocks are freed when the completion of their work
 *	request, or of a later one, is polled: some of the requests must be signaled
 */
struct kite_mlx5_qp_init {
	enum kite_mlx5_qp_type type;
	u32 wqebbs;
	struct kite_mlx5_cq *send_cq;
	/* RC QPs that receive; else NULL. */
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
	/* DCI only; for RC they are in the address vector. */
	u8 sgid_index;
	u8 sl;
	/* RC only. */
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
/* RESET to RTS. After an error the QP must be reset before the next attempt. */
int kite_mlx5_qp_to_rts(struct kite_mlx5_qp *qp, const struct kite_mlx5_qp_attr *attr);
/* To ERR. Work requests in flight are flushed. */
int kite_mlx5_qp_to_err(struct kite_mlx5_qp *qp);
/*
 * To RESET. Work requests in flight and completions not polled are dropped. Receive WQEs return to
 * the pool. Must not run concurrently with posts.
 */
int kite_mlx5_qp_to_reset(struct kite_mlx5_qp *qp);
int kite_mlx5_qp_destroy(struct kite_mlx5_qp *qp);

/* Work request, with constants of verbs: IB_WR_RDMA_WRITE, IB_SEND_SIGNALED and so on. */
struct kite_mlx5_wr {
	u64 wr_id;
	enum ib_wr_opcode opcode;
	int send_flags;
	const struct ib_sge *sg_list;
	int num_sge;
	__be32 imm;
	u32 rkey;
	u64 remote_addr;
	/* Operands of atomics. */
	u64 swap_add;
	u64 compare;
	/* DC only. */
	const struct kite_mlx5_av *av;
	u64 dc_key;
	u32 dctn;
};

/*
 * kite_mlx5_post_send - post work requests with one doorbell
 * @posted: number of requests that were posted, also after an error
 *
 * -ENOBUFS: the send queue is full. -EINVAL: an opcode that the transport lacks, or a malformed or
 * too long request. -ENODEV: the device has failed.
 */
int kite_mlx5_post_send(struct kite_mlx5_qp *qp, const struct kite_mlx5_wr *wr, int count,
			int *posted);

#endif /* _KITE_MLX5_H */
