// SPDX-License-Identifier: GPL-2.0
/*
 * Receive memory pools (RMP).
 *
 * An RMP is a linked list of WQEs, the format of shared receive queues. The hardware consumes the
 * WQEs in the order of the links. Completions return them in any order.
 *
 * Locking: kite_mlx5_rmp::lock (irqsave) protects the list. Pollers take it under
 * kite_mlx5_cq::lock.
 */
#include <linux/slab.h>

#include "mlx5_objects.h"

static struct mlx5_wqe_srq_next_seg *get_next_seg(struct kite_mlx5_rmp *rmp, u16 i)
{
	return kite_mlx5_ring_entry(&rmp->ring, i);
}

/* A data segment of length 0 means 2 GiB to the hardware. */
static void fill_data_segs(struct kite_mlx5_rmp *rmp, void *at, const struct ib_sge *sge, int count)
{
	struct mlx5_wqe_data_seg *data = at;
	u32 filled = 0;
	int i;

	for (i = 0; i < count; i++) {
		if (!sge[i].length)
			continue;
		data[filled].byte_count = cpu_to_be32(sge[i].length);
		data[filled].lkey = cpu_to_be32(sge[i].lkey);
		data[filled].addr = cpu_to_be64(sge[i].addr);
		filled++;
	}
	if (filled < rmp->data_segs)
		data[filled] = (struct mlx5_wqe_data_seg) { .lkey = rmp->dev->terminate_mkey };
}

static bool is_valid_recv(const struct kite_mlx5_rmp *rmp, const struct ib_sge *sge, int count)
{
	int i;

	for (i = 0; i < count; i++)
		if (sge[i].length > S32_MAX)
			return false;
	return count >= 0 && count <= rmp->max_sge;
}

int kite_mlx5_rmp_post_recv(struct kite_mlx5_rmp *rmp, u64 wr_id, const struct ib_sge *sge,
			    int count)
{
	struct mlx5_wqe_srq_next_seg *link;
	unsigned long flags;
	int err = -ENOBUFS;

	if (!is_valid_recv(rmp, sge, count))
		return -EINVAL;
	if (kite_mlx5_has_failed(rmp->dev))
		return -ENODEV;
	spin_lock_irqsave(&rmp->lock, flags);
	if (rmp->head != rmp->tail) {
		link = get_next_seg(rmp, rmp->head);
		fill_data_segs(rmp, link + 1, sge, count);
		rmp->entries[rmp->head] = (struct kite_mlx5_rmp_entry) { wr_id, true };
		rmp->head = be16_to_cpu(link->next_wqe_index);
		rmp->counter++;
		/* The WQE is complete before the hardware sees the counter. */
		dma_wmb();
		*rmp->ring.db.db = cpu_to_be32(rmp->counter);
		err = 0;
	}
	spin_unlock_irqrestore(&rmp->lock, flags);
	return err;
}

bool kite_mlx5_rmp_free_entry(struct kite_mlx5_rmp *rmp, u16 i, u64 *wr_id)
{
	struct kite_mlx5_rmp_entry *receive;
	unsigned long flags;
	bool posted;

	i &= rmp->ring.count - 1;
	receive = &rmp->entries[i];
	spin_lock_irqsave(&rmp->lock, flags);
	*wr_id = receive->wr_id;
	posted = receive->posted;
	/* A WQE that is free already must not be linked twice. */
	if (posted) {
		receive->posted = false;
		get_next_seg(rmp, rmp->tail)->next_wqe_index = cpu_to_be16(i);
		rmp->tail = i;
	}
	spin_unlock_irqrestore(&rmp->lock, flags);
	return posted;
}

static void init_rmp(struct kite_mlx5_rmp *rmp)
{
	u32 i;

	spin_lock_init(&rmp->lock);
	rmp->tail = rmp->ring.count - 1;
	for (i = 0; i < rmp->ring.count; i++)
		get_next_seg(rmp, i)->next_wqe_index = cpu_to_be16((i + 1) & (rmp->ring.count - 1));
}

static int create_rmp(struct kite_mlx5_rmp *rmp, u32 size)
{
	struct kite_mlx5_ring *ring = &rmp->ring;
	u32 out[MLX5_ST_SZ_DW(create_rmp_out)] = {};
	int len = MLX5_ST_SZ_BYTES(create_rmp_in) + ring->buf.npages * sizeof(__be64);
	void *in, *rmpc, *wq;
	int err;

	in = kvzalloc(len, GFP_KERNEL);
	if (!in)
		return -ENOMEM;
	MLX5_SET(create_rmp_in, in, opcode, MLX5_CMD_OP_CREATE_RMP);
	rmpc = MLX5_ADDR_OF(create_rmp_in, in, ctx);
	MLX5_SET(rmpc, rmpc, state, MLX5_RMPC_STATE_RDY);
	wq = MLX5_ADDR_OF(rmpc, rmpc, wq);
	MLX5_SET(wq, wq, wq_type, MLX5_WQ_TYPE_LINKED_LIST);
	MLX5_SET(wq, wq, pd, rmp->dev->pdn);
	MLX5_SET(wq, wq, log_wq_pg_sz, ring->buf.page_shift - MLX5_ADAPTER_PAGE_SHIFT);
	MLX5_SET(wq, wq, log_wq_stride, ilog2(size));
	MLX5_SET(wq, wq, log_wq_sz, ilog2(ring->count));
	MLX5_SET64(wq, wq, dbr_addr, ring->db.dma);
	mlx5_fill_page_frag_array(&ring->buf, (__be64 *)MLX5_ADDR_OF(wq, wq, pas));
	err = mlx5_cmd_exec(rmp->dev->mdev, in, len, out, sizeof(out));
	kvfree(in);
	rmp->rmpn = MLX5_GET(create_rmp_out, out, rmpn);
	return err;
}

struct kite_mlx5_rmp *kite_mlx5_rmp_create(struct kite_mlx5_dev *dev, u32 max_wr, u32 max_sge)
{
	const u32 link = sizeof(struct mlx5_wqe_srq_next_seg);
	const u32 data_seg = sizeof(struct mlx5_wqe_data_seg);
	struct kite_mlx5_rmp *rmp;
	u32 count, size;
	int err;

	if (!max_wr || max_wr >= BIT(MLX5_CAP_GEN(dev->mdev, log_max_srq_sz)))
		return ERR_PTR(-EINVAL);
	if (!max_sge || max_sge > (MLX5_CAP_GEN(dev->mdev, max_wqe_sz_rq) - link) / data_seg)
		return ERR_PTR(-EINVAL);
	count = roundup_pow_of_two(max_wr + 1);
	size = roundup_pow_of_two(link + max_sge * data_seg);
	rmp = kvzalloc(struct_size(rmp, entries, count), GFP_KERNEL);
	if (!rmp)
		return ERR_PTR(-ENOMEM);
	rmp->dev = dev;
	rmp->max_sge = max_sge;
	rmp->data_segs = (size - link) / data_seg;
	err = kite_mlx5_ring_alloc(dev, &rmp->ring, count, size);
	if (err)
		goto free;
	init_rmp(rmp);
	err = create_rmp(rmp, size);
	if (err)
		goto free_ring;
	return rmp;

free_ring:
	kite_mlx5_ring_free(dev, &rmp->ring);
free:
	kvfree(rmp);
	return ERR_PTR(err);
}

int kite_mlx5_rmp_destroy(struct kite_mlx5_rmp *rmp)
{
	u32 in[MLX5_ST_SZ_DW(destroy_rmp_in)] = {};
	int err;

	MLX5_SET(destroy_rmp_in, in, opcode, MLX5_CMD_OP_DESTROY_RMP);
	MLX5_SET(destroy_rmp_in, in, rmpn, rmp->rmpn);
	err = mlx5_cmd_exec_in(rmp->dev->mdev, destroy_rmp, in);
	if (err)
		return err;
	kite_mlx5_ring_free(rmp->dev, &rmp->ring);
	kvfree(rmp);
	return 0;
}
