// SPDX-License-Identifier: GPL-2.0
/* Work requests of kite_fastreg.ko, and the connection of its two queue pairs. */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/delay.h>
#include <linux/jiffies.h>

#include <rdma/ib_cache.h>

#include "fastreg.h"

static void on_request_done(struct ib_cq *from, struct ib_wc *wc)
{
	struct request *request = container_of(wc->wr_cqe, struct request, cqe);

	request->wc = *wc;
	complete(&request->done);
}

static void init_request(struct request *request)
{
	request->cqe.done = on_request_done;
	init_completion(&request->done);
}

static int wait_request(struct request *request, enum ib_wc_status expected)
{
	if (!wait_for_completion_timeout(&request->done, TIMEOUT_JIFFIES))
		return -ETIMEDOUT;
	if (request->wc.status == expected)
		return 0;
	pr_err("a request ended with \"%s\" instead of \"%s\"\n",
	       ib_wc_status_msg(request->wc.status), ib_wc_status_msg(expected));
	return -EIO;
}

static int send(struct endpoint *end, struct ib_send_wr *wr, enum ib_wc_status expected)
{
	int err;

	init_request(&end->send);
	wr->wr_cqe = &end->send.cqe;
	wr->send_flags |= IB_SEND_SIGNALED;
	err = ib_post_send(end->qp, wr, NULL);
	return err ?: wait_request(&end->send, expected);
}

int post_reg_mr(int access)
{
	struct ib_reg_wr wr = {
		.wr.opcode = IB_WR_REG_MR,
		.mr = mr,
		.key = mr->rkey,
		.access = access,
	};

	return send(&far, &wr.wr, IB_WC_SUCCESS);
}

int invalidate(void)
{
	struct ib_send_wr wr = { .opcode = IB_WR_LOCAL_INV, .ex.invalidate_rkey = mr->rkey };

	return send(&far, &wr, IB_WC_SUCCESS);
}

/* Near invalidates the key by a SEND with Invalidate; the completion of far names the key. */
int post_send_with_inv(void)
{
	struct ib_send_wr wr = { .opcode = IB_WR_SEND_WITH_INV, .ex.invalidate_rkey = mr->rkey };
	struct ib_recv_wr receive = { .wr_cqe = &far.receive.cqe };
	const struct ib_wc *wc = &far.receive.wc;
	int err;

	init_request(&far.receive);
	err = ib_post_recv(far.qp, &receive, NULL);
	if (!err)
		err = send(&near, &wr, IB_WC_SUCCESS);
	if (!err)
		err = wait_request(&far.receive, IB_WC_SUCCESS);
	if (err)
		return err;
	if (!(wc->wc_flags & IB_WC_WITH_INVALIDATE) || wc->ex.invalidate_rkey != mr->rkey)
		return -EBADMSG;
	return 0;
}

/* Transfers all of the region from or to local memory. */
int transfer(enum ib_wr_opcode opcode, u32 key, enum ib_wc_status expected)
{
	bool write = opcode == IB_WR_RDMA_WRITE;
	enum dma_data_direction direction = write ? DMA_TO_DEVICE : DMA_FROM_DEVICE;
	struct ib_sge sge = { .length = mr->length, .lkey = pd->local_dma_lkey };
	struct ib_rdma_wr wr = {
		.wr.opcode = opcode,
		.wr.sg_list = &sge,
		.wr.num_sge = 1,
		.remote_addr = mr->iova,
		.rkey = key,
	};
	int err;

	sge.addr = ib_dma_map_single(device, local, LOCAL_BYTES, direction);
	if (ib_dma_mapping_error(device, sge.addr))
		return -ENOMEM;
	err = send(&near, &wr.wr, expected);
	ib_dma_unmap_single(device, sge.addr, LOCAL_BYTES, direction);
	return err;
}

static int get_path(struct rdma_ah_attr *path, struct ib_port_attr *port)
{
	int err = ib_query_port(device, PORT, port);
	const struct ib_gid_attr *attr;
	union ib_gid gid;

	if (err)
		return err;
	path->type = rdma_ah_find_type(device, PORT);
	rdma_ah_set_port_num(path, PORT);
	if (path->type == RDMA_AH_ATTR_TYPE_IB) {
		rdma_ah_set_dlid(path, port->lid);
		return 0;
	}
	attr = rdma_get_gid_attr(device, PORT, 0);
	if (IS_ERR(attr))
		return PTR_ERR(attr);
	gid = attr->gid;
	rdma_ah_set_grh(path, &gid, 0, 0, 64, 0);
	err = rdma_read_gid_l2_fields(attr, NULL, path->roce.dmac);
	rdma_put_gid_attr(attr);
	return err;
}

static int modify_to_reset(struct ib_qp *qp)
{
	struct ib_qp_attr attr = { .qp_state = IB_QPS_RESET };

	return ib_modify_qp(qp, &attr, IB_QP_STATE);
}

static int modify_peer_to_rtr(struct ib_qp *qp, struct ib_qp *peer)
{
	struct rdma_ah_attr path = {};
	struct ib_port_attr port = {};
	int err = get_path(&path, &port);

	return err ?: modify_to_rtr(qp, peer->qp_num, port.active_mtu, &path);
}

/* Connects the two queue pairs, from any state. An error has moved both to ERR. */
int connect(void)
{
	int err = modify_to_reset(near.qp) ?: modify_to_reset(far.qp);

	if (!err)
		err = modify_to_init(near.qp) ?: modify_to_init(far.qp);
	if (!err)
		err = modify_peer_to_rtr(near.qp, far.qp) ?: modify_peer_to_rtr(far.qp, near.qp);
	return err ?: modify_to_rts(near.qp) ?: modify_to_rts(far.qp);
}

/*
 * Waits until a queue pair is in ERR. Each side completes the request before it moves to ERR, and
 * that move would undo an earlier reset.
 */
int wait_qp_error(struct ib_qp *qp)
{
	unsigned long end = jiffies + TIMEOUT_JIFFIES;
	struct ib_qp_init_attr init;
	struct ib_qp_attr attr;
	int err;

	do {
		err = ib_query_qp(qp, &attr, IB_QP_STATE, &init);
		if (err || attr.qp_state == IB_QPS_ERR)
			return err;
		msleep(20);
	} while (time_before(jiffies, end));
	return -ETIMEDOUT;
}
