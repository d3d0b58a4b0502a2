/* SPDX-License-Identifier: GPL-2.0 */
/* Objects shared by the files of the shim. */
#ifndef _KITE_MLX5_OBJECTS_H
#define _KITE_MLX5_OBJECTS_H

#include <linux/mlx5/cq.h>
#include <linux/mlx5/driver.h>
#include <linux/mlx5/qp.h>
#include <linux/xarray.h>

#include "mlx5.h"

#define QPN_MASK 0xffffffu
/* With this index a CQE has the number of its QP or DCT instead of a user index. */
#define NO_USER_INDEX 0xffffffu
/* Registration of an object that the hardware has already must not fail. */
#define GFP_KERNEL_NOFAIL (GFP_KERNEL | __GFP_NOFAIL)

struct kite_mlx5_dev {
	struct ib_pd *pd;
	struct mlx5_core_dev *mdev;
	u32 pdn;
	struct mlx5_sq_bfreg bfreg;
	/* The memory key of the data segment that terminates a list. */
	__be32 terminate_mkey;
	struct notifier_block events;
	void (*on_fatal)(void *context);
	void *context;
	/* Objects that wait for events, by number, under the xarray locks. */
	struct xarray dcts;
	struct xarray qps;
};

/* Ring in host memory, with a doorbell record. */
struct kite_mlx5_ring {
	struct mlx5_db db;
	struct mlx5_frag_buf buf;
	struct mlx5_frag_buf_ctrl fbc;
	u32 count;
};

struct kite_mlx5_cq {
	struct kite_mlx5_dev *dev;
	struct mlx5_core_cq mcq;
	struct kite_mlx5_ring ring;
	/* Serializes pollers. */
	spinlock_t lock;
	bool overflowed;
	/*
	 * Receivers whose creation command is in progress: their CQEs may precede the number that
	 * the command returns.
	 */
	atomic_t pending_receivers;
	void (*comp_handler)(void *context);
	void *context;
	/* QPs of send CQEs, and RMPs of receive CQEs, by the number in the CQE. */
	struct xarray send_qps;
	struct xarray recv_rmps;
};

/* Software state of a WQE of a pool. */
struct kite_mlx5_rmp_entry {
	u64 wr_id;
	bool posted;
};

struct kite_mlx5_rmp {
	struct kite_mlx5_dev *dev;
	struct kite_mlx5_ring ring;
	u32 rmpn;
	u32 max_sge;
	/* Data segments per WQE. */
	u32 data_segs;
	/* Serializes posts and the return of entries. */
	spinlock_t lock;
	/* Free WQEs are linked from head to tail. The tail is never posted. */
	u16 head;
	u16 tail;
	u16 counter;
	struct kite_mlx5_rmp_entry entries[];
};

struct kite_mlx5_dct {
	struct kite_mlx5_dev *dev;
	struct kite_mlx5_cq *cq;
	struct completion drained;
	bool draining;
	u32 dctn;
};

/* Software state of a WQE, at the index of its first block. */
struct kite_mlx5_sq_entry {
	u64 wr_id;
	u32 wqebbs;
};

struct kite_mlx5_qp {
	struct kite_mlx5_dev *dev;
	struct kite_mlx5_qp_init init;
	struct kite_mlx5_ring ring;
	u32 qpn;
	/* A transition out of RESET was attempted. */
	bool started;
	/* The SRQ_LAST_WQE event: no further receive WQEs are consumed. */
	struct completion last_wqe_reached;
	/* Serializes posts. */
	spinlock_t lock;
	/* Blocks posted and completed since the reset. Posts write head, pollers write tail. */
	u32 head;
	u32 tail;
	struct kite_mlx5_sq_entry posted[];
};

static inline bool kite_mlx5_has_failed(const struct kite_mlx5_dev *dev)
{
	return READ_ONCE(dev->mdev->state) == MLX5_DEVICE_STATE_INTERNAL_ERROR;
}

static inline void *kite_mlx5_ring_entry(struct kite_mlx5_ring *ring, u32 i)
{
	return mlx5_frag_buf_get_wqe(&ring->fbc, i & (ring->count - 1));
}

/* @count: number of entries, @size: bytes of each; both powers of two */
int kite_mlx5_ring_alloc(struct kite_mlx5_dev *dev, struct kite_mlx5_ring *ring, u32 count,
			 u32 size);
void kite_mlx5_ring_free(struct kite_mlx5_dev *dev, struct kite_mlx5_ring *ring);

/* Removes the CQEs of a number. No further CQEs may arrive, and the number is not reused yet. */
void kite_mlx5_cq_clean_sends(struct kite_mlx5_qp *qp);
void kite_mlx5_cq_clean_recvs(struct kite_mlx5_cq *cq, u32 number);

/*
 * Releases the WQE at @block, which the CQE names, and all before it. Returns false if none is
 * posted there, which is a hardware fault.
 */
bool kite_mlx5_complete_send(struct kite_mlx5_qp *qp, u16 block, u64 *wr_id);
/* Releases the oldest WQE in flight without a CQE. Returns false if there is none. */
bool kite_mlx5_flush_send(struct kite_mlx5_qp *qp, u64 *wr_id);
/* Returns a WQE to the pool. Returns false if the WQE was not posted. */
bool kite_mlx5_rmp_free_entry(struct kite_mlx5_rmp *rmp, u16 i, u64 *wr_id);

#endif /* _KITE_MLX5_OBJECTS_H */
