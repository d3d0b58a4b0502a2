/* SPDX-License-Identifier: GPL-2.0 */
/* What the parts of the bridge to mlx5_core know of each other's objects. */
#ifndef _KITE_MLX5_OBJECTS_H
#define _KITE_MLX5_OBJECTS_H

#include <linux/mlx5/cq.h>
#include <linux/mlx5/driver.h>
#include <linux/mlx5/qp.h>
#include <linux/xarray.h>

#include "mlx5.h"

#define QPN_MASK 0xffffffu
/* Completions then have numbers of objects, as if there were no indices. */
#define NO_USER_INDEX 0xffffffu
/* What an object needs to be found must not fail to be noted: the hardware has it already. */
#define GFP_KERNEL_NOFAIL (GFP_KERNEL | __GFP_NOFAIL)

struct kite_mlx5_dev {
	struct ib_pd *pd;
	struct mlx5_core_dev *mdev;
	u32 pdn;
	struct mlx5_sq_bfreg bfreg;
	/* The key in the piece that ends a list of data_segs. */
	__be32 terminate_mkey;
	struct notifier_block events;
	void (*on_fatal)(void *context);
	void *context;
	/* By number, under their locks: who waits for an event. */
	struct xarray dcts;
	struct xarray qps;
};

/* Memory that the RNIC reads and writes by itself: entries of one size, and a doorbell record. */
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
	/* Held by who polls. */
	spinlock_t lock;
	bool overflowed;
	/*
	 * How many recv_rmps are being made, of which completions may come before their numbers are
	 * known.
	 */
	atomic_t pending_receivers;
	void (*comp_handler)(void *context);
	void *context;
	/*
	 * By the number in a completion: the queue pair that sent, or the pool that was received
	 * into.
	 */
	struct xarray send_qps;
	struct xarray recv_rmps;
};

/* What is known of an entry of a pool. */
struct kite_mlx5_rmp_entry {
	u64 wr_id;
	bool posted;
};

struct kite_mlx5_rmp {
	struct kite_mlx5_dev *dev;
	struct kite_mlx5_ring ring;
	u32 rmpn;
	u32 max_sge;
	/* Pieces that there is room for in an entry. */
	u32 data_segs;
	/* Held by who posts or gives back. */
	spinlock_t lock;
	/* Free entries are linked from head to tail, the last of which is never posted. */
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

/* What is known of a work request, at the place of its first block. */
struct kite_mlx5_sq_entry {
	u64 wr_id;
	u32 wqebbs;
};

struct kite_mlx5_qp {
	struct kite_mlx5_dev *dev;
	struct kite_mlx5_qp_init init;
	struct kite_mlx5_ring ring;
	u32 qpn;
	/* It has left reset, or tried to. */
	bool started;
	/* Nothing is received any more. */
	struct completion last_wqe_reached;
	/* Held by who posts. */
	spinlock_t lock;
	/* Blocks posted and completed, ever since the reset; the tail is of who polls. */
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

/* @count: entries, a power of two; @size: of each in bytes, likewise */
int kite_mlx5_ring_alloc(struct kite_mlx5_dev *dev, struct kite_mlx5_ring *ring, u32 count, u32 size);
void kite_mlx5_ring_free(struct kite_mlx5_dev *dev, struct kite_mlx5_ring *ring);

/* Drops the completions of a number: nothing more may come, and it must not be another's yet. */
void kite_mlx5_cq_clean_sends(struct kite_mlx5_qp *qp);
void kite_mlx5_cq_clean_recvs(struct kite_mlx5_cq *cq, u32 number);

/*
 * The work request whose completion names this block, and all before it, have ended. False if there
 * was none, which would be a fault of the hardware.
 */
bool kite_mlx5_complete_send(struct kite_mlx5_qp *qp, u16 block, u64 *wr_id);
/* The first work request that is under way never completes. False if there is none. */
bool kite_mlx5_flush_send(struct kite_mlx5_qp *qp, u64 *wr_id);
/* An entry of the pool is free again; likewise. */
bool kite_mlx5_rmp_free_entry(struct kite_mlx5_rmp *rmp, u16 i, u64 *wr_id);

#endif /* _KITE_MLX5_OBJECTS_H */
