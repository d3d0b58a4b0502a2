// SPDX-License-Identifier: GPL-2.0
/*
 * DC targets (DCT). A DCT receives the requests of all peers, and takes receive WQEs from an RMP.
 *
 * A DCT is drained before it is destroyed: afterwards no packet that it has accepted is in flight.
 */
#include <linux/slab.h>

#include "mlx5_objects.h"

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
