// SPDX-License-Identifier: GPL-2.0
/*
 * The least that a read or write costs in the kernel: a queue pair on each of two RNICs of this
 * machine, one request posted, and its completion polled for. Like kite it uses the keys to all
 * memory, so nothing is registered. MAC addresses are not resolved: Soft-RoCE does that itself.
 */
#include <linux/netdevice.h>
#include <linux/slab.h>

#include <rdma/ib_cache.h>
#include <rdma/ib_verbs.h>

#include "latency.h"
#include "qp.h"

/* What one RNIC has. */
struct end {
	struct ib_device *device;
	struct ib_pd *pd;
	struct ib_cq *cq;
	struct ib_qp *qp;
	union ib_gid gid;
	enum ib_mtu mtu;
	u64 addr;
};

static struct end near, far;
static void *lent;
static size_t len;

static struct ib_device *device_of(const char *netdev)
{
	struct net_device *net = dev_get_by_name(&init_net, netdev);
	struct ib_device *device = net ? ib_device_get_by_netdev(net, RDMA_DRIVER_UNKNOWN) : NULL;

	dev_put(net);
	return device;
}

static int look_at_port(struct end *end)
{
	struct ib_port_attr attr;
	int err = ib_query_port(end->device, PORT, &attr);

	end->mtu = attr.active_mtu;
	return err ?: rdma_query_gid(end->device, PORT, 0, &end->gid);
}

static int make_queues(struct end *end)
{
	struct ib_cq_init_attr depth = { .cqe = 16 };
	struct ib_qp_init_attr attr = {
		.qp_type = IB_QPT_RC,
		.cap = { .max_send_wr = 4, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1 },
	};

	end->pd = ib_alloc_pd(end->device, IB_PD_UNSAFE_GLOBAL_RKEY);
	if (IS_ERR(end->pd))
		return PTR_ERR(end->pd);
	end->cq = ib_create_cq(end->device, NULL, NULL, NULL, &depth);
	if (IS_ERR(end->cq))
		return PTR_ERR(end->cq);
	attr.send_cq = end->cq;
	attr.recv_cq = end->cq;
	end->qp = ib_create_qp(end->pd, &attr);
	return PTR_ERR_OR_ZERO(end->qp);
}

static int make(struct end *end, const char *netdev, void *buf)
{
	int err;

	end->device = device_of(netdev);
	if (!end->device)
		return -ENODEV;
	end->addr = ib_dma_map_single(end->device, buf, len, DMA_BIDIRECTIONAL);
	if (ib_dma_mapping_error(end->device, end->addr)) {
		end->addr = 0;
		return -ENOMEM;
	}
	err = look_at_port(end);
	return err ?: make_queues(end);
}

static void unmake(struct end *end)
{
	if (!IS_ERR_OR_NULL(end->qp))
		ib_destroy_qp(end->qp);
	if (!IS_ERR_OR_NULL(end->cq))
		ib_destroy_cq(end->cq);
	if (!IS_ERR_OR_NULL(end->pd))
		ib_dealloc_pd(end->pd);
	if (end->addr)
		ib_dma_unmap_single(end->device, end->addr, len, DMA_BIDIRECTIONAL);
	if (end->device)
		ib_device_put(end->device);
}

static int to_receive(struct end *end, struct end *peer)
{
	struct ib_qp_attr attr = {
		.qp_state = IB_QPS_RTR,
		.path_mtu = min(end->mtu, peer->mtu),
		.dest_qp_num = peer->qp->qp_num,
		.max_dest_rd_atomic = 1,
		.min_rnr_timer = 12,
		.ah_attr.type = rdma_ah_find_type(end->device, PORT),
	};

	rdma_ah_set_port_num(&attr.ah_attr, PORT);
	rdma_ah_set_grh(&attr.ah_attr, &peer->gid, 0, 0, 64, 0);
	return ib_modify_qp(end->qp, &attr,
			    IB_QP_STATE | IB_QP_AV | IB_QP_PATH_MTU | IB_QP_DEST_QPN |
			    IB_QP_RQ_PSN | IB_QP_MAX_DEST_RD_ATOMIC | IB_QP_MIN_RNR_TIMER);
}

static int connect(struct end *end, struct end *peer)
{
	int err = to_init(end->qp);

	if (!err)
		err = to_receive(end, peer);
	return err ?: to_send(end->qp);
}

static int open_verbs(const char *from, const char *to, void *buf, size_t size)
{
	int err;

	len = size;
	lent = kzalloc(size, GFP_KERNEL);
	if (!lent)
		return -ENOMEM;
	err = make(&near, from, buf);
	if (!err)
		err = make(&far, to, lent);
	if (!err)
		err = connect(&far, &near);
	return err ?: connect(&near, &far);
}

static int transfer_verbs(bool write)
{
	struct ib_sge sge = { .addr = near.addr, .length = len, .lkey = near.pd->local_dma_lkey };
	struct ib_rdma_wr request = {
		.wr.sg_list = &sge,
		.wr.num_sge = 1,
		.wr.send_flags = IB_SEND_SIGNALED,
		.wr.opcode = write ? IB_WR_RDMA_WRITE : IB_WR_RDMA_READ,
		.remote_addr = far.addr,
		.rkey = far.pd->unsafe_global_rkey,
	};
	struct ib_wc wc;
	int err = ib_post_send(near.qp, &request.wr, NULL);

	if (err)
		return err;
	while (!ib_poll_cq(near.cq, 1, &wc))
		cpu_relax();
	return wc.status == IB_WC_SUCCESS ? 0 : -EIO;
}

static void close_verbs(void)
{
	unmake(&near);
	unmake(&far);
	kfree(lent);
}

const struct contender verbs_contender = {
	.name = "verbs",
	.open = open_verbs,
	.transfer = transfer_verbs,
	.close = close_verbs,
};
