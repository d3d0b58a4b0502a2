// SPDX-License-Identifier: GPL-2.0
/*
 * Receive memory pools (RMP) and DC targets (DCT).
 *
 * An RMP is a linked list of WQEs, the format of shared receive queues. The hardware consumes the
 * WQEs in the order of the links. Completions return them in any order.
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

static void set_path(struct kite_mlx5_dct *dct, void *dctc, const struct kite_mlx5_dct_attr *attr)
{
	MLX5_SET(dctc, dctc, mtu, attr->mtu);
	MLX5_SET(dctc, dctc, port, attr->port);
	MLX5_SET(dctc, dctc, pkey_index, attr->pkey_index);
	MLX5_SET(dctc, dctc, my_addr_index, attr->sgid_index);
	MLX5_SET(dctc, dctc, hop_limit, attr->hop_limit);
	MLX5_SET(dctc, dctc, tclass, attr->traffic_class);
	MLX5_SET(dctc, dctc, flow_label, attr->flow_label);
	if (MLX5_CAP_GEN(dct->dev->mdev, port_type) == MLX5_CAP_PORT_TYPE_ETH)
		MLX5_SET(dctc, dctc, eth_prio, attr->sl & 7);
}

static int create_dct(struct kite_mlx5_dct *dct, const struct kite_mlx5_dct_attr *attr)
{
	u32 out[MLX5_ST_SZ_DW(create_dct_out)] = {};
	u32 in[MLX5_ST_SZ_DW(create_dct_in)] = {};
	void *dctc = MLX5_ADDR_OF(create_dct_in, in, dct_context_entry);
	int err;

	MLX5_SET(create_dct_in, in, opcode, MLX5_CMD_OP_CREATE_DCT);
	MLX5_SET(dctc, dctc, pd, dct->dev->pdn);
	MLX5_SET(dctc, dctc, cqn, attr->cq->mcq.cqn);
	MLX5_SET(dctc, dctc, srqn_xrqn, attr->rmp->rmpn);
	MLX5_SET(dctc, dctc, user_index, NO_USER_INDEX);
	MLX5_SET64(dctc, dctc, dc_access_key, attr->key);
	MLX5_SET(dctc, dctc, rre, !!(attr->access & IB_ACCESS_REMOTE_READ));
	MLX5_SET(dctc, dctc, rwe, !!(attr->access & IB_ACCESS_REMOTE_WRITE));
	if (attr->access & IB_ACCESS_REMOTE_ATOMIC) {
		MLX5_SET(dctc, dctc, rae, 1);
		MLX5_SET(dctc, dctc, atomic_mode, MLX5_ATOMIC_MODE_IB_COMP);
	}
	MLX5_SET(dctc, dctc, min_rnr_nak, attr->min_rnr_timer);
	set_path(dct, dctc, attr);
	err = mlx5_cmd_exec_inout(dct->dev->mdev, create_dct, in, out);
	dct->dctn = MLX5_GET(create_dct_out, out, dctn);
	return err;
}

static int destroy_dct(struct kite_mlx5_dct *dct)
{
	u32 in[MLX5_ST_SZ_DW(destroy_dct_in)] = {};

	MLX5_SET(destroy_dct_in, in, opcode, MLX5_CMD_OP_DESTROY_DCT);
	MLX5_SET(destroy_dct_in, in, dctn, dct->dctn);
	return mlx5_cmd_exec_in(dct->dev->mdev, destroy_dct, in);
}

static void register_dct(struct kite_mlx5_dct *dct, struct kite_mlx5_rmp *rmp)
{
	xa_store_irq(&dct->dev->dcts, dct->dctn, dct, GFP_KERNEL_NOFAIL);
	xa_store(&dct->cq->recv_rmps, dct->dctn, rmp, GFP_KERNEL_NOFAIL);
}

struct kite_mlx5_dct *kite_mlx5_dct_create(struct kite_mlx5_dev *dev,
					   const struct kite_mlx5_dct_attr *attr)
{
	struct kite_mlx5_dct *dct = kzalloc_obj(*dct);
	int err;

	if (!dct)
		return ERR_PTR(-ENOMEM);
	dct->dev = dev;
	dct->cq = attr->cq;
	init_completion(&dct->drained);
	/*
	 * A peer that sent to the previous DCT of this number may send to this one before the
	 * command returns the number.
	 */
	atomic_inc(&dct->cq->pending_receivers);
	err = create_dct(dct, attr);
	if (!err)
		register_dct(dct, attr->rmp);
	atomic_dec_return_release(&dct->cq->pending_receivers);
	if (!err)
		return dct;
	kfree(dct);
	return ERR_PTR(err);
}

u32 kite_mlx5_dct_number(const struct kite_mlx5_dct *dct)
{
	return dct->dctn;
}

int kite_mlx5_dct_key_violations(struct kite_mlx5_dct *dct, u32 *count)
{
	u32 out[MLX5_ST_SZ_DW(query_dct_out)] = {};
	u32 in[MLX5_ST_SZ_DW(query_dct_in)] = {};
	void *dctc = MLX5_ADDR_OF(query_dct_out, out, dct_context_entry);
	int err;

	MLX5_SET(query_dct_in, in, opcode, MLX5_CMD_OP_QUERY_DCT);
	MLX5_SET(query_dct_in, in, dctn, dct->dctn);
	err = mlx5_cmd_exec_inout(dct->dev->mdev, query_dct, in, out);
	*count = MLX5_GET(dctc, dctc, dc_access_key_violation_count);
	return err;
}

static int start_drain(struct kite_mlx5_dct *dct)
{
	u32 in[MLX5_ST_SZ_DW(drain_dct_in)] = {};
	int err;

	if (dct->draining)
		return 0;
	MLX5_SET(drain_dct_in, in, opcode, MLX5_CMD_OP_DRAIN_DCT);
	MLX5_SET(drain_dct_in, in, dctn, dct->dctn);
	err = mlx5_cmd_exec_in(dct->dev->mdev, drain_dct, in);
	dct->draining = !err;
	return err;
}

/* Drains the DCT. A failed RNIC has nothing to drain: returns 0. */
int kite_mlx5_dct_drain(struct kite_mlx5_dct *dct, unsigned long timeout_jiffies)
{
	int err = start_drain(dct);

	if (!err && !wait_for_completion_timeout(&dct->drained, timeout_jiffies))
		err = -ETIMEDOUT;
	if (kite_mlx5_has_failed(dct->dev))
		return 0;
	if (!err)
		/* A later attempt to destroy the DCT does not drain again. */
		complete(&dct->drained);
	return err;
}

int kite_mlx5_dct_destroy(struct kite_mlx5_dct *dct, unsigned long timeout_jiffies)
{
	int err = kite_mlx5_dct_drain(dct, timeout_jiffies);

	if (err)
		return err;
	/* The firmware may reuse the number as soon as the command returns. */
	kite_mlx5_cq_clean_recvs(dct->cq, dct->dctn);
	xa_erase(&dct->cq->recv_rmps, dct->dctn);
	xa_erase_irq(&dct->dev->dcts, dct->dctn);
	err = destroy_dct(dct);
	if (err)
		return err;
	kfree(dct);
	return 0;
}
