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
struct endpoint {
	struct ib_device *device;
	struct ib_pd *pd;
	struct ib_cq *cq;
	struct ib_qp *qp;
	union ib_gid gid;
	enum ib_mtu mtu;
	u64 addr;
};

static struct endpoint near, far;
static void *remote_buf;
static size_t len;

static struct ib_device *find_ib_device(const char *netdev)
{
	struct net_device *net = dev_get_by_name(&init_net, netdev);
	struct ib_device *device = net ? ib_device_get_by_netdev(net, RDMA_DRIVER_UNKNOWN) : NULL;

	dev_put(net);
	return device;
}

static int query_port(struct endpoint *endpoint)
{
	struct ib_port_attr attr;
	int err = ib_query_port(endpoint->device, PORT, &attr);

	endpoint->mtu = attr.active_mtu;
	return err ?: rdma_query_gid(endpoint->device, PORT, 0, &endpoint->gid);
}

static int create_queues(struct endpoint *endpoint)
{
	struct ib_cq_init_attr depth = { .cqe = 16 };
	struct ib_qp_init_attr attr = {
		.qp_type = IB_QPT_RC,
		.cap = { .max_send_wr = 4, .max_recv_wr = 1, .max_send_sge = 1, .max_recv_sge = 1 },
	};

	endpoint->pd = ib_alloc_pd(endpoint->device, IB_PD_UNSAFE_GLOBAL_RKEY);
	if (IS_ERR(endpoint->pd))
		return PTR_ERR(endpoint->pd);
	endpoint->cq = ib_create_cq(endpoint->device, NULL, NULL, NULL, &depth);
	if (IS_ERR(endpoint->cq))
		return PTR_ERR(endpoint->cq);
	attr.send_cq = endpoint->cq;
	attr.recv_cq = endpoint->cq;
	endpoint->qp = ib_create_qp(endpoint->pd, &attr);
	return PTR_ERR_OR_ZERO(endpoint->qp);
}

static int create_objects(struct endpoint *endpoint, const char *netdev, void *buf)
{
	int err;

	endpoint->device = find_ib_device(netdev);
	if (!endpoint->device)
		return -ENODEV;
	endpoint->addr = ib_dma_map_single(endpoint->device, buf, len, DMA_BIDIRECTIONAL);
	if (ib_dma_mapping_error(endpoint->device, endpoint->addr)) {
		endpoint->addr = 0;
		return -ENOMEM;
	}
	err = query_port(endpoint);
	return err ?: create_queues(endpoint);
}

static void destroy_objects(struct endpoint *endpoint)
{
	if (!IS_ERR_OR_NULL(endpoint->qp))
		ib_destroy_qp(endpoint->qp);
	if (!IS_ERR_OR_NULL(endpoint->cq))
		ib_destroy_cq(endpoint->cq);
	if (!IS_ERR_OR_NULL(endpoint->pd))
		ib_dealloc_pd(endpoint->pd);
	if (endpoint->addr)
		ib_dma_unmap_single(endpoint->device, endpoint->addr, len, DMA_BIDIRECTIONAL);
	if (endpoint->device)
		ib_device_put(endpoint->device);
}

static int modify_to_rtr(struct endpoint *endpoint, struct endpoint *peer)
{
	struct ib_qp_attr attr = {
		.qp_state = IB_QPS_RTR,
		.path_mtu = min(endpoint->mtu, peer->mtu),
		.dest_qp_num = peer->qp->qp_num,
		.max_dest_rd_atomic = 1,
		.min_rnr_timer = 12,
		.ah_attr.type = rdma_ah_find_type(endpoint->device, PORT),
	};

	rdma_ah_set_port_num(&attr.ah_attr, PORT);
	rdma_ah_set_grh(&attr.ah_attr, &peer->gid, 0, 0, 64, 0);
	return ib_modify_qp(endpoint->qp, &attr,
			    IB_QP_STATE | IB_QP_AV | IB_QP_PATH_MTU | IB_QP_DEST_QPN |
			    IB_QP_RQ_PSN | IB_QP_MAX_DEST_RD_ATOMIC | IB_QP_MIN_RNR_TIMER);
}

static int connect(struct endpoint *endpoint, struct endpoint *peer)
{
	int err = modify_to_init(endpoint->qp);

	if (!err)
		err = modify_to_rtr(endpoint, peer);
	return err ?: modify_to_rts(endpoint->qp);
}

static int open_verbs(const char *from, const char *to, void *buf, size_t size)
{
	int err;

	len = size;
	remote_buf = kzalloc(size, GFP_KERNEL);
	if (!remote_buf)
		return -ENOMEM;
	err = create_objects(&near, from, buf);
	if (!err)
		err = create_objects(&far, to, remote_buf);
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
	destroy_objects(&near);
	destroy_objects(&far);
	kfree(remote_buf);
}

const struct transport_ops verbs_ops = {
	.name = "verbs",
	.open = open_verbs,
	.transfer = transfer_verbs,
	.close = close_verbs,
};
