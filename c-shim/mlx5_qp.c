// SPDX-License-Identifier: GPL-2.0
/*
 * QPs: creation, the transitions RESET to RTS, ERR and RESET, destruction.
 *
 * A DCI has no peer: each work request has the address vector and number of a DCT. An RC QP has its
 * path in the QP context.
 */
#include <linux/slab.h>

#include "mlx5_objects.h"

/* Maximum wait for the SRQ_LAST_WQE event after a transition to ERR. */
#define LAST_WQE_TIMEOUT_JIFFIES HZ

/* Sets the fields of the QP context that each command repeats. */
static void set_qpc_common(struct kite_mlx5_qp *qp, void *qpc)
{
	const struct kite_mlx5_qp_init *init = &qp->init;
	const struct kite_mlx5_cq *recv_cq = init->recv_cq ?: init->send_cq;

	MLX5_SET(qpc, qpc, st, init->type == KITE_MLX5_DCI ? MLX5_QP_ST_DCI : MLX5_QP_ST_RC);
	MLX5_SET(qpc, qpc, pm_state, MLX5_QP_PM_MIGRATED);
	MLX5_SET(qpc, qpc, pd, qp->dev->pdn);
	if (MLX5_CAP_GEN(qp->dev->mdev, cqe_version) == 1)
		MLX5_SET(qpc, qpc, user_index, NO_USER_INDEX);
	MLX5_SET(qpc, qpc, cqn_snd, init->send_cq->mcq.cqn);
	MLX5_SET(qpc, qpc, cqn_rcv, recv_cq->mcq.cqn);
}

static void set_qpc_queues(struct kite_mlx5_qp *qp, void *qpc)
{
	struct kite_mlx5_ring *ring = &qp->ring;

	MLX5_SET(qpc, qpc, uar_page, qp->dev->bfreg.index);
	MLX5_SET(qpc, qpc, ts_format, mlx5_get_qp_default_ts(qp->dev->mdev));
	MLX5_SET(qpc, qpc, log_page_size, ring->buf.page_shift - MLX5_ADAPTER_PAGE_SHIFT);
	MLX5_SET(qpc, qpc, log_sq_size, ilog2(ring->count));
	MLX5_SET64(qpc, qpc, dbr_addr, ring->db.dma);
	if (qp->init.rmp) {
		MLX5_SET(qpc, qpc, rq_type, MLX5_SRQ_RQ);
		MLX5_SET(qpc, qpc, srqn_rmpn_xrqn, qp->init.rmp->rmpn);
	} else {
		MLX5_SET(qpc, qpc, rq_type, MLX5_ZERO_LEN_RQ);
	}
}

static int create_qp(struct kite_mlx5_qp *qp)
{
	struct kite_mlx5_ring *ring = &qp->ring;
	u32 out[MLX5_ST_SZ_DW(create_qp_out)] = {};
	int len = MLX5_ST_SZ_BYTES(create_qp_in) + ring->buf.npages * sizeof(__be64);
	void *in, *qpc;
	int err;

	in = kvzalloc(len, GFP_KERNEL);
	if (!in)
		return -ENOMEM;
	MLX5_SET(create_qp_in, in, opcode, MLX5_CMD_OP_CREATE_QP);
	qpc = MLX5_ADDR_OF(create_qp_in, in, qpc);
	set_qpc_common(qp, qpc);
	set_qpc_queues(qp, qpc);
	mlx5_fill_page_frag_array(&ring->buf, (__be64 *)MLX5_ADDR_OF(create_qp_in, in, pas));
	err = mlx5_cmd_exec(qp->dev->mdev, in, len, out, sizeof(out));
	kvfree(in);
	qp->qpn = MLX5_GET(create_qp_out, out, qpn);
	return err;
}

static int destroy_qp(struct kite_mlx5_qp *qp)
{
	u32 in[MLX5_ST_SZ_DW(destroy_qp_in)] = {};

	MLX5_SET(destroy_qp_in, in, opcode, MLX5_CMD_OP_DESTROY_QP);
	MLX5_SET(destroy_qp_in, in, qpn, qp->qpn);
	return mlx5_cmd_exec_in(qp->dev->mdev, destroy_qp, in);
}

/* Makes the QP visible to pollers and event handlers. The QP is in RESET. */
static void register_qp(struct kite_mlx5_qp *qp)
{
	xa_store(&qp->init.send_cq->send_qps, qp->qpn, qp, GFP_KERNEL_NOFAIL);
	if (!qp->init.rmp)
		return;
	xa_store(&qp->init.recv_cq->recv_rmps, qp->qpn, qp->init.rmp, GFP_KERNEL_NOFAIL);
	xa_store_irq(&qp->dev->qps, qp->qpn, qp, GFP_KERNEL_NOFAIL);
}

static void unregister_qp(struct kite_mlx5_qp *qp)
{
	struct kite_mlx5_cq *cq = qp->init.send_cq;

	xa_erase(&cq->send_qps, qp->qpn);
	/* A poller of a failed RNIC may hold a pointer to the QP under this lock. */
	spin_lock_irq(&cq->lock);
	spin_unlock_irq(&cq->lock);
	if (!qp->init.rmp)
		return;
	xa_erase(&qp->init.recv_cq->recv_rmps, qp->qpn);
	xa_erase_irq(&qp->dev->qps, qp->qpn);
}

static bool is_valid_init(struct kite_mlx5_dev *dev, const struct kite_mlx5_qp_init *init)
{
	return init->wqebbs && init->wqebbs <= BIT(MLX5_CAP_GEN(dev->mdev, log_max_qp_sz)) &&
	       !init->recv_cq == !init->rmp && (init->type == KITE_MLX5_RC || !init->rmp);
}

struct kite_mlx5_qp *kite_mlx5_qp_create(struct kite_mlx5_dev *dev,
					 const struct kite_mlx5_qp_init *init)
{
	struct kite_mlx5_qp *qp;
	u32 count;
	int err;

	if (!is_valid_init(dev, init))
		return ERR_PTR(-EINVAL);
	count = roundup_pow_of_two(init->wqebbs);
	qp = kvzalloc(struct_size(qp, posted, count), GFP_KERNEL);
	if (!qp)
		return ERR_PTR(-ENOMEM);
	qp->dev = dev;
	qp->init = *init;
	spin_lock_init(&qp->lock);
	init_completion(&qp->last_wqe_reached);
	err = kite_mlx5_ring_alloc(dev, &qp->ring, count, MLX5_SEND_WQE_BB);
	if (err)
		goto free;
	err = create_qp(qp);
	if (err)
		goto free_ring;
	register_qp(qp);
	return qp;

free_ring:
	kite_mlx5_ring_free(dev, &qp->ring);
free:
	kvfree(qp);
	return ERR_PTR(err);
}

u32 kite_mlx5_qp_number(const struct kite_mlx5_qp *qp)
{
	return qp->qpn;
}

static bool is_ethernet(struct kite_mlx5_qp *qp)
{
	return MLX5_CAP_GEN(qp->dev->mdev, port_type) == MLX5_CAP_PORT_TYPE_ETH;
}

/* One UDP source port per QP: a flow has one path, and different QPs have different paths. */
static void set_roce_path(struct kite_mlx5_qp *qp, void *ads, const struct mlx5_av *av, u32 dest)
{
	u32 flow_label = be32_to_cpu(av->grh_gid_fl) & 0xfffff;

	MLX5_SET(ads, ads, eth_prio, av->stat_rate_sl >> 1 & 7);
	MLX5_SET(ads, ads, dscp, av->tclass >> 2);
	MLX5_SET(ads, ads, tclass, av->tclass & ~3);
	MLX5_SET(ads, ads, udp_sport, rdma_get_udp_sport(flow_label, qp->qpn, dest));
	memcpy(MLX5_ADDR_OF(ads, ads, rmac_47_32), av->rmac, sizeof(av->rmac));
}

static void set_ib_path(void *ads, const struct mlx5_av *av)
{
	MLX5_SET(ads, ads, grh, be32_to_cpu(av->grh_gid_fl) >> 30 & 1);
	MLX5_SET(ads, ads, sl, av->stat_rate_sl & 0xf);
	MLX5_SET(ads, ads, tclass, av->tclass);
	MLX5_SET(ads, ads, rlid, be16_to_cpu(av->rlid));
	MLX5_SET(ads, ads, mlid, av->fl_mlid & 0x7f);
}

/* Converts an address vector to the path of a QP context. */
static void set_rc_path(struct kite_mlx5_qp *qp, void *ads, const struct kite_mlx5_qp_attr *attr)
{
	const struct mlx5_av *av = (const struct mlx5_av *)attr->av;
	u32 grh = be32_to_cpu(av->grh_gid_fl);

	MLX5_SET(ads, ads, src_addr_index, grh >> 20 & 0xff);
	MLX5_SET(ads, ads, flow_label, grh & 0xfffff);
	MLX5_SET(ads, ads, hop_limit, av->hop_limit);
	MLX5_SET(ads, ads, stat_rate, av->stat_rate_sl >> 4);
	memcpy(MLX5_ADDR_OF(ads, ads, rgid_rip), av->rgid, sizeof(av->rgid));
	if (is_ethernet(qp))
		set_roce_path(qp, ads, av, attr->dest_qp_num);
	else
		set_ib_path(ads, av);
}

/* Sets the fields of the path that a DCI uses for all peers. */
static void set_dci_path(struct kite_mlx5_qp *qp, void *ads, const struct kite_mlx5_qp_attr *attr)
{
	if (is_ethernet(qp)) {
		MLX5_SET(ads, ads, eth_prio, attr->sl & 7);
		MLX5_SET(ads, ads, src_addr_index, attr->sgid_index);
	} else {
		MLX5_SET(ads, ads, sl, attr->sl);
	}
}

static int modify_to_init(struct kite_mlx5_qp *qp, const struct kite_mlx5_qp_attr *attr)
{
	u32 in[MLX5_ST_SZ_DW(rst2init_qp_in)] = {};
	void *qpc = MLX5_ADDR_OF(rst2init_qp_in, in, qpc);
	void *ads = MLX5_ADDR_OF(qpc, qpc, primary_address_path);

	MLX5_SET(rst2init_qp_in, in, opcode, MLX5_CMD_OP_RST2INIT_QP);
	MLX5_SET(rst2init_qp_in, in, qpn, qp->qpn);
	set_qpc_common(qp, qpc);
	MLX5_SET(ads, ads, vhca_port_num, attr->port);
	MLX5_SET(ads, ads, pkey_index, attr->pkey_index);
	MLX5_SET(qpc, qpc, rre, !!(attr->access & IB_ACCESS_REMOTE_READ));
	MLX5_SET(qpc, qpc, rwe, !!(attr->access & IB_ACCESS_REMOTE_WRITE));
	if (attr->access & IB_ACCESS_REMOTE_ATOMIC) {
		MLX5_SET(qpc, qpc, rae, 1);
		MLX5_SET(qpc, qpc, atomic_mode, MLX5_ATOMIC_MODE_IB_COMP);
	}
	return mlx5_cmd_exec_in(qp->dev->mdev, rst2init_qp, in);
}

static u32 log2_depth(u8 depth)
{
	return depth ? ilog2(roundup_pow_of_two(depth)) : 0;
}

static int modify_to_rtr(struct kite_mlx5_qp *qp, const struct kite_mlx5_qp_attr *attr)
{
	u32 in[MLX5_ST_SZ_DW(init2rtr_qp_in)] = {};
	void *qpc = MLX5_ADDR_OF(init2rtr_qp_in, in, qpc);
	void *ads = MLX5_ADDR_OF(qpc, qpc, primary_address_path);

	MLX5_SET(init2rtr_qp_in, in, opcode, MLX5_CMD_OP_INIT2RTR_QP);
	MLX5_SET(init2rtr_qp_in, in, qpn, qp->qpn);
	set_qpc_common(qp, qpc);
	MLX5_SET(qpc, qpc, mtu, attr->mtu);
	MLX5_SET(qpc, qpc, log_msg_max, MLX5_CAP_GEN(qp->dev->mdev, log_max_msg));
	if (qp->init.type == KITE_MLX5_RC) {
		set_rc_path(qp, ads, attr);
		MLX5_SET(qpc, qpc, remote_qpn, attr->dest_qp_num);
		MLX5_SET(qpc, qpc, next_rcv_psn, attr->rq_psn);
		MLX5_SET(qpc, qpc, min_rnr_nak, attr->min_rnr_timer);
		MLX5_SET(qpc, qpc, log_rra_max, log2_depth(attr->max_dest_rd_atomic));
	} else {
		set_dci_path(qp, ads, attr);
	}
	MLX5_SET(ads, ads, vhca_port_num, attr->port);
	MLX5_SET(ads, ads, pkey_index, attr->pkey_index);
	return mlx5_cmd_exec_in(qp->dev->mdev, init2rtr_qp, in);
}

static int modify_to_rts(struct kite_mlx5_qp *qp, const struct kite_mlx5_qp_attr *attr)
{
	u32 in[MLX5_ST_SZ_DW(rtr2rts_qp_in)] = {};
	void *qpc = MLX5_ADDR_OF(rtr2rts_qp_in, in, qpc);
	void *ads = MLX5_ADDR_OF(qpc, qpc, primary_address_path);

	MLX5_SET(rtr2rts_qp_in, in, opcode, MLX5_CMD_OP_RTR2RTS_QP);
	MLX5_SET(rtr2rts_qp_in, in, qpn, qp->qpn);
	set_qpc_common(qp, qpc);
	/* As in mlx5_ib: at least one packet in 256 requests an acknowledgment. */
	MLX5_SET(qpc, qpc, log_ack_req_freq, 8);
	MLX5_SET(qpc, qpc, retry_count, attr->retry_cnt);
	MLX5_SET(qpc, qpc, rnr_retry, attr->rnr_retry);
	MLX5_SET(qpc, qpc, next_send_psn, attr->sq_psn);
	MLX5_SET(qpc, qpc, log_sra_max, log2_depth(attr->max_rd_atomic));
	MLX5_SET(ads, ads, ack_timeout, attr->timeout);
	return mlx5_cmd_exec_in(qp->dev->mdev, rtr2rts_qp, in);
}

int kite_mlx5_qp_to_rts(struct kite_mlx5_qp *qp, const struct kite_mlx5_qp_attr *attr)
{
	bool rc = qp->init.type == KITE_MLX5_RC;

	if (rc != !!attr->av)
		return -EINVAL;
	qp->started = true;
	reinit_completion(&qp->last_wqe_reached);
	return modify_to_init(qp, attr) ?: modify_to_rtr(qp, attr) ?: modify_to_rts(qp, attr);
}

int kite_mlx5_qp_to_err(struct kite_mlx5_qp *qp)
{
	u32 in[MLX5_ST_SZ_DW(qp_2err_in)] = {};

	MLX5_SET(qp_2err_in, in, opcode, MLX5_CMD_OP_2ERR_QP);
	MLX5_SET(qp_2err_in, in, qpn, qp->qpn);
	return mlx5_cmd_exec_in(qp->dev->mdev, qp_2err, in);
}

/*
 * Moves the QP to ERR and waits until it consumes no further receive WQEs. The hardware returns the
 * WQE of a partially received message only on a transition to ERR.
 */
static void quiesce_receives(struct kite_mlx5_qp *qp)
{
	if (!qp->init.rmp || !qp->started)
		return;
	/*
	 * The QP may be in ERR already, and the event was raised then. A QP in RESET rejects the
	 * transition.
	 */
	if (!kite_mlx5_qp_to_err(qp) && !kite_mlx5_has_failed(qp->dev))
		wait_for_completion_timeout(&qp->last_wqe_reached, LAST_WQE_TIMEOUT_JIFFIES);
}

int kite_mlx5_qp_to_reset(struct kite_mlx5_qp *qp)
{
	u32 in[MLX5_ST_SZ_DW(qp_2rst_in)] = {};
	int err;

	quiesce_receives(qp);
	MLX5_SET(qp_2rst_in, in, opcode, MLX5_CMD_OP_2RST_QP);
	MLX5_SET(qp_2rst_in, in, qpn, qp->qpn);
	err = mlx5_cmd_exec_in(qp->dev->mdev, qp_2rst, in);
	if (err)
		return err;
	qp->started = false;
	kite_mlx5_cq_clean_sends(qp);
	if (qp->init.rmp)
		kite_mlx5_cq_clean_recvs(qp->init.recv_cq, qp->qpn);
	qp->ring.db.db[MLX5_SND_DBR] = 0;
	return 0;
}

int kite_mlx5_qp_destroy(struct kite_mlx5_qp *qp)
{
	int err = kite_mlx5_qp_to_reset(qp);

	if (err)
		return err;
	/* The firmware may reuse the number as soon as the command returns. */
	unregister_qp(qp);
	err = destroy_qp(qp);
	if (err)
		return err;
	kite_mlx5_ring_free(qp->dev, &qp->ring);
	kvfree(qp);
	return 0;
}
