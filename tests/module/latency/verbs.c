// SPDX-License-Identifier: GPL-2.0
/*
 * Minimum cost of a read or write in the kernel: a queue pair on each of two RNICs of this machine,
 * one posted request, and polling for its completion. Like kite, this transport uses the keys to
 * all memory, so it registers none. It does not resolve MAC addresses: Soft-RoCE does that itself.
 */
#include <linux/netdevice.h>
#include <linux/slab.h>

#include <rdma/ib_cache.h>
#include <rdma/ib_verbs.h>

#include "../qp.h"
#include "latency.h"

/* Objects of one RNIC. */
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

	endpoint->pd = ib_alloc_pd(endpoint->device, IB_PD_UNSAFE_GLOBAL_RKEY);
	if (IS_ERR(endpoint->pd))
		return PTR_ERR(endpoint->pd);
	endpoint->cq = ib_create_cq(endpoint->device, NULL, NULL, NULL, &depth);
	if (IS_ERR(endpoint->cq))
		return PTR_ERR(endpoint->cq);
	endpoint->qp = create_rc_qp(endpoint->pd, endpoint->cq, 4);
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

static int connect(struct endpoint *endpoint, struct endpoint *peer)
{
	struct rdma_ah_attr path = { .type = rdma_ah_find_type(endpoint->device, PORT) };
	enum ib_mtu mtu = min(endpoint->mtu, peer->mtu);

	rdma_ah_set_port_num(&path, PORT);
	rdma_ah_set_grh(&path, &peer->gid, 0, 0, 64, 0);
	return modify_to_init(endpoint->qp) ?:
	       modify_to_rtr(endpoint->qp, peer->qp->qp_num, mtu, &path) ?:
	       modify_to_rts(endpoint->qp);
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
